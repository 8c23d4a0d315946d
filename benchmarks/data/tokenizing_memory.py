"""Measure the peak memory of a tokenization worker that reads a document of 200 MB.

One `tasks.tokenization.worker` process tokenizes a file of JSON lines, which is compressed so that it is a single shard. The text
comes from benchmarks/harness/text.py and is repeated if needed: repetition changes the speed, not the memory. The long document
is prose, rows of numbers (csv) or indented JSON; the latter two never have letters on both sides of a space.
"""

import gzip
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.results import Results
from benchmarks.harness.text import DOCUMENT, documents
from benchmarks.harness.timing import make_parser
from profiles import resolve
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store

UNIQUE = 20  # MB
ROWS = {
    "csv": "{0:.6},{1},2024-01-02,{0:.3}\n",
    "json": '    {{\n        "a": {0:.6},\n        "b": {1}\n    }},\n',
}


def main() -> None:
    parser = make_parser(__doc__, out="tokenizing_memory")
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--document", type=float, default=200, help="size of the long document in MB")
    parser.add_argument("--text", choices=("prose", *ROWS), default="prose", help="kind of the long document")
    options = parser.parse_args()
    results = Results(options.out)
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
        overrides = [
            f"data.sources=[{{kind: files, path: '{folder}/a.jsonl.gz'}}]",
            "data.validation_fraction=0",
        ]
        store = Store(str(folder / "store"))
        context = Context(resolve.load("tiny", overrides), store)
        tokenizer = TokenizerStep().run(Context(resolve.load("tiny"), store))
        plan, shards = folder / "plan.json", folder / "shards.json"
        plan.write_text(json.dumps(asdict(DatasetStep(tokenizer).plan(context))))
        shards.write_text("[0]")
        command = [sys.executable, "-m", "tasks.tokenization.worker", "--plan", str(plan)]
        peak = peak_memory([*command, "--store", store.uri, "--shards", str(shards)])
    text = (
        f"{written:.0f} MB of text with a document of {options.document:.0f} MB of {options.text}: "
        f"peak of the worker {peak / 1e9:.2f} GB (goal: under 1)"
    )
    results.add(options.text, text, megabytes=written, document=options.document, peak_bytes=peak)


def peak_memory(command: Sequence[str]) -> int:
    """Run a program; the peak of its resident memory in bytes, without that of its children."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        peak, status = 0, Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            if found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text()):  # a zombie's status lacks it
                peak = int(found[1]) * 1024
            time.sleep(0.02)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peak


def long_document(kind: str, texts: list[str], size: int) -> str:
    """A text of `size` characters."""
    if kind == "prose":
        return " ".join(itertools.islice(itertools.cycle(texts), size // DOCUMENT))[:size]
    generator = random.Random(0)
    rows = [ROWS[kind].format(generator.random(), generator.randrange(10**6)) for _ in range(10_000)]
    return "".join(itertools.islice(itertools.cycle(rows), size // min(map(len, rows)) + 1))[:size]


if __name__ == "__main__":
    main()
