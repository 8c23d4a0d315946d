"""Reading samples: how fast against copying windows out of one mapped file, and what opening a large corpus costs.

    python -m benchmarks.reading [--megabytes 400] [--rounds 5]

Batches of 16 samples of 2,048 tokens in their shuffled order, from one shard; the bound copies the same windows of the same file
as int64 and does nothing else. Then a corpus of 10^12 tokens in 20,000 shards, as sparse files, is opened in a new process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from modeling.data.corpus import Corpus, Samples
from modeling.data.indexed import IndexedDatasetBuilder

LENGTH, BATCH, BATCHES, DOCUMENT = 2048, 16, 200, 800
OPEN = """
import resource, sys, time
import numpy
from modeling.data.corpus import Corpus, Samples
before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
samples = Samples(Corpus.open(sys.argv[1], "train"), 8192, seed=1)
opened = time.perf_counter() - begun
samples.batch(10**7, 4)
print(opened, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3)
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.reading")
    parser.add_argument("--megabytes", type=int, default=400, help="of tokens in the file")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        speed(Path(name), options.megabytes * 500_000, options.rounds)
    with tempfile.TemporaryDirectory() as name:
        opening(Path(name))


def speed(folder: Path, tokens: int, rounds: int) -> None:
    target = dataset(folder, [{"path": "tokens/k/train", "start": 0, "tokens": tokens, "documents": 1}])
    stream = np.random.default_rng(0).integers(0, 50_000, tokens, dtype=np.uint16)
    with IndexedDatasetBuilder(folder / "artifacts/tokens/k/train", np.dtype(np.uint16)) as builder:
        lengths = np.full(tokens // DOCUMENT, DOCUMENT)
        lengths[-1] += tokens - lengths.sum()
        builder.add_documents(stream, lengths)
    samples = Samples(Corpus.open(target, "train"), LENGTH, seed=1)
    mapped = np.memmap(folder / "artifacts/tokens/k/train.bin", np.uint16, "r")
    starts = samples.window_starts(np.arange(BATCH * BATCHES)).tolist()

    def bound() -> None:
        for at in range(0, len(starts), BATCH):
            np.stack(
                [mapped[start : start + LENGTH + 1].astype(np.int64) for start in starts[at : at + BATCH]]
            )

    def ours() -> None:
        for at in range(0, BATCH * BATCHES, BATCH):
            samples.batch(at, BATCH)

    def with_documents() -> None:
        for at in range(0, BATCH * BATCHES, BATCH):
            samples.batch(at, BATCH)
            samples.document_starts(at, BATCH)

    rows = {"bound": bound, "ours": ours, "ours, with documents": with_documents}
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    bound()  # the file is in the page cache from here on
    for _ in range(rounds):
        for row, run in rows.items():
            begun = time.perf_counter()
            run()
            seconds[row].append(time.perf_counter() - begun)
    median = {row: statistics.median(found) for row, found in seconds.items()}
    for row, found in median.items():
        rate = BATCH * BATCHES * LENGTH / found / 1e6
        print(f"{row:<22} {rate:7.1f} million tokens a second, {median['bound'] / found:.2f} of the bound")


def opening(folder: Path) -> None:
    shards, tokens = 20_000, 50_000_000
    prefix = folder / "artifacts/tokens/k/train"
    prefix.parent.mkdir(parents=True)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * tokens)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iqqq", tokens, 0, 0, 1)
    prefix.with_suffix(".idx").write_bytes(index)
    entries = [{"path": "tokens/k/train", "start": 0, "tokens": tokens, "documents": 1}] * shards
    target = dataset(folder, entries)
    told = subprocess.run(
        [sys.executable, "-c", OPEN, str(target)], capture_output=True, text=True, check=True
    )
    seconds, megabytes = map(float, told.stdout.split())
    print(
        f"10^12 tokens in {shards:,} shards: opened in {seconds:.2f} s (goal 1), {megabytes:.0f} MB (goal 100)"
    )


def dataset(folder: Path, entries: list[dict[str, object]]) -> Path:
    target = folder / "artifacts/dataset/k"
    target.mkdir(parents=True)
    (folder / "artifacts/tokens/k").mkdir(parents=True, exist_ok=True)
    corpus = {"format": 1, "vocabulary_size": 50_000, "eos": 0, "train": entries, "validation": []}
    (target / "corpus.json").write_text(json.dumps(corpus))
    return target


if __name__ == "__main__":
    main()
