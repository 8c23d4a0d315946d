"""Series that are killed, refused or printed, by the product's flows with a micro model.

A series of three rounds runs in a process of its own (`run_series`), which adds the text of each round once the round before is
promoted. Killed at random moments and started again, it has to end with the same bits as a series that nothing disturbs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.harness.processes import has_ended, terminate, training_ranks
from benchmarks.rounds import languages
from flows.cli.main import main as command
from flows.cli.run import prefect_api
from flows.server.shared_server import start_module
from tasks.continual.rounds import read_series
from tasks.keys import file_digest
from tasks.store.store import Store
from tests.flows.micro import PROFILE

Row = dict[str, Any]
ROOT = Path(__file__).parents[2]
NAME, ROUNDS, KILLS = "nightly", 3, 20
KILLS_OF_A_SERIES = 5
DOCUMENTS, ROUND_DOCUMENTS = 400, 150
ROUND = ("train.steps=150", "train.warmup_steps=5", "evaluate.every=0", "checkpoint.every=20")
ANY_RISE = "continual.gates=[{on: old, rise_at_most: 9}, {on: new, fall_at_least: 0}]"
TIMEOUT = 300  # seconds for one start of a series


def prepare(folder: Path) -> None:
    """Write the profile and the text of the first run, and train it."""
    from flows.pretrain import pretrain

    texts = folder / "texts"
    texts.mkdir(parents=True)
    languages.write_texts(texts / "0.jsonl", languages.OLD, DOCUMENTS, 1)
    data = {"sources": [{"kind": "files", "path": str(texts / "*.jsonl")}], "validation_fraction": 0.1}
    (folder / f"{NAME}.yaml").write_text(yaml.safe_dump({**PROFILE, "data": data}))
    pretrain(str(folder / f"{NAME}.yaml"), ["train.steps=60"], "", str(folder / "store"))


def run_round(folder: Path, *overrides: str) -> Any:
    """Run a round of the series in a folder; returns the final state of its flow."""
    from flows.continual import continual

    profile, store = str(folder / f"{NAME}.yaml"), str(folder / "store")
    return continual(profile, [*ROUND, *overrides], None, store, return_state=True)


def run_series(folder: Path) -> int:
    """Run the rounds that are left of a series; returns the exit code of its process."""
    with _server(folder.parent):
        while (done := _promoted(folder)) < ROUNDS:
            add_text(folder, done + 1)
            state = run_round(folder, ANY_RISE)
            if state.name not in ("Promoted", "NoNewData"):
                print(state.name, state.message, file=sys.stderr)
                return 1
    return 0


def add_text(folder: Path, number: int) -> None:
    """Add the new text of a round, unless it is there."""
    path = folder / "texts" / f"{number}.jsonl"
    if not path.exists():
        languages.write_texts(path, languages.NEW, ROUND_DOCUMENTS, 1 + number)


def killed(folder: Path, seed: int = 0) -> Iterator[Row]:
    """Kill series of three rounds, until there are twenty kills, and compare each with an undisturbed one."""
    first = folder / "first"
    with _server(folder):  # which all processes share
        prepare(first)
        reference = _copy(first, folder / "reference")
        begun = time.monotonic()
        _run_killed(reference, random.Random(seed), 0, 0)
        longest = time.monotonic() - begun
        expected, kills, equal, number = _results(reference), 0, 0, 0
        yield {"row": "undisturbed", "seconds": longest}
        while kills < KILLS:
            series = _copy(first, folder / f"series-{number}")
            most = min(KILLS_OF_A_SERIES, KILLS - kills)
            faults = _run_killed(series, random.Random(seed + number), longest / 2, most)
            same, kills, number = _results(series) == expected, kills + len(faults), number + 1
            equal += same
            yield {"row": f"series {number}", "kills": "; ".join(faults), "met": same}
        yield {"row": f"{kills} kills", "series": number, "equal": equal, "met": equal == number}


def refused(folder: Path) -> Iterator[Row]:
    """A round that learned nothing, and one that forgot."""
    series = folder / "refused"
    with _server(folder):
        prepare(series)
        add_text(series, 1)
        nothing = ("train.learning_rate=1e-30", "train.minimum_learning_rate=0")
        forgets = ("continual.replay=0", "train.steps=200", "train.learning_rate=1e-2")
        for row, overrides, reason in (
            ("learned nothing", nothing, "new did not change"),
            ("forgot", forgets, "old rose"),
        ):
            state = run_round(series, *overrides)
            said = state.message.partition("\n")[0]
            met = state.name == "NotPromoted" and said.partition(": ")[2].startswith(reason)
            yield {"row": row, "state": state.name, "says": said, "met": met}


def printed(folder: Path) -> Iterator[Row]:
    """Three rounds with the default settings, one without replay, and what `trainshed series` prints."""
    series = folder / "printed"
    with _server(folder):
        prepare(series)
        for number in range(1, ROUNDS + 2):
            add_text(series, number)
            state = run_round(series, *(() if number <= ROUNDS else ("continual.replay=0",)))
            yield {"row": f"round {number}", "state": state.name, "says": state.message}
    command(["series", NAME, "--store", str(series / "store"), "--output", str(series / "series.html")])


@contextmanager
def _server(folder: Path) -> Iterator[None]:
    """Use the Prefect server of a folder, which processes share."""
    work_dir = folder / "server"
    (work_dir / "logs").mkdir(parents=True, exist_ok=True)
    with prefect_api(work_dir):
        yield


def _copy(first: Path, folder: Path) -> Path:
    """A copy of the first run's series, whose profile names its own texts."""
    shutil.copytree(first, folder)
    profile = folder / f"{NAME}.yaml"
    profile.write_text(profile.read_text().replace(str(first), str(folder)))
    return folder


def _start(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # benchmarks are not installed
    return start_module(["benchmarks.rounds", "--series", str(folder)], folder / "out", env=environment)


def _run_killed(folder: Path, chance: random.Random, longest: float, most: int) -> list[str]:
    """Run a series to its end, and kill its flow or a rank of its job at random moments on the way.

    Args:
        longest: most seconds between two kills, which include the start of a process.
        most: most kills.

    Returns:
        The kills.
    """
    faults: list[str] = []
    process = _start(folder)
    try:
        while len(faults) < most:
            delay = chance.uniform(1, longest)
            if has_ended(process, folder / "out", delay):
                return faults
            ranks = _ranks(folder)
            if chance.random() < 0.3 and ranks:  # the flow recovers by itself
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    chance.choice(ranks).kill()
                    faults.append(f"rank after {delay:.1f} s")
                continue
            process.kill()
            if process.wait() == -signal.SIGKILL:  # else it has just ended
                faults.append(f"flow after {delay:.1f} s")
                process = _start(folder)
        if not has_ended(process, folder / "out", TIMEOUT):
            raise RuntimeError(f"{folder}: not done {TIMEOUT} s after its last start")
        return faults
    finally:
        terminate(process)
        for rank in _ranks(folder):
            with suppress(psutil.NoSuchProcess):
                rank.kill()


def _ranks(folder: Path) -> list[psutil.Process]:
    """Processes that train a run of the series."""
    runs = sorted((folder / "store/runs").iterdir(), key=lambda run: run.stat().st_mtime)
    return [rank for run in runs for rank in training_ranks(run)]


def _promoted(folder: Path) -> int:
    """Number of the series' latest promoted round."""
    standing = folder / "store/runs" / NAME / "standing.json"
    return int(json.loads(standing.read_text())["round"]) if standing.exists() else 0


def _results(folder: Path) -> dict[str, object]:
    """Everything that must not depend on kills: rounds, outcomes, losses of every step, exports, ledger."""
    store = Store(str(folder / "store"))
    rounds = read_series(store, NAME).rounds
    losses, exports = {}, {}
    for each in rounds:
        run = folder / "store/runs" / each.run
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses[each.run] = [[row["step"], row.get("loss")] for row in rows]
        exports[each.run] = {path.name: file_digest(path) for path in sorted((run / "export").iterdir())}
    outcomes = [[each.run, each.outcome, [asdict(row) for row in each.rows]] for each in rounds]
    ledger = sorted(path.name for path in (folder / "store/ledger").iterdir())
    return {"outcomes": outcomes, "losses": losses, "exports": exports, "ledger": ledger}
