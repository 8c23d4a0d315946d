"""Trainshed's own checkpoints as weights: read at whatever topology they were saved, written for the one that will load them.

Written for some tensor ranks and pipeline stages, each rank's pieces lie in a file of their own, in the order of its layers, so
a rank reads one range; any other topology loads them too. Without a topology files are cut where they reach FILE_BYTES.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from modeling.conversion.tensor_files import File
from modeling.conversion.weights import Part, Weights, slices
from modeling.models.build import DTYPES, MODELS
from parallel import Mesh
from parallel.checkpoint import checkpoint
from parallel.checkpoint.reader import Reader
from parallel.checkpoint.writer import GlobalBox, Written, write_boxes, write_metadata
from parallel.constraints import kv_replicas
from parallel.layout import Box, layout_of
from profiles.model import Model

FILE_BYTES = 2 * 10**9
PREFIX = checkpoint.PREFIX["master"]


def describe(folder: Path) -> tuple[Model, torch.dtype | None]:
    """The model of a complete checkpoint, and the type that its run trained in; None where it is no run's.

    Raises:
        ValueError: it is not complete, or does not say what model it is of.
    """
    about = checkpoint.read_marker(folder)
    try:
        profile = about["profile"]
        precision = profile.get("train", {}).get("precision")
        return Model(**profile["model"]), DTYPES[precision] if precision else None
    except (KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"{folder / checkpoint.MARKER} does not describe a model: {error}") from error


def read(folder: Path, model: Model, dtype: torch.dtype | None = None) -> Weights:
    """The weights of a complete checkpoint; master weights where it has more than those, as `dtype` if it is given."""
    parts = {}
    reader = Reader(folder)
    for name, stored in reader.tensors.items():
        prefix, _, name = name.partition(".")
        if prefix == PREFIX:
            parts[name] = [
                Part(box.offsets, box.sizes, stored.dtype, partial(reader.map, box)) for box in stored.boxes
            ]
    return Weights(model, parts, dtype)


def files(weights: Weights, tensor: int = 1, stages: Sequence[range] | None = None) -> list[ItemFile]:
    """The files to write for so many tensor ranks and these stages' layers."""
    if tensor == 1 and stages is None:
        cut = _cut(weights, boxes_of_rank(weights.model, 1, None, 0, 0))
        return [ItemFile(f"__{number}_0.distcp", weights, boxes) for number, boxes in enumerate(cut)]
    stages = stages or [range(weights.model.num_hidden_layers)]
    ranks = [(stage, rank) for stage in range(len(stages)) for rank in range(tensor)]
    return [
        ItemFile(f"__{number}_0.distcp", weights, list(boxes_of_rank(weights.model, tensor, stages, *place)))
        for number, place in enumerate(ranks)
    ]


def boxes_of_rank(
    model: Model, tensor: int, stages: Sequence[range] | None, stage: int, rank: int
) -> Iterator[Box]:
    """The boxes that a tensor rank of a stage holds and is the first of its replicas to hold, as its layers declare them."""
    count = len(stages) if stages else 1
    mesh = Mesh(count, 1, 1, tensor, kv_replicas(model.num_key_value_heads, tensor), rank=stage * tensor)
    layers = stages[stage] if stages else None
    built = MODELS[model.architecture](model, mesh, layers, device=torch.device("meta"))
    for name, parameter in built.named_parameters():
        layout = layout_of(parameter)
        if "embedding" in layout.partial_axes and stage:  # the first stage has it too
            continue
        yield from (box for box in layout.boxes(name, rank) if box.replica == 0)


def _cut(weights: Weights, boxes: Iterable[Box]) -> Iterator[list[Box]]:
    """Boxes for one file after another."""
    held: list[Box] = []
    size = 0
    for box in boxes:
        nbytes = math.prod(box.sizes) * weights.dtype_of(box.name).itemsize
        if held and size + nbytes > FILE_BYTES:
            yield held
            held, size = [], 0
        held.append(box)
        size += nbytes
    yield held


class ItemFile(File):
    """A file of items, one after another."""

    def __init__(self, name: str, weights: Weights, boxes: list[Box]) -> None:
        self.name, self.weights, self.boxes = name, weights, boxes
        self.nbytes = sum(math.prod(box.sizes) * weights.dtype_of(box.name).itemsize for box in boxes)

    def write(
        self, path: Path, limit: int, progress: Callable[[int], None]
    ) -> tuple[list[dict[str, Any]], str]:
        def items() -> Iterator[tuple[GlobalBox, torch.Tensor]]:
            for box in self.boxes:
                dtype = self.weights.dtype_of(box.name)
                for offsets, sizes in slices(box.offsets, box.sizes, dtype.itemsize, limit):
                    tensor = self.weights.read(box.name, offsets, sizes)
                    yield GlobalBox(f"{PREFIX}.{box.name}", box.shape, offsets, sizes), tensor
                    progress(tensor.nbytes)

        digest = hashlib.sha256()
        written = write_boxes(path, items(), digest.update)
        return [{**asdict(each), "file": self.name} for each in written], digest.hexdigest()


def finish(folder: Path, notes: Iterable[list[dict[str, Any]]], model: Model, source: str) -> None:
    """Write the metadata of all files, then the marker that makes the checkpoint complete."""
    write_metadata(folder, [Written.from_json(each) for note in notes for each in note])
    about = {
        "step": 0,
        "consumed_samples": 0,
        "optimizer_steps": 0,
        "source": source,
        "profile": {"model": model.model_dump(mode="json")},
        "torch": torch.__version__,
    }
    temporary = folder / f".{checkpoint.MARKER}"
    temporary.write_text(json.dumps(about, indent=1))
    os.replace(temporary, folder / checkpoint.MARKER)
