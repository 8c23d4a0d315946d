"""Save and load distributed checkpoints; any topology loads what any other saved.

A checkpoint is a torch.distributed.checkpoint (DCP) folder. Each rank saves the boxes in its optimizer shard of the float32
global tensors of each parameter, and the states of its random number generators:

    weights.<name>        master weights (bf16 weights are these, rounded)
    exp_avg.<name>        first moment of AdamW
    exp_avg_sq.<name>     second moment of AdamW
    random.<kind>.<rank>  a rank's random state, restored at the same topology only

Each element is written by one rank and read by those that need it; no rank holds or moves more than its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel.checkpoint.boxes import PREFIX, BoxedTensor, boxed_tensors
from parallel.checkpoint.locations import MARKER, CorruptCheckpoint, Location, name_of, read_marker
from parallel.checkpoint.reader import Reader
from parallel.checkpoint.saver import Saver, random_key
from parallel.device import random_states, set_random_states
from parallel.mesh import Mesh
from parallel.optimizer.sharded_adamw import ShardedAdamW


class LoadFailed(RuntimeError):
    """A checkpoint could not be read; it may still be intact."""


class OtherOptimizer(ValueError):
    """A checkpoint has the model's weights, but not the states of the optimizer's rules."""


def save(
    checkpoint: Location,
    optimizer: ShardedAdamW,
    marker: dict[str, Any],
    fencing_check: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint synchronously; arguments and errors as for `Saver`."""
    saver = Saver(optimizer, fencing_check=fencing_check)
    saver.begin(checkpoint, marker)
    saver.finish()


def load(checkpoint: Location, optimizer: ShardedAdamW, *, weights_only: bool = False) -> dict[str, Any]:
    """Load a checkpoint saved at any topology into the optimizer and the parameters. Collective.

    Args:
        weights_only: whether to leave moments, step count and random states as they are (continual pretraining).

    Returns:
        The marker: `marker` as passed to `save`, with optimizer steps, mesh and versions.

    Raises:
        CorruptCheckpoint: on all ranks, if any rank finds the checkpoint corrupted. States may be partly overwritten.
        OtherOptimizer: it has no states for the optimizer; its weights can be loaded.
        ValueError: the checkpoint is incomplete or of a different model; the message names the first difference.
        LoadFailed: a rank could not read it.
    """
    with _raised_on_all(optimizer.mesh):
        marker = read_marker(checkpoint)
        if not weights_only and not isinstance(marker.get("optimizer_steps"), int):
            raise CorruptCheckpoint(f"{checkpoint}: {MARKER} is corrupted: no optimizer_steps")
        random = _fill(checkpoint, marker, optimizer, weights_only)
    optimizer.gather_parameters()
    if not weights_only:
        optimizer.steps.fill_(marker["optimizer_steps"])
        set_random_states(optimizer.buckets[0].values.device, random)
    return marker


def load_frozen(checkpoint: Location, optimizer: ShardedAdamW) -> None:
    """Load the frozen weights from a checkpoint of any topology. Collective; errors as for `load`."""
    with _raised_on_all(optimizer.mesh):
        marker = read_marker(checkpoint)
        reader = Reader(checkpoint, marker.get("files"))
        targets = boxed_tensors(optimizer.frozen_boxes(), ["master"])
        _require_tensors(checkpoint, reader, targets)
        reader.load(targets)
    optimizer.gather_parameters()


def _require_tensors(checkpoint: Location, reader: Reader, targets: Mapping[str, BoxedTensor]) -> None:
    """Raise ValueError for the first tensor that a checkpoint lacks, or has in another shape."""
    for name, target in targets.items():
        if name not in reader.tensors:
            state, _, weight = name.partition(".")
            if state != PREFIX["master"] and f"{PREFIX['master']}.{weight}" in reader.tensors:
                raise OtherOptimizer(
                    f"checkpoint {name_of(checkpoint)}: no {state} of {weight}; it was saved with another optimizer, so only "
                    "its weights can be loaded"
                )
            raise ValueError(
                f"checkpoint {name_of(checkpoint)}: no tensor {name}; it is of a different model"
            )
        found, needed = reader.tensors[name].shape, tuple(target.shape)
        if found != needed:
            raise ValueError(
                f"checkpoint {name_of(checkpoint)}: {name} has shape {found}, the model needs {needed}"
            )


def _fill(
    checkpoint: Location, marker: dict[str, Any], optimizer: ShardedAdamW, weights_only: bool
) -> dict[str, Tensor]:
    """Read this rank's shards. Returns its random states, empty if the checkpoint is of another topology."""
    reader = Reader(checkpoint, marker.get("files"))
    targets = boxed_tensors(optimizer.state_boxes(), ["master"] if weights_only else None)
    _require_tensors(checkpoint, reader, targets)
    random = {}
    if not weights_only and marker.get("mesh") == optimizer.mesh.shape:
        rank = optimizer.mesh.rank
        for kind, state in random_states(optimizer.buckets[0].values.device).items():
            name = random_key(kind, rank)
            if name in reader.tensors and reader.tensors[name].shape == tuple(state.shape):
                random[kind], targets[name] = state, BoxedTensor(name, tuple(state.shape))
                targets[name].add((0,), state)
    reader.load(targets)
    return random


@contextmanager
def _raised_on_all(mesh: Mesh) -> Iterator[None]:
    """Raise one rank's error in this block on all: corruption, another model, a failed read. Collective."""
    kinds: tuple[type[Exception], ...] = (CorruptCheckpoint, OtherOptimizer, ValueError, LoadFailed)
    found: tuple[int, str] | None = None
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # of any storage
        error = raised
        own = next((kind for kind in kinds if isinstance(error, kind)), LoadFailed)
        found = (kinds.index(own), str(error) if isinstance(error, ValueError) else repr(error))
    everywhere = [found]
    if mesh.host is not None:
        everywhere = [None] * mesh.size
        dist.all_gather_object(everywhere, found, group=mesh.host)
    errors = [(*each, rank) for rank, each in enumerate(everywhere) if each is not None]
    if errors:
        number, text, rank = min(errors)
        raise kinds[number](text if kinds[number] is not LoadFailed else f"rank {rank}: {text}") from error
