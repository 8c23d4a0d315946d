"""Process of one tracker: `python -m tasks.tracking.worker`, started by `process.py`.

Reads two lines from standard input. The first line describes the run, as JSON. The second line, once the run has ended, has its
final state and the files to attach; if standard input is closed without it, the flow's process has ended, and the run counts as
stopped. Standard output has one line for each error.

RUN/metrics.jsonl is the queue: a tracker that is slow or unreachable for hours loses nothing and uses no memory. The position of
the last row sent is in RUN/trackers/<tracker>.json, where the next process of the run resumes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from modeling.training.metrics import scalars
from profiles.files import retry_policies, run_files, state_files
from profiles.files.jsonl import LogFollower, is_metrics
from profiles.rules.credentials import redacted
from profiles.user_functions import search_path
from tasks.tracking.protocol import State, TrackedRun, Tracker

POLL_SECONDS = 1.0
MAX_ROWS = 200  # between flushes
RETRY_SECONDS = retry_policies.TRACKER.delays  # before each retry; the last applies to all further ones
TRACKERS = {
    "wandb": "tasks.tracking.trackers:WandbTracker",
    "mlflow": "tasks.tracking.trackers:MlflowTracker",
    "trackio": "tasks.tracking.trackers:TrackioTracker",
}
NONE = -1  # as the last step sent; 0 is the evaluation of a fine-tuning run's initial weights
Row = dict[str, Any]


@dataclass
class EndMessage:
    """The flow's message at the run's end: its final state and files; `received` is set on arrival."""

    received: threading.Event = field(default_factory=threading.Event)
    state: State = "stopped"
    files: list[tuple[str, str]] = field(default_factory=list)  # path and kind

    def read(self, stream: IO[str]) -> None:
        """Wait for the message, the second line of the stream."""
        with contextlib.suppress(ValueError):  # of a process that was killed while writing it
            message = json.loads(stream.readline() or "{}")
            self.state, self.files = message.get("state", "stopped"), message.get("files", [])
        self.received.set()


class NewRows:
    """Rows of metrics.jsonl that have not been sent to a tracker yet.

    If the file is rewritten, after a resume or a rollback, it is read again without the rows that were sent before. Repeated
    steps are new rows.

    Args:
        sent: the last steps that an earlier process sent, of training and of evaluations during training.
        skip: how many rows an earlier process sent of a file that only grows.
    """

    def __init__(self, path: Path, sent: tuple[int, int] = (NONE, NONE), skip: int = 0) -> None:
        self._follower, self._skip = LogFollower(path), skip
        self._before = dict(zip((True, False), sent, strict=True))  # by whether it is a training step
        self._sent: set[int] = set()  # hashes of rows
        self._rows: Iterator[Row] = iter(())

    @property
    def seen(self) -> int:
        """Number of distinct rows read."""
        return len(self._sent)

    def take(self) -> list[Row]:
        """The next rows, at most MAX_ROWS; none if there are no more yet."""
        if not (taken := list(islice(self._rows, MAX_ROWS))):
            self._rows = filter(self._is_new, self._follower.rows(is_metrics))
            taken = list(islice(self._rows, MAX_ROWS))
        if not taken:
            self._before = {True: NONE, False: NONE}
        return taken

    def _is_new(self, row: Row) -> bool:
        row_hash = hash(json.dumps(row))
        known = row_hash in self._sent or row["step"] <= self._before["loss" in row] or self.seen < self._skip
        self._sent.add(row_hash)
        return not known


class Sender:
    """Calls a tracker, with retries; `report` is called with each error."""

    def __init__(self, tracker: Tracker, end: EndMessage, report: Callable[[Exception], None]) -> None:
        self._tracker, self._end, self.report = tracker, end, report

    def start(self, run: TrackedRun) -> str | None:
        """Open the run; returns its identifier, None if the run ended before that was possible."""
        identifier: str | None = self._retry(lambda: self._tracker.start(run))
        return identifier

    def send(self, rows: list[Row]) -> bool:
        """Log rows; returns whether the tracker has them."""

        def send() -> bool:
            for row in rows:
                self._tracker.log(row["step"], dict(scalars(row)))
            self._tracker.flush()
            return True

        return bool(self._retry(send))

    def finish(self) -> None:
        for path, kind in self._end.files:
            self._retry(partial(self._tracker.artifact, Path(path), kind))
        self._retry(lambda: self._tracker.finish(self._end.state))

    def _retry(self, call: Callable[[], Any]) -> Any:
        """Retry a call until it succeeds, at most once after the run has ended; returns its result, or None."""
        attempt, last = 0, False
        while True:
            try:
                return call()
            except Exception as error:
                self.report(error)
                if last:
                    return None
            delay = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
            last, attempt = self._end.received.wait(delay), attempt + 1


def main() -> int:
    os.nice(10)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what trackers print goes to the log
    request = json.loads(sys.stdin.readline())
    failed = False

    def report(error: Exception) -> None:
        nonlocal failed
        failed = True
        with contextlib.suppress(OSError):
            reason = redacted(" ".join(str(error).split()))
            print(f"{type(error).__name__}: {reason}", file=answers, flush=True)

    end = EndMessage()
    threading.Thread(target=end.read, args=(sys.stdin,), daemon=True).start()
    try:
        sender = Sender(load(request["tracker"])(), end, report)
    except Exception as error:
        report(error)
        return 1
    run, failed = Path(request["folder"]), False
    follow(run, request, sender, end)
    return int(failed)


def follow(run: Path, request: dict[str, Any], sender: Sender, end: EndMessage) -> None:
    """Send a run's metrics until the run ends."""
    folder = run / run_files.TRACKERS
    state_files.make_folder(folder)
    path = folder / f"{request['tracker'].replace(':', '.')}.json"
    known = state_files.read_json(path, {"identifier": str, "evaluations": int}) or {}
    facts = {**request["run"], "tags": tuple(request["run"]["tags"]), "folder": folder}
    earlier = known.get("identifier")
    tracked = TrackedRun(
        **facts, identifier=earlier or uuid.uuid4().hex, resumes=bool(earlier), report=sender.report
    )
    if (identifier := sender.start(tracked)) is None:
        return
    nothing = {"step": NONE, "evaluated": NONE, "evaluations": 0}
    state = {name: known.get(name, value) for name, value in nothing.items()}
    training = NewRows(run / run_files.METRICS, sent=(state["step"], state["evaluated"]))
    # Evaluations of checkpoints come in any order of steps, so sent rows are counted instead.
    evaluations = NewRows(run / run_files.EVALUATIONS, skip=state["evaluations"])

    def write_state() -> None:
        state_files.write(path, json.dumps({"identifier": identifier, **state}))

    write_state()
    while True:
        ended = end.received.is_set()  # asked before reading, so that no row written before the end is missed
        while (taken := training.take()) and sender.send(taken):
            for row in taken:
                state["step" if "loss" in row else "evaluated"] = row["step"]
            write_state()
        while (taken := evaluations.take()) and sender.send(taken):
            state["evaluations"] = evaluations.seen
            write_state()
        if ended:
            break
        end.received.wait(POLL_SECONDS)
    sender.finish()


def load(name: str) -> Callable[[], Tracker]:
    module, _, attribute = TRACKERS.get(name, name).partition(":")
    sys.path[:] = search_path()
    tracker: Callable[[], Tracker] = getattr(importlib.import_module(module), attribute)
    return tracker


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that a tracker left behind do not matter
