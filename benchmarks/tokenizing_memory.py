"""Peak memory of a process that tokenizes, over text of any size, with a document of 200 MB in its midst.

    python -m benchmarks.tokenizing_memory [--megabytes 400] [--document 200] [--text csv]

A file of json lines, compressed so that it is one shard, is tokenized by one `tasks.tokenization.worker` process. The text is
benchmarks/text.py's, repeated where there is not enough of it: repetition changes the speed, not the memory. The long document is
prose too, or rows of numbers, or indented JSON: the last two have no letters with a space between them.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.text import documents
from profiles import resolve
from tasks.dataset import DatasetStep
from tasks.step import Context
from tasks.store.store import Store
from tasks.tokenizer import TokenizerStep

UNIQUE = 20  # MB
ROWS = {
    "csv": "{0:.6},{1},2024-01-02,{0:.3}\n",
    "json": '    {{\n        "a": {0:.6},\n        "b": {1}\n    }},\n',
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tokenizing_memory")
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--document", type=float, default=200, help="MB of the long document")
    parser.add_argument("--text", choices=("prose", *ROWS), default="prose", help="of the long document")
    options = parser.parse_args()
    texts = list(documents(UNIQUE))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with gzip.open(folder / "a.jsonl.gz", "wt", compresslevel=1) as file:
            written = 0.0
            for i, text in enumerate(itertools.cycle(texts)):
                if written >= options.megabytes:
                    break
                if i == len(texts) // 2 and options.document:
                    text = long_document(options.text, texts, int(options.document * 1e6))
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text) / 1e6
        overrides = [f"data.sources=[{{kind: files, path: '{folder}/a.jsonl.gz'}}]"]
        store = Store(str(folder / "store"))
        profile = resolve.load("tiny", [*overrides, "data.validation_fraction=0"])
        words = TokenizerStep().run(Context(resolve.load("tiny"), store))
        plan = folder / "plan.json"
        plan.write_text(json.dumps(DatasetStep(words).plan(Context(profile, store)).to_json()))
        numbers = folder / "shards.json"
        numbers.write_text("[0]")
        command = [
            sys.executable,
            "-m",
            "tasks.tokenization.worker",
            "--plan",
            str(plan),
            "--store",
            store.uri,
        ]
        peak = watched([*command, "--shards", str(numbers)]) / 1e9
    print(
        f"{written:.0f} MB of text, a document of {options.document:.0f} MB of {options.text} in it: "
        f"peak of the worker {peak:.2f} GB (goal: under 1)"
    )


def long_document(kind: str, texts: list[str], size: int) -> str:
    """A text of so many bytes."""
    if kind == "prose":
        return " ".join(itertools.islice(itertools.cycle(texts), size // 4000))[:size]
    chance = random.Random(0)
    rows = [ROWS[kind].format(chance.random(), chance.randrange(10**6)) for _ in range(10_000)]
    return "".join(itertools.islice(itertools.cycle(rows), size // min(map(len, rows)) + 1))[:size]


def watched(command: list[str]) -> int:
    """Run a program to its end; the most bytes that were resident of it (getrusage would count this process's too)."""
    peak = 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        peak = int(found[1]) * 1024 if found else peak
        time.sleep(0.05)
    if process.returncode:
        sys.exit(process.returncode)
    return peak


if __name__ == "__main__":
    main()
