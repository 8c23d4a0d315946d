"""Compare reading samples with copying them from a mapped file, and measure opening a large corpus.

Reads batches of 16 shuffled samples of 2,048 tokens from one shard; the bound only copies the same windows of the same file as
int64. Then a new process opens a corpus of 10^12 tokens in 20,000 shards, which are sparse files.
"""

import json
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.harness.results import Results
from benchmarks.harness.timing import alternate_timed, make_parser
from modeling.data.corpus import Corpus, Samples
from modeling.data.indexed import IndexedDatasetBuilder

LENGTH, BATCH, BATCHES, DOCUMENT = 2048, 16, 200, 800
SHARDS, SHARD_TOKENS = 20_000, 50_000_000
PREFIX = "artifacts/tokens/k/train"
OPEN = """
import resource, sys, time
import numpy
from modeling.data.corpus import Corpus, Samples
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
samples = Samples(Corpus.open(sys.argv[1], "train"), 8192, seed=1)
seconds = time.perf_counter() - start
samples.batch(10**7, 4)
print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3)
"""


def main() -> None:
    parser = make_parser(__doc__, rounds=5, out="reading")
    parser.add_argument("--megabytes", type=int, default=400, help="size of the token file")
    options = parser.parse_args()
    results = Results(options.out)
    with tempfile.TemporaryDirectory() as name:
        measure_reading(Path(name), options.megabytes * 500_000, options.rounds, results)
    with tempfile.TemporaryDirectory() as name:
        measure_opening(Path(name), results)


def measure_reading(folder: Path, tokens: int, rounds: int, results: Results) -> None:
    dataset = write_corpus(folder, tokens, shards=1)
    stream = np.random.default_rng(0).integers(0, 50_000, tokens, dtype=np.uint16)
    with IndexedDatasetBuilder(folder / PREFIX, np.dtype(np.uint16)) as builder:
        lengths = np.full(tokens // DOCUMENT, DOCUMENT)
        lengths[-1] += tokens - lengths.sum()
        builder.add_documents(stream, lengths)
    samples = Samples(Corpus.open(dataset, "train"), LENGTH, seed=1)
    mapped = np.memmap(folder / f"{PREFIX}.bin", np.uint16, "r")
    starts = samples.window_starts(np.arange(BATCH * BATCHES)).tolist()
    batches = range(0, BATCH * BATCHES, BATCH)

    def bound() -> None:
        for i in batches:
            np.stack([mapped[start : start + LENGTH + 1].astype(np.int64) for start in starts[i : i + BATCH]])

    def ours() -> None:
        for i in batches:
            samples.batch(i, BATCH)

    def with_documents() -> None:
        for i in batches:
            samples.batch(i, BATCH)
            samples.document_starts(i, BATCH)

    bound()  # loads the file into the page cache
    sides = {"bound": bound, "ours": ours, "ours, with documents": with_documents}
    seconds = alternate_timed(sides, rounds, keep=results.turn)
    median = {side: statistics.median(times) for side, times in seconds.items()}
    for side, middle in median.items():
        rate = BATCH * BATCHES * LENGTH / middle / 1e6
        print(f"{side:<22} {rate:7.1f} million tokens/s, {median['bound'] / middle:.2f} of the bound")


def measure_opening(folder: Path, results: Results) -> None:
    dataset = write_corpus(folder, SHARD_TOKENS, SHARDS)
    prefix = folder / PREFIX
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * SHARD_TOKENS)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iqqq", SHARD_TOKENS, 0, 0, 1)
    prefix.with_suffix(".idx").write_bytes(index)
    command = [sys.executable, "-c", OPEN, str(dataset)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seconds, megabytes = map(float, output.split())
    text = f"10^12 tokens in {SHARDS:,} shards: opened in {seconds:.2f} s (goal 1), {megabytes:.0f} MB (goal 100)"
    results.add("opening", text, seconds=seconds, megabytes=megabytes)


def write_corpus(folder: Path, tokens: int, shards: int) -> Path:
    """Write a dataset that lists one file of this many tokens `shards` times; returns its folder."""
    dataset = folder / "artifacts/dataset/k"
    dataset.mkdir(parents=True)
    (folder / PREFIX).parent.mkdir(parents=True)
    entries = [{"path": "tokens/k/train", "start": 0, "tokens": tokens, "documents": 1}] * shards
    corpus = {"format": 1, "vocabulary_size": 50_000, "eos": 0, "train": entries, "validation": []}
    (dataset / "corpus.json").write_text(json.dumps(corpus))
    return dataset


if __name__ == "__main__":
    main()
