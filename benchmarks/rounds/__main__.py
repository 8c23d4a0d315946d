"""Measure rounds of continual pretraining on two invented languages: --part learning

    learning  what one round learns and forgets: a sweep of shares of replay, the share that proxies propose, generated text and a
              stand-in source in place of the history, and the Reptile step of meta-experience replay (arXiv 2508.01908)
    kills     series of three rounds that are killed at random moments, compared with an undisturbed one
    ten       ten rounds in a row, compared with one run over everything
    refused   a round that learned nothing, and one that forgot
    printed   three rounds with the default share and gates and one without replay, as `trainshed series` prints them

`learning` and `ten` train in their process, the others run the product's flows. Two parts run at a time, each on about one core.
Each row is printed and appended to a JSON Lines file as soon as it exists. The exit code is 1 if a requirement is not met.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser
from benchmarks.rounds import flows, learning

AT_A_TIME = 2  # parts


def main() -> int:
    parts: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
        "learning": learning.learning,
        "kills": flows.killed,
        "ten": learning.ten_rounds,
        "refused": flows.refused,
        "printed": flows.printed,
    }
    parser = make_parser(__doc__, out="rounds")
    parser.add_argument("--part", action="append", choices=[*parts], help="repeatable (default: all parts)")
    parser.add_argument("--keep", type=Path, help="keep the files of the parts in this folder, which is new")
    parser.add_argument("--series", type=Path, help="run the series in this folder, and nothing else")
    options = parser.parse_args()
    if options.series:
        return flows.run_series(options.series)
    chosen = options.part or [*parts]
    if len(chosen) > 1:  # each in a process of its own, as Prefect is configured once per process
        with ThreadPool(AT_A_TIME) as pool:
            return int(any(pool.map(partial(_run_part, options), chosen, chunksize=1)))
    for key in ("PREFECT_API_URL", "PREFECT_PROFILE"):
        os.environ.pop(key, None)
    missed, begun, results = 0, time.monotonic(), Results(options.out)
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for row in parts[chosen[0]](folder.absolute()):
            missed += row.get("met") is False
            results.add(part=chosen[0], **row, after=round(time.monotonic() - begun))
    return 1 if missed else 0


def _run_part(options: argparse.Namespace, part: str) -> int:
    """Run a part in a process of its own; returns its exit code, below 0 if a signal killed it."""
    command = [sys.executable, "-m", "benchmarks.rounds", "--part", part, "--out", str(options.out)]
    return subprocess.call(command + (["--keep", str(options.keep / part)] if options.keep else []))


if __name__ == "__main__":
    sys.exit(main())
