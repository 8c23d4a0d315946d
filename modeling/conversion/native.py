"""Read and write weights as Trainshed checkpoints.

Reads checkpoints of any topology. A checkpoint written for given tensor ranks and pipeline stages has one file per rank, with the
rank's boxes in the order of its layers, so that each rank reads one range; any other topology can load it too. Without a
topology, files have up to FILE_BYTES.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from modeling.conversion.tensor_files import File
from modeling.conversion.weights import Part, Weights, slices
from modeling.models.build import DTYPES
from modeling.models.families import model_class
from parallel import Mesh
from parallel.checkpoint import boxes, locations
from parallel.checkpoint.reader import Reader, StoredBox
from parallel.checkpoint.writer import Written, write_boxes, write_metadata
from parallel.constraints import kv_replicas
from parallel.layout import Box, GlobalBox, layout_of
from profiles.files import state_files
from profiles.sections.base import Section
from profiles.sections.model import Model
from profiles.validation_errors import profile_error

FILE_BYTES = 2 * 10**9
PREFIX = boxes.PREFIX["master"]


class _Described(Section):
    """What a checkpoint's marker has of the profile."""

    model: Model


def describe(folder: Path) -> tuple[Model, torch.dtype | None]:
    """A complete checkpoint's model, and its run's training dtype (None if a conversion wrote it).

    Raises:
        ValueError: the checkpoint is incomplete, or its marker does not describe a model.
    """
    marker = locations.read_marker(folder)
    try:
        profile = marker["profile"]
        precision = profile.get("train", {}).get("precision")
        return _Described(model=profile["model"]).model, DTYPES[precision] if precision else None
    except (KeyError, TypeError, ValidationError) as error:
        reason: object = repr(error)
        if isinstance(error, ValidationError):
            reason = profile_error(error, profile, _Described)
        raise ValueError(f"{folder / locations.MARKER}: does not describe a model: {reason}") from error


def read(folder: Path, model: Model, dtype: torch.dtype | None = None) -> Weights:
    """Master weights of a complete checkpoint, as `dtype` if given; everything read is verified.

    Raises:
        CorruptCheckpoint: a file is missing or corrupted; also raised when parts are read.
    """
    described = locations.read_marker(folder).get("files", {})  # empty if a conversion wrote it
    reader = Reader(folder, described)
    names = [name for name in reader.tensors if name.startswith(f"{PREFIX}.")]
    reader.open(names)
    parts = {}
    for name in names:
        stored = reader.tensors[name]
        parts[name.removeprefix(f"{PREFIX}.")] = [
            Part(box.offsets, box.sizes, stored.dtype, partial(_read_box, reader, box))
            for box in stored.boxes
        ]
    return Weights(model, parts, dtype)


def _read_box(reader: Reader, box: StoredBox, index: tuple[slice, ...]) -> torch.Tensor:
    return reader.read(box, [part.start for part in index], [part.stop - part.start for part in index])


def files(weights: Weights, tensor: int = 1, stages: Sequence[range] | None = None) -> list[BoxFile]:
    """Files to write for a tensor degree and each stage's layers; split by size without a topology."""
    if tensor == 1 and stages is None:
        groups = _group_by_size(weights, boxes_of_rank(weights.model, 1, None, 0, 0))
    else:
        stages = stages or [range(weights.model.num_hidden_layers)]
        ranks = product(range(len(stages)), range(tensor))
        groups = ([*boxes_of_rank(weights.model, tensor, stages, *rank)] for rank in ranks)
    return [BoxFile(f"__{number}_0.distcp", weights, boxes) for number, boxes in enumerate(groups)]


def boxes_of_rank(
    model: Model, tensor: int, stages: Sequence[range] | None, stage: int, rank: int
) -> Iterator[Box]:
    """Boxes of a stage's tensor rank, in layer order, except those that another rank writes."""
    count = len(stages) if stages else 1
    mesh = Mesh(count, 1, 1, tensor, kv_replicas(model.num_key_value_heads, tensor), rank=stage * tensor)
    layers = stages[stage] if stages else None
    stage_model = model_class(model.architecture)(model, mesh, layers, device=torch.device("meta"))
    for name, parameter in stage_model.named_parameters():
        layout = layout_of(parameter)
        if "embedding" in layout.partial_axes and stage:  # the first stage writes it
            continue
        yield from (box for box in layout.boxes(name, rank) if box.replica == 0)


def _group_by_size(weights: Weights, boxes: Iterable[Box]) -> Iterator[list[Box]]:
    """Consecutive groups of boxes with at most FILE_BYTES, but at least one box."""
    group: list[Box] = []
    size = 0
    for box in boxes:
        nbytes = math.prod(box.sizes) * weights.dtype_of(box.name).itemsize
        if group and size + nbytes > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(box)
        size += nbytes
    yield group


class BoxFile(File):
    """A `.distcp` file of boxes."""

    def __init__(self, name: str, weights: Weights, boxes: list[Box]) -> None:
        self.name, self.weights, self.boxes = name, weights, boxes
        self.nbytes = sum(math.prod(box.sizes) * weights.dtype_of(box.name).itemsize for box in boxes)

    def write(self, path: Path, limit: int, progress: Callable[[int], None]) -> tuple[list[Any], str]:
        def boxes() -> Iterator[tuple[GlobalBox, torch.Tensor]]:
            for box in self.boxes:
                dtype = self.weights.dtype_of(box.name)
                for offsets, sizes in slices(box.offsets, box.sizes, dtype.itemsize, limit):
                    tensor = self.weights.read(box.name, offsets, sizes)
                    yield GlobalBox(f"{PREFIX}.{box.name}", box.shape, offsets, sizes), tensor
                    progress(tensor.nbytes)

        digest = hashlib.sha256()
        written = write_boxes(path, boxes(), digest.update)
        return [{**asdict(each), "file": self.name} for each in written], digest.hexdigest()


def finish(folder: Path, notes: Iterable[list[dict[str, Any]]], model: Model, source: str) -> None:
    """Write `.metadata` from the records of all files, then the marker that makes the checkpoint complete."""
    write_metadata(folder, [Written.from_json(each) for note in notes for each in note])
    marker = {
        "step": 0,
        "consumed_samples": 0,
        "optimizer_steps": 0,
        "source": source,
        "profile": {"model": model.model_dump(mode="json")},
        "torch": torch.__version__,
    }
    state_files.write(folder / locations.MARKER, json.dumps(marker, indent=1))
