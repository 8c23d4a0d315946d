"""Goodput of a run: the share of its time in steps that count, and what the rest was spent on.

Computed from files that every run writes: attempts.jsonl and the totals in the last row of metrics.jsonl
(modeling/supervision/time_account.py), and the failures in events.jsonl. Each second of a run, from its first submission to its
end, is in one category:

    trained      steps that are part of the run's current state
    queue        a job waited for devices
    start        from the start of a job until its ranks are ready, except restore; also jobs that failed before they were ready
    restore      reading a checkpoint, at a start or in a rollback
    compile      time of the first step of a process beyond that of the second
    repeated     steps that a later start or a rollback discarded, time of a failed job after its last recorded step, and steps
                 whose update was skipped
    checkpoint   training waited for a checkpoint
    evaluation   evaluations during training
    hang         from the last step of a hung job to its end
    idle         no job, or a job between steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modeling.supervision.time_account import TOTALS, totals_of

CATEGORIES = (
    *("trained", "queue", "start", "restore", "compile", "repeated", "checkpoint", "evaluation", "hang"),
    "idle",
)
SUBMITTED, STARTED, ROLLBACK, ENDED = "submitted", "started", "rollback", "ended"
WAITING = (SUBMITTED, "queued", "released", "held")  # events after which a job waits for devices
FAILURES = ("train retried", "train failed")  # events of the flow (flows/runner/records.py)
CATEGORY_OF = dict(zip(TOTALS, ("trained", "repeated", "compile", "evaluation", "checkpoint"), strict=True))
Row = Mapping[str, Any]


@dataclass
class TimeUse:
    """Seconds of a run by category."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    released: float = 0.0  # idle seconds without a job, so without devices

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def held(self) -> float:
        """Seconds in which a job held its devices."""
        return self.total - self.seconds["queue"] - self.released

    @property
    def goodput(self) -> float | None:
        """Share of the time in steps that count; None before the first."""
        return self.seconds["trained"] / self.total if self.total and self.seconds["trained"] else None

    def add(self, category: str, seconds: float) -> None:
        """Add seconds to a category; negative ones, from clocks of machines that differ, count as 0."""
        self.seconds[category] += max(0.0, seconds)

    def add_idle(self, seconds: float) -> None:
        """Add idle seconds without a job, and so without devices."""
        self.add("idle", seconds)
        self.released += max(0.0, seconds)


def time_use(
    attempts: Sequence[Row], events: Sequence[Row], last: Row | None, now: float | None = None
) -> TimeUse:
    """Divide the time of a run.

    Args:
        attempts: rows of attempts.jsonl.
        events: rows of events.jsonl; only failures of jobs count.
        last: the last training row of metrics.jsonl.
        now: the current time if the run is active: until then, time without a running job counts as queue or idle.
    """
    use, timeline = TimeUse(), _timeline(attempts, events, last)
    first = timeline[0][0] if timeline else {"time": 0.0}
    begin = min(first.get("begun", first["time"]), first["time"])
    running = 0.0  # seconds from a start to the end of what it recorded
    cursor, submitted, started = begin, False, False
    for row, reached in timeline:
        event, time = row["event"], row["time"]
        if event == SUBMITTED:
            use.add_idle(time - cursor)
            submitted, started = True, False
        elif event == STARTED:
            begun = min(max(row.get("begun", time), cursor), time)
            restoring = min(row.get("restore_seconds", 0.0), time - begun)
            use.add("queue", begun - cursor)  # without a submission: requeued by its scheduler
            use.add("restore", restoring)
            use.add("start", time - begun - restoring)
            running += max(0.0, reached - time)
            cursor, submitted, started = max(time, reached), False, True
            continue
        elif event == ENDED:  # the start's `reached` covers it
            started = False
            continue
        elif started:  # a failure
            use.add("hang" if "hung" in str(row.get("reason", "")) else "repeated", time - cursor)
            started = False
        elif submitted:  # a failure before the ranks were ready
            use.add("start", time - cursor)
            submitted = False
        else:
            use.add_idle(time - cursor)
        cursor = max(cursor, time)
    if now is not None and not started and begin:
        if submitted:
            use.add("queue", now - cursor)
        else:
            use.add_idle(now - cursor)
    _add_phases(use, attempts, last, running)
    return use


def _add_phases(use: TimeUse, attempts: Sequence[Row], last: Row | None, running: float) -> None:
    """Split `running`, the seconds jobs trained, by the totals of the last row and of discarded steps."""
    phases = dict.fromkeys(CATEGORIES, 0.0)
    for name, seconds in totals_of(last).items():
        phases[CATEGORY_OF[name]] += seconds
    for row in attempts:
        for name, seconds in row.get("dropped", {}).items():
            phases["repeated" if name == "trained_seconds" else CATEGORY_OF[name]] += seconds
        for name, seconds in row.get("after_last", {}).items():
            phases[CATEGORY_OF[name]] += seconds
        if row["event"] == ROLLBACK:
            phases["restore"] += row.get("restore_seconds", 0.0)
    for category, seconds in phases.items():
        use.add(category, seconds)
    use.add("idle", running - sum(phases.values()))


def _timeline(attempts: Sequence[Row], events: Sequence[Row], last: Row | None) -> list[tuple[Row, float]]:
    """Submissions, starts, ends and failures in order, with their times; of a start, its last record's.

    That is a step, a rollback or its end.
    """
    rows = [row for row in attempts if row["event"] in (SUBMITTED, STARTED, ENDED)]
    rows += [row for row in events if row["event"] in FAILURES]
    rows.sort(key=lambda row: row["time"])
    recorded = [row["time"] for row in attempts if row["event"] in (ROLLBACK, ENDED)]
    starts = [row for row in rows if row["event"] == STARTED]
    reached: dict[int, float] = {}
    for start, after in zip(starts, [*starts[1:], None], strict=False):
        until = after["time"] if after else float("inf")
        latest = after.get("last_time", 0.0) if after else (last or {}).get("time", 0.0)
        own = [time for time in recorded if start["time"] <= time < until]
        reached[id(start)] = max(start["time"], latest, *own)
    return [(row, reached[id(row)] if row["event"] == STARTED else row["time"]) for row in rows]
