"""Distributed checkpoints: global tensors by name and box, so any topology loads what any other saved.

The container is torch.distributed.checkpoint (DCP). A rank hands in the boxes that its optimizer shard holds, of three global
tensors a parameter, all float32:

    weights.<name>        the master weights (bf16 weights are these, rounded)
    exp_avg.<name>        first moment
    exp_avg_sq.<name>     second moment
    random.<kind>.<rank>  a rank's random generators, which count at the same topology alone

Each element is written by one rank and read by those that need it; no rank holds or moves more than its own bytes. How a
checkpoint is written and what makes it complete is in checkpoint_saver.py, where its files lie in checkpoint_files.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from parallel.checkpoint.boxes import PREFIX, Boxes, LoadPlanner, boxes_of
from parallel.checkpoint.files import (
    MARKER,
    Location,
    Reader,
    complete_checkpoints,
    discard,
    discard_incomplete,
    join,
    move_aside,
    name_of,
    read_marker,
)
from parallel.checkpoint.saver import SaveFailed, Saver, StaleAttempt, random_key
from parallel.device import random_states, set_random_states
from parallel.optimizer.zero1 import ZeRO1

__all__ = [
    "MARKER",
    "PREFIX",
    "Location",
    "SaveFailed",
    "Saver",
    "StaleAttempt",
    "complete_checkpoints",
    "discard",
    "discard_incomplete",
    "join",
    "load",
    "move_aside",
    "name_of",
    "read_global",
    "read_marker",
    "save",
]


def save(
    checkpoint: Location,
    optimizer: ZeRO1,
    about: dict[str, Any],
    fencing_check: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint and wait for it; see `Saver`, of which this is one turn."""
    saver = Saver(optimizer, fencing_check=fencing_check)
    saver.begin(checkpoint, about)
    saver.finish()


def load(checkpoint: Location, optimizer: ZeRO1, *, weights_only: bool = False) -> dict[str, Any]:
    """Read a checkpoint, saved at whatever topology, into the optimizer's shards and the parameters; all ranks call it.

    Args:
        weights_only: leave moments, step count and random states as they are (continual pretraining).

    Returns:
        What `save` was told `about` it.

    Raises:
        ValueError: the checkpoint is not complete, or is of a different model; names the first difference.
    """
    about = read_marker(checkpoint)
    reader = Reader(checkpoint)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    state = boxes_of(optimizer.state_boxes(), ["master"] if weights_only else PREFIX)
    for key, boxes in state.items():
        if key not in stored:
            raise ValueError(
                f"checkpoint {name_of(checkpoint)} has no tensor {key}: it is of a different model"
            )
        if tuple(stored[key].size) != tuple(boxes.shape):
            found, wanted = tuple(stored[key].size), tuple(boxes.shape)
            raise ValueError(
                f"checkpoint {name_of(checkpoint)}: {key} has shape {found}, the model needs {wanted}"
            )
    random = {}
    if not weights_only and about.get("mesh") == optimizer.mesh.shape:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for kind, now in random_states(optimizer.buckets[0].values.device).items():
            key = random_key(kind, rank)
            if key in stored and tuple(stored[key].size) == tuple(now.shape):
                random[kind], state[key] = now, Boxes(key, tuple(now.shape))
                state[key].add((0,), now)
    fill(reader, metadata, state, LoadPlanner())
    optimizer.publish()
    if not weights_only:
        optimizer.steps = about["optimizer_steps"]
        set_random_states(optimizer.buckets[0].values.device, random)
    return about


def read_global(checkpoint: Location, prefix: str = "weights") -> dict[str, Tensor]:
    """Whole global tensors of one kind, on the CPU, in one process."""
    reader = Reader(checkpoint)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    names = [key for key in stored if key.startswith(f"{prefix}.")]
    state = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in names}
    fill(reader, metadata, state, DefaultLoadPlanner())
    return {key.removeprefix(f"{prefix}."): tensor for key, tensor in state.items()}


def fill(reader: Reader, metadata: Metadata, state: dict[str, Any], planner: DefaultLoadPlanner) -> None:
    """DCP's load without its collectives: every rank plans its own reads."""
    planner.set_up_planner(state, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = planner.finish_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()
