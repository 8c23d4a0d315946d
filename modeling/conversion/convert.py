"""Conversion of checkpoints: `python -m modeling.conversion.convert SOURCE DESTINATION --to hf|nxd|trainshed ...`, one process.

    source -> Weights (global tensors in parts, mapped) -> files of the destination, each written in slices by one thread

Several files are under way at a time, so that reading and writing overlap. Memory is the slices', within the budget, whatever
the model's size. A file is hashed as it is written, under another name, noted in the journal and renamed, so a conversion
that was interrupted goes on with the files that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from modeling.conversion import formats, huggingface, journal, native, nxd_files
from modeling.conversion.journal import Journal, Progress
from modeling.conversion.nxd_layout import FORMS, LAYOUTS, Form, Layout
from modeling.conversion.tensor_files import File
from modeling.conversion.weights import Weights
from parallel.constraints import valid_tensor_degrees
from parallel.pipeline.stages import cut_layers
from profiles.errors import ProfileError
from profiles.model import neighbours

KINDS = ("hf", "nxd", "trainshed")
BUDGET = 512  # MB
WORKERS = 4  # files under way
COPIES = 4  # of a slice that a worker may hold: assembled, converted, laid out, being written
M_MMAP_THRESHOLD = -3  # of malloc.h
log = logging.getLogger("trainshed")


@dataclass(frozen=True)
class Options:
    """How to read and write.

    Attributes:
        to: kind of the destination, one of KINDS.
        config: config.json of the model, or its folder; needed where the source has none.
        tensor, pipeline: degrees that NxD's shards are for, and that a Trainshed checkpoint is split for.
        cuts: layers that begin the second and later stages of a Trainshed checkpoint; None cuts evenly.
        nxd_layout: of NxD's shards; None where nobody said.
        nxd_qkv: how Q, K and V lie in written shards; None takes what NxD's converter is mostly used with.
        budget: MB of memory for slices.
    """

    to: str
    config: Path | None = None
    tensor: int = 1
    pipeline: int = 1
    cuts: tuple[int, ...] | None = None
    nxd_layout: Layout | None = None
    nxd_qkv: Form | None = None
    budget: int = BUDGET

    @property
    def slice_bytes(self) -> int:
        return max(1 << 20, self.budget * 10**6 // (WORKERS * COPIES))

    def job(self, source: Path) -> dict[str, Any]:
        """What determines the result, as JSON: the source's files by name, size and time, and how they are converted."""
        paths = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
        stats = [(path.relative_to(source).as_posix(), path.stat()) for path in paths]
        how = {name: value for name, value in vars(self).items() if name not in ("config", "budget")}
        how["cuts"] = self.cuts and list(self.cuts)
        return {"source": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats], **how}


def convert(
    source: Path, destination: Path, options: Options, *, name: str | None = None, replace: bool = False
) -> dict[str, Any]:
    """Convert a checkpoint; returns the record: kind, tensors, bytes, files with their sizes and hashes.

    Args:
        source: file or folder; of a run's folder its newest complete checkpoint is taken.
        destination: folder; new, empty, or of the same conversion, which is gone on with.
        name: of the source, to be told to whoever loads the result.
        replace: whether the destination may be emptied, where something else is in it.

    Raises:
        ProfileError: an option that cannot be.
        ValueError: a source that is refused or damaged.
    """
    source = formats.locate(source)
    weights = formats.read(source, options.config, options.nxd_layout, trained=options.to != "trainshed")
    files = files_of(weights, options)
    size = sum(file.nbytes for file in files)
    with journal.opened(destination, options.job(source), size, replace) as done:
        if done.finished:
            return done.finished
        notes = write_all(files, destination, options.slice_bytes, done)
        if options.to == "hf":
            huggingface.finish(destination, files, weights)
        elif options.to == "trainshed":
            native.finish(destination, notes, weights.model, name or source.name)
        return done.finish(
            files, {"to": options.to, "tensors": len(weights.shapes), "bytes": weights.nbytes()}
        )


def files_of(weights: Weights, options: Options) -> Sequence[File]:
    """The files of the destination.

    Raises:
        ProfileError: degrees that the model cannot have.
    """
    model = weights.model
    heads, kv_heads, layers = model.num_attention_heads, model.num_key_value_heads, model.num_hidden_layers
    valid = [t for t in valid_tensor_degrees(heads, kv_heads) if model.intermediate_size % t == 0]
    if options.tensor not in valid:
        reason = (
            f"does not split {heads} query heads, {kv_heads} KV heads and an MLP of {model.intermediate_size}"
        )
        raise ProfileError("--tensor", options.tensor, reason, neighbours(options.tensor, valid))
    if not 1 <= options.pipeline <= layers:
        nearest = min(max(options.pipeline, 1), layers)
        raise ProfileError("--pipeline", options.pipeline, f"the model has {layers} layers", [nearest])
    if options.to == "hf":
        return huggingface.files(weights)
    if options.to == "nxd":
        return nxd_files.files(weights, options.tensor, options.pipeline, options.nxd_layout, options.nxd_qkv)
    stages = None
    if options.cuts is not None:
        stages = [range(low, high) for low, high in pairwise((0, *options.cuts, layers))]
    elif options.pipeline > 1:
        stages = cut_layers([1] * layers, options.pipeline)
    return native.files(weights, options.tensor, stages)


def write_all(files: Sequence[File], destination: Path, limit: int, done: Journal) -> list[Any]:
    """Write the files that are not there yet, several at a time; all files' notes, in their order."""
    left = [file for file in files if file.name not in done.files]
    if len(left) < len(files):
        there = len(files) - len(left)
        log.info("going on with an interrupted conversion: %d of %d files are there", there, len(files))
    progress = Progress(sum(file.nbytes for file in left))
    _return_memory()

    def write(file: File) -> None:
        path = destination / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        note, sha256 = file.write(partial, limit, progress.add)
        done.note(file.name, partial, note, sha256)
        partial.replace(path)

    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = [pool.submit(write, file) for file in left]
        try:
            for each in as_completed(waiting):
                each.result()
        except BaseException:
            progress.stop()  # what is under way ends at its next slice
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [done.files[file.name]["note"] for file in files]


def _return_memory() -> None:
    """Have glibc give freed slices back at once: kept in its arenas, a thread's, they add up to the model's size."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


def options_of(given: argparse.Namespace) -> Options:
    """Options out of parsed arguments."""
    cuts = getattr(given, "cuts", None)
    return Options(
        to=given.to,
        config=Path(given.config).expanduser() if given.config else None,
        tensor=given.tensor,
        pipeline=given.pipeline,
        cuts=None if cuts is None else tuple(cuts),
        nxd_layout=given.nxd_layout,
        nxd_qkv=given.nxd_qkv,
        budget=given.budget,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.conversion.convert")
    parser.add_argument("source", type=Path, help="checkpoint of any kind, or a run's folder")
    parser.add_argument("destination", type=Path)
    parser.add_argument("--to", choices=KINDS, required=True)
    parser.add_argument("--cuts", type=int, nargs="*", help="layers that begin the second and later stages")
    parser.add_argument("--config")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--nxd-layout", choices=LAYOUTS)
    parser.add_argument("--nxd-qkv", choices=FORMS)
    parser.add_argument("--budget", type=int, default=BUDGET, help="MB of memory for tensors under way")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    record = convert(given.source, given.destination, options_of(given))
    log.info(json.dumps({name: value for name, value in record.items() if name not in ("job", "files")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
