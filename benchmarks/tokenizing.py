"""Text to tokens, end to end (json lines in, `.bin`/`.idx` out), against tokenizers in memory and `datasets.map`.

    python -m benchmarks.tokenizing [--megabytes 60] [--rounds 3] [--tokenizer sentencepiece]

On all cores of this machine, with a BPE of 32,000 tokens trained on the text itself, which does not repeat itself (text.py). It
is byte-level (gigatoken, or the word cache without it) or in the style of SentencePiece (the word cache). Runs
alternate; a row is the median. Beside gigatoken the slow ones read a part of the text that takes them about as long.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.text import documents
from profiles import resolve
from tasks.dataset import DatasetStep
from tasks.step import Context
from tasks.store.artifacts import Artifact
from tasks.store.store import Store
from tasks.tokenization.tokenizer_files import EOS, byte_level, write
from tasks.tokenizer import TokenizerStep

VOCABULARY = 32_000
SLOW = 0.25  # share of the text that is read beside gigatoken
UNKNOWN = "<unk>"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tokenizing")
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", choices=KINDS, default="byte-level")
    parser.add_argument("--one", choices=("map",), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    if options.one:
        return by_map(options.folder)
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), options.megabytes, options.rounds, options.tokenizer)
    return None


def byte_level_bpe() -> Tokenizer:
    return byte_level(models.BPE())


def sentencepiece() -> Tokenizer:
    """A BPE whose words begin with their space."""
    made = Tokenizer(models.BPE(unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


KINDS = {"byte-level": byte_level_bpe, "sentencepiece": sentencepiece}


def compare(folder: Path, megabytes: float, rounds: int, kind: str) -> None:
    texts = list(documents(megabytes))
    cores = os.cpu_count() or 1
    part = texts[:: int(1 / SLOW)]
    some = part if kind == "byte-level" else texts
    for name, own in ("all", texts), ("some", some):
        (folder / name).mkdir()
        for i in range(cores):
            lines = (json.dumps({"text": text}) + "\n" for text in own[i::cores])
            (folder / name / f"{i}.jsonl").write_text("".join(lines))
    encoder = KINDS[kind]()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, *([UNKNOWN] if kind == "sentencepiece" else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if kind == "byte-level" else [],
        show_progress=False,
    )
    encoder.train_from_iterator(part, trainer)
    (folder / "tokenizer").mkdir()
    write(folder / "tokenizer", encoder, {"eos_token": EOS})
    size = {
        name: sum(len(text.encode()) for text in own) / 1e6 for name, own in (("all", texts), ("some", some))
    }
    rows = {
        "ours, gigatoken": lambda: size["all"] / ours(folder, "all", fast=True),
        "ours, tokenizers": lambda: size["some"] / ours(folder, "some", fast=False),
        "tokenizers in memory": lambda: size["some"] / in_memory(folder, some),
        "datasets.map": lambda: size["some"] / as_program(folder),
    }
    if kind == "sentencepiece":
        del rows["ours, gigatoken"]  # which does not take it
    speeds: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row, run in rows.items():
            speeds[row].append(run())
    median = {row: statistics.median(found) for row, found in speeds.items()}
    print(f"{size['all']:.0f} MB, {len(texts):,} documents, {cores} cores, {kind}; MB of text a second")
    for row, found in speeds.items():
        print(f"{row:<22} {median[row]:6.1f}   ({', '.join(f'{speed:.1f}' for speed in found)})")
    for row, memory, mapped in ("ours, gigatoken", 5.0, 8.0), ("ours, tokenizers", 0.9, 1.5):
        if row not in median:
            continue
        a, b = median[row] / median["tokenizers in memory"], median[row] / median["datasets.map"]
        print(
            f"{row}: {a:.2f} of tokenizers in memory (goal {memory}), {b:.2f} of datasets.map (goal {mapped})"
        )


def ours(folder: Path, name: str, fast: bool) -> float:
    """Seconds of the dataset step, its processes' start and the planning included."""
    overrides = [
        f"data.sources=[{{kind: files, path: '{folder / name}/*.jsonl'}}]",
        f"tokenizer.source={folder / 'tokenizer'}",
        "tokenizer.vocabulary_size=null",
        "data.validation_fraction=0",
    ]
    blocked = folder / "blocked"
    blocked.mkdir(exist_ok=True)
    (blocked / "gigatoken.py").write_text("raise ImportError('not in this row')\n")
    before = os.environ.get("PYTHONPATH")
    if not fast:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(blocked), before)))
    try:
        with tempfile.TemporaryDirectory(dir=folder) as store_folder:
            store = Store(store_folder)
            profile = resolve.load("tiny", overrides)
            words = TokenizerStep().run(Context(profile, store))
            begun = time.perf_counter()
            made: Artifact = DatasetStep(words).run(Context(profile, store))
            seconds = time.perf_counter() - begun
            assert made.summary["missing"] == 0
            return seconds
    finally:
        os.environ.pop("PYTHONPATH", None) if before is None else os.environ.update(PYTHONPATH=before)


def in_memory(folder: Path, texts: list[str]) -> float:
    """Seconds of `encode_batch` over texts that are in memory, its results thrown away."""
    encoder = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    begun = time.perf_counter()
    encoder.encode_batch(texts, add_special_tokens=False)
    return time.perf_counter() - begun


def as_program(folder: Path) -> float:
    """`datasets.map` in a process of its own, since it forks; its own seconds, without imports."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        told = subprocess.run(
            [sys.executable, "-m", "benchmarks.tokenizing", "--one", "map", "--folder", str(folder)],
            env={**os.environ, "HF_DATASETS_CACHE": cache, "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            text=True,
            check=True,
        )
    return float(told.stdout.split()[-1])


def by_map(folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    encoder = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    eos = encoder.token_to_id(EOS)

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = encoder.encode_batch(rows["text"], add_special_tokens=False)
        return {"input_ids": [[*each.ids, eos] for each in found]}

    begun = time.perf_counter()
    files = sorted(map(str, (folder / "some").glob("*.jsonl")))
    rows = datasets.load_dataset("json", data_files=files, split="train")
    rows.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=["text"])
    print(time.perf_counter() - begun)


if __name__ == "__main__":
    main()
