"""Convert checkpoints: the work of `trainshed convert`, and of the steps that convert and export.

    source -> Weights (memory-mapped parts of global tensors) -> files of the destination, written in slices

One process writes several files concurrently, so that reading and writing overlap. Memory is bounded by the budget for slices,
independent of the model's size. A file is hashed while it is written under a temporary name, recorded in the journal, then
renamed: an interrupted conversion resumes with the missing files.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import re
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from modeling.conversion import formats, huggingface, native
from modeling.conversion.adapters import peft
from modeling.conversion.choices import NxDLayout, QKVForm
from modeling.conversion.journal import Journal, Progress, open_journal
from modeling.conversion.nxd import files as nxd_files
from modeling.conversion.tensor_files import File, file_sha256
from modeling.conversion.weights import AveragedWeights, Weights
from parallel.checkpoint import locations
from parallel.pipeline.schedules import cut_layers
from profiles.errors import ProfileError, counted
from profiles.files import state_files
from profiles.files.folders import walk
from profiles.sections.model_checks import neighbours

RECIPE = 6  # changed when the same inputs are converted differently
BUDGET = 512  # MB
WORKERS = 4  # files written concurrently
COPIES = 4  # of a slice per worker: assembled, cast, contiguous, being written
M_MMAP_THRESHOLD = -3  # from malloc.h
NUMBER = re.compile(r"-?\d+")  # of checkpoints; any other value is a path
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """Options of a conversion."""

    to: str  # destination format, one of MODEL_FORMATS
    config: Path | None = None  # config.json of the model or its folder; required if the source has none
    # tensor, pipeline: degrees for which NxD shards or a Trainshed checkpoint are split
    tensor: int = 1
    pipeline: int = 1
    # first layer of the second and each later stage of a Trainshed checkpoint; None cuts evenly
    cuts: tuple[int, ...] | None = None
    nxd_layout: NxDLayout | None = None  # of NxD shards to read; None if not specified
    # form of Q, K and V in written NxD shards; None uses coalesced without GQA, separate with GQA
    nxd_qkv: QKVForm | None = None
    budget: int = BUDGET  # MB of memory for slices
    # LoRA adapters to merge into the weights, in any format that `formats.read_adapters` supports
    adapters: Path | None = None
    average: tuple[Path, ...] = ()  # further checkpoints, whose weights are averaged with the source's
    # number of checkpoints to average: a run's latest, or those up to the source; None: only one
    last: int | None = None
    modules: bool = True  # whether to write modules for multi-token prediction

    @property
    def slice_bytes(self) -> int:
        return max(1 << 20, self.budget * 10**6 // (WORKERS * COPIES))

    def config_of(self, source: Path) -> Path:
        """The model's config.json or its folder: --config, or the source's folder."""
        return self.config or (source if state_files.is_dir(source) else source.parent)

    def inputs(self, members: Sequence[Path], adapters: Path | None) -> dict[str, Any]:
        """What determines the result, as JSON: the options, and all read files' names, sizes and times.

        Args:
            members: the checkpoints to read, the source's first.
            adapters: the checkpoint or folder with the adapters, without other files of its run.
        """
        options = {name: value for name, value in vars(self).items() if name not in ("config", "budget")}
        paths = huggingface.config_files(self.config_of(members[0]))
        options["config"] = [file_sha256(path) for path in paths if state_files.is_file(path)]
        options["cuts"] = self.cuts and list(self.cuts)
        options["adapters"] = adapters and _stats(adapters)
        source, *options["average"] = map(_stats, members)
        return {"source": source, "recipe": RECIPE, **options}


def _stats(source: Path) -> list[list[Any]]:
    """Name, size and modification time of a file, or of the files in a folder."""
    is_folder = state_files.is_dir(source)
    found = [source / name for name, _ in walk(source)] if is_folder else [source]
    paths = sorted(filter(state_files.is_file, found))
    stats = [(path.relative_to(source).as_posix(), path.stat()) for path in paths]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def write_peft(source: Path, destination: Path, options: Options) -> dict[str, Any]:
    """Write LoRA adapters in PEFT's format; returns the record and raises as `convert` does."""
    adapters = formats.read_adapters(source, options.config, options.nxd_layout, "SOURCE")
    if state_files.exists(destination) and any(destination.iterdir()):
        raise ProfileError("DESTINATION", str(destination), "is not empty; name a new or empty folder")
    facts = peft.write(adapters, destination)
    return {"to": "peft", **facts, "files": {path.name: {} for path in sorted(destination.iterdir())}}


def convert(
    source: Path, destination: Path, options: Options, *, name: str | None = None, replace: bool = False
) -> dict[str, Any]:
    """Convert a checkpoint; resumes an interrupted conversion.

    Args:
        source: file or folder; the latest complete checkpoint of a run folder is used.
        destination: folder that is new, empty, or of the same conversion.
        name: name of the source to store in the result.
        replace: whether to empty a destination that contains anything else.

    Returns:
        The record: format, number of tensors, bytes, and the files with their sizes and hashes.

    Raises:
        ProfileError: an option is invalid.
        ValueError: the source is rejected or corrupted.
    """
    members = _members(source, options)
    if options.adapters and len(members) > 1:
        given = options.last or ", ".join(map(str, options.average))
        raise ProfileError("--average", given, "cannot be combined with --adapters; merge the adapters first")
    source = members[0]
    training_dtype = options.to != "trainshed"

    def read(path: Path, **how: bool) -> Weights:
        found = formats.read(path, options.config, options.nxd_layout, **how)
        return found if options.modules else found.without_modules()

    weights = read(source, training_dtype=training_dtype, adapters=options.adapters is not None)
    if len(members) > 1:  # float32 master weights are averaged if the checkpoints contain them
        weights = AveragedWeights([read(member, training_dtype=False) for member in members], weights.dtype)
    adapters = options.adapters and formats.locate(options.adapters)
    if adapters:
        updates = formats.read_adapters(adapters, options.config or source, options.nxd_layout)
        weights = updates.merged(weights, weights.model if options.config else None, training_dtype)
    files = destination_files(weights, options)
    size = sum(file.nbytes for file in files)
    with open_journal(destination, options.inputs(members, adapters), size, replace) as journal:
        if journal.finished:
            return journal.finished
        notes = write_files(files, destination, options.slice_bytes, journal)
        if options.to == "hf":
            written = [file for file in files if isinstance(file, huggingface.SafetensorsFile)]
            huggingface.finish(destination, written, weights, options.config_of(source))
        elif options.to == "trainshed":
            native.finish(destination, notes, weights.model, name or source.name)
        facts = {"to": options.to, "tensors": len(weights.shapes), "bytes": weights.nbytes()}
        return journal.finish(files, facts)


def _members(source: Path, options: Options) -> list[Path]:
    """Checkpoints to read: the source's, then those to average with it. Raises ProfileError."""
    found = [formats.locate(source)]
    if options.last is not None:
        is_run = state_files.is_dir(source / "checkpoints")
        folder = source / "checkpoints" if is_run else source.parent
        saved = [path for _, path in locations.complete_checkpoints(folder)]
        if not is_run:
            saved = saved[: saved.index(source) + 1] if source in saved else []
        if not 1 < options.last <= len(saved):
            reason = f"{folder} has {counted(len(saved), 'complete checkpoint')}"
            reason += "" if is_run else f" up to {source.name}"
            raise ProfileError("--average", options.last, reason, [len(saved)] if len(saved) > 1 else [])
        return [*saved[: -options.last - 1 : -1], *map(formats.locate, options.average)]
    return [*found, *map(formats.locate, options.average)]


def destination_files(weights: Weights, options: Options) -> Sequence[File]:
    """The files to write. Raises ProfileError if the model cannot be split by the degrees."""
    model = weights.model
    heads, kv_heads, layers = model.num_attention_heads, model.num_key_value_heads, model.num_hidden_layers
    widths = model.mlp_widths.values()
    valid = [t for t in model.tensor_degrees if not any(width % t for width in widths)]
    if options.tensor not in valid:
        mlp = " or ".join(map(str, widths))
        kinds = f"{heads} query heads, {kv_heads} KV heads"
        if model.linear_num_key_heads:
            kinds += f", {model.linear_num_key_heads} key heads of linear attention"
        reason = f"does not split {kinds} and an MLP of {mlp}"
        raise ProfileError("--tensor", options.tensor, reason, neighbours(options.tensor, valid))
    if not 1 <= options.pipeline <= layers:
        nearest = min(max(options.pipeline, 1), layers)
        raise ProfileError("--pipeline", options.pipeline, f"the model has {layers} layers", [nearest])
    if options.to == "hf":
        return huggingface.files(weights)
    if options.to == "nxd":
        form = options.nxd_qkv
        return nxd_files.shard_files(weights, options.tensor, options.pipeline, options.nxd_layout, form)
    stages = None
    if options.cuts is not None:
        stages = [range(low, high) for low, high in pairwise((0, *options.cuts, layers))]
    elif options.pipeline > 1:
        stages = cut_layers([1] * layers, options.pipeline)
    return native.files(weights, options.tensor, stages)


def write_files(files: Sequence[File], destination: Path, limit: int, journal: Journal) -> list[Any]:
    """Write missing files concurrently in slices of at most `limit` bytes; returns all notes in order."""
    missing = [file for file in files if file.name not in journal.files]
    if len(missing) < len(files):
        complete = len(files) - len(missing)
        log.info("resuming an interrupted conversion: %d of %d files are complete", complete, len(files))
    progress = Progress(sum(file.nbytes for file in missing))
    # glibc shall return freed slices to the OS: in threads' arenas they would add up to the model's size.
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)

    def write(file: File) -> None:
        path = destination / file.name
        state_files.make_folder(path.parent)
        partial = path.with_name(f".{path.name}.partial")
        note, sha256 = file.write(partial, limit, progress.add)
        journal.add(file.name, partial, note, sha256)
        partial.replace(path)

    with progress.workers(WORKERS) as pool:
        for done in as_completed([pool.submit(write, file) for file in missing]):
            done.result()
    return [journal.files[file.name]["note"] for file in files]


def options_from(arguments: argparse.Namespace) -> Options:
    """Options from parsed command line arguments. Raises ProfileError for an average of fewer than two."""
    numbers = [int(value) for value in arguments.average if NUMBER.fullmatch(value)]
    if numbers and min(numbers) < 2:
        raise ProfileError("--average", min(numbers), "is fewer than two checkpoints", [2])
    return Options(
        to=arguments.to,
        config=Path(arguments.config).expanduser() if arguments.config else None,
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        nxd_layout=arguments.nxd_layout,
        nxd_qkv=arguments.nxd_qkv,
        adapters=Path(arguments.adapters).expanduser() if arguments.adapters else None,
        average=tuple(Path(path).expanduser() for path in arguments.average if not NUMBER.fullmatch(path)),
        last=max(numbers, default=None),
        modules=not arguments.without_mtp,
    )
