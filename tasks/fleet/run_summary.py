"""Summary of one run, at a cost that does not depend on the run's length.

The last row of metrics.jsonl has the totals of the run, and rows are in the order of their steps, so the loss curve is read at
POINTS equally spaced offsets of the file. Everything else is in small files. A summary is cached as JSON until one of its files
changes (runs.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import orjson

from modeling.supervision.time_account import TOTALS, usual_step
from profiles.files import run_files, yaml_text
from profiles.files.jsonl import is_event
from profiles.sections.objective import OBJECTIVES
from tasks.fleet.goodput import FAILURES
from tasks.reporting.downsampling import downsample
from tasks.reporting.outcome import final_evaluation, is_finished, latest_failure, validation_in_training
from tasks.store.backends.backend import Backend, FileInfo

FILES = (
    run_files.METRICS,
    run_files.EVENTS,
    run_files.ATTEMPTS,
    run_files.PLAN,
    run_files.PROFILE,
    run_files.IDENTITY,
    run_files.REPORT,
    run_files.REPORT_JSON,
    run_files.ALERTS,
)
POINTS = 48  # in a loss curve
TAIL = 64 << 10  # bytes at the end of metrics.jsonl that are searched for the last evaluation
WHOLE = 192 << 10  # metrics files up to this size are read in one request
EVENT_BYTES = 1 << 20  # of events.jsonl, from its end
ROWS = 2  # read at each offset of a curve
LATEST = 24  # rows that the speed is computed from
LAST_KEYS = ("step", "loss", "time")  # kept from the last row, besides totals
SECTIONS = ("train", "cluster", "objective")  # of the profile: parsing all of it takes most of the time
PLANNED = ("step_seconds", "tokens_per_second")  # kept from plan.json
Row = dict[str, Any]


@dataclass
class RunSummary:
    """Summary of a run's files."""

    name: str
    steps: int | None = None
    step_tokens: int | None = None
    node_count: int | None = None
    node_price: float | None = None  # per node hour
    parent: str | None = None  # RUN@STEP
    planned: dict[str, float | None] = field(default_factory=dict)
    last: Row | None = None  # step, loss, time and totals of the last training row
    curve: list[tuple[float, float]] = field(default_factory=list)  # (step, loss)
    validation_loss: float | None = None  # of the final evaluation
    last_validation_loss: float | None = None  # of the latest evaluation during training, on a subset
    step_seconds: float | None = None  # of the latest steps
    tokens_per_second: float | None = None
    attempts: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)  # failures of training, and stragglers
    later_failure: Row | None = None  # the latest of a step after training
    reported: bool = False  # whether there is a report
    finished: bool = False  # by its files; see `is_finished`
    saved: bool = True  # of a finished run: whether it has its last checkpoint
    changed: float = 0.0  # seconds since 1970
    problem: str | None = None  # why the run's files cannot be summarized

    @property
    def first_step(self) -> int:
        """The step from which the run was forked; 0 if it was not."""
        return int(self.parent.rpartition("@")[2]) if self.parent else 0


def read_summary(backend: Backend, name: str, entries: Mapping[str, FileInfo]) -> RunSummary:
    """Read the run of this name; `entries` are the files of its folder by name."""
    reader = _Reader(backend, f"runs/{name}", entries)
    summary = RunSummary(
        name, changed=max((entries[file].modified for file in FILES if file in entries), default=0.0)
    )
    summary.attempts = in_order(reader.rows(run_files.ATTEMPTS))
    rows = reader.rows(run_files.EVENTS, EVENT_BYTES)
    events = [{key: row.get(key) for key in ("event", "time", "reason")} for row in rows if is_event(row)]
    summary.events = [row for row in events if row["event"] in (*FAILURES, "straggler")]
    if failure := latest_failure(events):
        summary.later_failure = dict(failure)
    plan = reader.json(run_files.PLAN)
    summary.planned = {key: plan.get(key) for key in PLANNED}
    if parent := reader.json(run_files.IDENTITY).get("parent"):
        summary.parent = f"{parent['run']}@{parent['step']}"
    _add_size(summary, reader)
    report = reader.json(run_files.REPORT_JSON) if run_files.REPORT_JSON in entries else None
    if evaluation := final_evaluation(report or {}, summary.steps):
        summary.validation_loss = _finite(evaluation["validation_loss"])
    _add_metrics(summary, reader, finished=summary.steps if evaluation else None)
    last = summary.last["step"] if summary.last else None
    alerts = reader.json(run_files.ALERTS) if report is None else None
    summary.reported, summary.finished = report is not None, is_finished(report, alerts, last, summary.steps)
    return summary


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows in the order of the file, none earlier than the one before it.

    The flow and the nodes, whose clocks differ, write attempts.jsonl; sorted by their times, a start could precede its
    submission.
    """
    ordered: list[Row] = []
    for row in rows:
        ordered.append({**row, "time": max(row["time"], ordered[-1]["time"])} if ordered else row)
    return ordered


def _add_size(summary: RunSummary, reader: _Reader) -> None:
    """Steps, tokens and nodes: of the latest start, or of the profile if the run has not started.

    A profile written after that start has the steps of a run that was opened again, which may extend it.
    """
    started = next((row for row in reversed(summary.attempts) if "step_tokens" in row), None)
    if started:
        summary.steps, summary.step_tokens = started["steps"], started["step_tokens"]
        summary.node_count, summary.node_price = started["node_count"], started["node_price"]
        if reader.modified(run_files.PROFILE) > started["time"]:
            summary.steps = reader.profile().get("train", {}).get("steps") or summary.steps
        return
    profile = reader.profile()
    train, cluster = profile.get("train", {}), profile.get("cluster", {})
    summary.steps = train.get("steps")
    if "global_batch_size" in train and "sequence_length" in train:
        traits = OBJECTIVES.get(profile.get("objective", {}).get("kind"), OBJECTIVES["pretrain"])
        summary.step_tokens = train["global_batch_size"] * traits.rows * train["sequence_length"]
    summary.node_count, summary.node_price = cluster.get("nodes", 1), cluster.get("node_price")


def _add_metrics(summary: RunSummary, reader: _Reader, finished: int | None) -> None:
    size = reader.size(run_files.METRICS)
    if not size:
        return
    if size <= WHOLE:
        lines = reader.read(run_files.METRICS).split(b"\n")[:-1]
        rows = list(_rows(lines))
    else:
        lines = _lines(*reader.ranges(run_files.METRICS, [(size - TAIL, size)]))
        width = (ROWS + 1) * TAIL // max(1, len(lines))
        starts = [size * index // POINTS for index in range(POINTS)]
        chunks = reader.ranges(run_files.METRICS, [(start, start + width) for start in starts])
        rows = list(_rows([line for chunk in chunks for line in _lines(chunk)] + lines[-ROWS:]))
    trained = [row for row in _rows(lines[-LATEST:]) if "loss" in row]
    if trained:
        last = trained[-1].items()
        kept = {key: value for key, value in last if key in LAST_KEYS or key in TOTALS}
        for key, value in kept.items():
            if not isinstance(value, int | float | None):
                raise ValueError(f"{run_files.METRICS}: {key} is {value!r}, not a number")
        summary.last = {key: _finite(value) for key, value in kept.items()}
        usual = usual_step(trained) or {}
        summary.step_seconds, summary.tokens_per_second = map(
            usual.get, ("step_seconds", "tokens_per_second")
        )
    evaluated = _rows(line for line in reversed(lines) if b'"validation_loss"' in line)
    summary.last_validation_loss = _finite(validation_in_training(next(evaluated, None), finished))
    summary.curve = curve(rows)


def curve(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Average neighbouring losses to at most POINTS (step, loss), in the order of steps."""
    losses = {row["step"]: row["loss"] for row in rows if isinstance(row.get("loss"), int | float)}
    points = sorted((step, loss) for step, loss in losses.items() if isfinite(loss))
    return downsample(points, POINTS)


def _finite(value: Any) -> Any:
    """The value; None for a number that is not finite, as a summary that is read from the cache has it."""
    return None if isinstance(value, float) and not isfinite(value) else value


def _lines(data: bytes) -> list[bytes]:
    """The lines between the first and the last newline of a chunk of a file."""
    return data.split(b"\n")[1:-1]


def _rows(lines: Iterable[bytes]) -> Iterator[Row]:
    """Parse rows of JSON Lines; corrupted ones are skipped."""
    for line in lines:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            try:
                row = json.loads(line)  # unlike orjson, accepts NaN and Infinity, which a diverged run writes
            except ValueError:
                continue
        if isinstance(row, dict) and (isinstance(row.get("step"), int) or is_event(row)):
            yield row


class _Reader:
    """Files of one run."""

    def __init__(self, backend: Backend, prefix: str, entries: Mapping[str, FileInfo]) -> None:
        self._backend, self._prefix, self._entries = backend, prefix, entries

    def size(self, file: str) -> int:
        return self._entries[file].size if file in self._entries else 0

    def modified(self, file: str) -> float:
        return self._entries[file].modified if file in self._entries else 0.0

    def read(self, file: str) -> bytes:
        return (self._backend.read(f"{self._prefix}/{file}") or b"") if file in self._entries else b""

    def ranges(self, file: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._backend.read_ranges(
            f"{self._prefix}/{file}", [(max(0, start), end) for start, end in ranges]
        )

    def json(self, file: str) -> dict[str, Any]:
        """A JSON object; empty if it does not exist or is corrupted, which the run's own commands report."""
        try:
            value = orjson.loads(self.read(file) or b"{}")
        except orjson.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}

    def profile(self) -> dict[str, Any]:
        """The SECTIONS of the run's profile; empty if it does not exist. Raises ValueError if it is corrupted."""
        try:
            found = yaml_text.parse_sections(self.read(run_files.PROFILE), SECTIONS)
        except ValueError as error:
            raise ValueError(f"{run_files.PROFILE} {error}") from error
        if not all(isinstance(found.get(name, {}), dict) for name in SECTIONS):
            raise ValueError(f"{run_files.PROFILE} is not a profile")
        return found

    def rows(self, file: str, latest: int | None = None) -> Iterator[Row]:
        """Rows of a JSON Lines file; with `latest`, only those in its last `latest` bytes."""
        size = self.size(file)
        if latest is not None and size > latest:
            return _rows(_lines(*self.ranges(file, [(size - latest, size)])))
        return _rows(self.read(file).split(b"\n")[:-1])
