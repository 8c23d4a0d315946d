"""Compare tokenization (JSON lines to `.bin`/`.idx`) with tokenizers in memory and `datasets.map`.

Uses all cores and a BPE of 32,000 tokens, trained on the text itself, which does not repeat (harness/text.py): byte-level
(with gigatoken, and with `tokenizers`) or SentencePiece style (with the word cache). Sides alternate; figures are medians. For
byte-level BPE, the slower sides read only a part of the text.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.harness.results import Results
from benchmarks.harness.text import documents
from benchmarks.harness.timing import alternate, make_parser, seconds
from profiles import resolve
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store
from tasks.tokenization.tokenizer_files import EOS, byte_level, write

VOCABULARY = 32_000
EVERY = 4  # for byte-level BPE, the slower sides read every fourth document
UNKNOWN = "<unk>"
# Over tokenizers in memory, datasets.map.
GOALS = {"ours, gigatoken": (5.0, 8.0), "ours, tokenizers": (0.9, 1.5)}


def main() -> None:
    parser = make_parser(__doc__, rounds=3, out="tokenizing")
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--tokenizer", choices=("byte-level", "sentencepiece"), default="byte-level")
    parser.add_argument("--map", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    if options.map:
        map_dataset(options.map)
        return
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), options.megabytes, options.rounds, options.tokenizer, Results(options.out))


def compare(folder: Path, megabytes: float, rounds: int, kind: str, results: Results) -> None:
    texts = list(documents(megabytes))
    cores = os.cpu_count() or 1
    part = texts[::EVERY]
    train_tokenizer(folder / "tokenizer", kind, part)
    inputs = {"all": texts, "part": part if kind == "byte-level" else texts}
    for name, selected in inputs.items():
        (folder / name).mkdir()
        for i in range(cores):
            lines = (json.dumps({"text": text}) + "\n" for text in selected[i::cores])
            (folder / name / f"{i}.jsonl").write_text("".join(lines))
    size = {name: sum(len(text.encode()) for text in selected) / 1e6 for name, selected in inputs.items()}
    sides = {
        "ours, gigatoken": lambda: size["all"] / time_ours(folder, "all", gigatoken=True),
        "ours, tokenizers": lambda: size["part"] / time_ours(folder, "part", gigatoken=False),
        "tokenizers in memory": lambda: size["part"] / time_in_memory(folder, inputs["part"]),
        "datasets.map": lambda: size["part"] / time_datasets_map(folder),
    }
    if kind == "sentencepiece":
        del sides["ours, gigatoken"]  # does not support it
    speeds = alternate(sides, rounds, keep=results.turn)
    median = {side: statistics.median(rates) for side, rates in speeds.items()}
    print(f"{size['all']:.0f} MB, {len(texts):,} documents, {cores} cores, {kind}; MB of text per second")
    for side, rates in speeds.items():
        print(f"{side:<22} {median[side]:6.1f}   ({', '.join(f'{rate:.1f}' for rate in rates)})")
    for side in filter(sides.__contains__, GOALS):
        peers = zip(("tokenizers in memory", "datasets.map"), GOALS[side], strict=True)
        ratios = (f"{median[side] / median[peer]:.2f} of {peer} (goal {goal})" for peer, goal in peers)
        print(f"{side}: {', '.join(ratios)}")


def train_tokenizer(folder: Path, kind: str, texts: Sequence[str]) -> None:
    """Train a BPE and write its files; in SentencePiece style, words begin with a space."""
    special, alphabet = [EOS], []
    if kind == "byte-level":
        tokenizer, alphabet = byte_level(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        special.append(UNKNOWN)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    write(folder, tokenizer, {"eos_token": EOS})


def time_ours(folder: Path, name: str, gigatoken: bool) -> float:
    """Seconds of the dataset step, including planning and starting its processes."""
    overrides = [
        f"data.sources=[{{kind: files, path: '{folder / name}/*.jsonl'}}]",
        f"tokenizer.source={folder / 'tokenizer'}",
        "tokenizer.vocabulary_size=null",
        "data.validation_fraction=0",
    ]
    blocked = folder / "blocked"
    blocked.mkdir(exist_ok=True)
    (blocked / "gigatoken.py").write_text("raise ImportError('disabled by the benchmark')\n")
    before = os.environ.get("PYTHONPATH")
    if not gigatoken:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(blocked), before)))
    try:
        with tempfile.TemporaryDirectory(dir=folder) as store:
            context = Context(resolve.load("tiny", overrides), Store(store))
            step = DatasetStep(TokenizerStep().run(context))
            datasets = []
            duration = seconds(lambda: datasets.append(step.run(context)))
            assert datasets[0].summary["missing"] == 0
            return duration
    finally:
        os.environ.pop("PYTHONPATH", None) if before is None else os.environ.update(PYTHONPATH=before)


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))


def time_in_memory(folder: Path, texts: list[str]) -> float:
    """Seconds of `encode_batch` over texts in memory, results discarded."""
    tokenizer = load_tokenizer(folder)
    return seconds(lambda: tokenizer.encode_batch(texts, add_special_tokens=False))


def time_datasets_map(folder: Path) -> float:
    """Seconds of `datasets.map`, without imports, in a separate process because it forks."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        output = subprocess.run(
            [sys.executable, "-m", "benchmarks.data.tokenizing", "--map", str(folder)],
            env={**os.environ, "HF_DATASETS_CACHE": cache, "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return float(output.split()[-1])


def map_dataset(folder: Path) -> None:
    """Tokenize with `datasets.map` and print the seconds."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(folder)
    eos = tokenizer.token_to_id(EOS)
    assert eos is not None

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch(rows["text"], add_special_tokens=False)
        return {"input_ids": [[*encoding.ids, eos] for encoding in encodings]}

    def run() -> None:
        files = sorted(map(str, (folder / "part").glob("*.jsonl")))
        rows = datasets.load_dataset("json", data_files=files, split="train")
        rows.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=["text"])

    print(seconds(run))


if __name__ == "__main__":
    main()
