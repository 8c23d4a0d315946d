"""Graphs compiled ahead of time: `python -m modeling.compile --run-folder RUN --output FOLDER`, one process, no cluster.

The block of the run's model is built under a fake process group of the run's real world size and compiled for training and for
evaluation; layers are alike and ranks name their groups alike, so one block's graphs serve every layer of every rank. The result
is the compiler's cache folder in one file, `cache.tar`, with `summary.json`. A training process unpacks it and finds
every graph there; `counts` reads from the compiler how many it found and how many it had to compile.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from profiles.resolve import load
from profiles.schema import Profile

CACHE = "cache.tar"
SUMMARY = "summary.json"
log = logging.getLogger("trainshed")


def counts() -> dict[str, int]:
    """Graphs of this process so far: compiled cold, and found in the cache."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    cold = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    return {"cold_compiles": cold, "warm_graphs": inductor["fxgraph_cache_hit"]}


def unpack(artifact: Path, run: Path) -> Path | None:
    """Unpack a graphs artifact into the run's folder, once a node, and return the folder; None where it holds none.

    Every process may call it: the first to finish wins, the folder appears whole.
    """
    packed = artifact / CACHE
    if not packed.exists():
        return None
    folder = run / "graphs" / artifact.name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpacking-"))
        with tarfile.open(packed) as tar:
            tar.extractall(temporary, filter="data")
        try:
            temporary.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(temporary)
    return folder


def compile_graphs(profile: Profile, cache: Path) -> list[dict[str, Any]]:
    """Compile the block's graphs into the cache folder; one entry a program: name, graphs, seconds, status, error."""
    from modeling.program import Program

    # Blocks that are recomputed have graphs of their own.
    blocks = 1 if profile.train.recompute_layers is None else 2
    one = profile.model_copy(
        update={
            "model": profile.model.model_copy(update={"num_hidden_layers": blocks}),
            "parallel": profile.parallel.model_copy(update={"pipeline": 1, "pipeline_cuts": None}),
            "train": profile.train.model_copy(update={"recompute_layers": None if blocks == 1 else 1}),
        }
    )
    settings = profile.train
    entries: list[dict[str, Any]] = []
    with Program(one, cache, start=False) as program:
        samples = torch.zeros(settings.micro_batch_size, settings.sequence_length + 1, dtype=torch.int64)
        documents = torch.zeros_like(samples[:, 1:]) if settings.document_masks else None
        counted = torch.ones(len(samples), dtype=torch.bool)
        programs = {
            "block, forward and backward": lambda: program.forward_backward(
                samples, 1.0, documents=documents
            ),
            "block, evaluation": lambda: program.evaluate(samples, counted, documents),
        }
        for name, call in programs.items():
            before, begun = counts(), time.perf_counter()
            entry = {"name": name, "status": "compiled", "error": None}
            try:
                call()
            except Exception as error:
                log.exception(f"{name}: failed")
                entry |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            after = counts()
            cold = after["cold_compiles"] - before["cold_compiles"]
            warm = after["warm_graphs"] - before["warm_graphs"]
            if entry["status"] == "compiled" and not cold:
                entry["status"] = "from cache"
            entries.append({**entry, "graphs": cold + warm, "seconds": time.perf_counter() - begun})
            log.info(f"{name}: {entry['status']}, {cold + warm} graphs, {entries[-1]['seconds']:.1f} s")
    return entries


def has_compiler(profile: Profile) -> bool:
    """Whether what the backend calls is there: inductor needs a C++ compiler on CPUs."""
    if profile.cluster.device != "cpu":
        return True
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.compile")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    profile = load(str(options.run_folder / "profile.yaml"))
    options.output.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    note = None
    if not has_compiler(profile):
        note = "no C++ compiler (g++ or clang++) on this machine: training runs eager"
        log.warning(note)
    else:
        if profile.world_size > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=profile.world_size)
        with tempfile.TemporaryDirectory() as cache:
            entries = compile_graphs(profile, Path(cache))
            with tarfile.open(options.output / CACHE, "w") as tar:
                tar.add(cache, arcname=".")
    failed = [entry for entry in entries if entry["status"] == "failed"]
    total = sum(entry["graphs"] for entry in entries) + len(failed)
    summary = {
        "total": total,
        "successful": total - len(failed),
        "failed": len(failed),
        "from_cache": sum(entry["graphs"] for entry in entries if entry["status"] == "from cache"),
        "graphs": entries,
        "note": note,
    }
    (options.output / SUMMARY).write_text(json.dumps(summary, indent=1))
    log.info(f"graphs: {total} in all, {total - len(failed)} compiled, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
