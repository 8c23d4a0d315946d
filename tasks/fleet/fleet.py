"""All runs of a store: reads those that changed since the last read; computes time, speed and cost.

Summaries are cached in the store's local cache, each with the stamps of the files that it was read from. A run without a changed
file costs one listing of its folder. On an object store, that does not show that a checkpoint was removed by hand.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson

from parallel.checkpoint.locations import MARKER
from profiles.files import run_files, state_files
from tasks.fleet.goodput import CATEGORIES, STARTED, WAITING, TimeUse, time_use
from tasks.fleet.run_summary import FILES, RunSummary, read_summary
from tasks.reporting.outcome import AFTER_TRAINING
from tasks.store import activities
from tasks.store.backends.backend import Backend, FileInfo
from tasks.store.run_folder import REPLACED
from tasks.store.store import Store, read_each

log = logging.getLogger(__name__)

CACHE = "fleet.json"  # in the store's local cache
VERSION = 5  # of its contents
RANK = re.compile(r"\brank (\d+)(?: on ([^\s:;,]+))?")  # in reasons; some launchers name no node
ACTIVE = ("running", "queued")
UNREADABLE = "unreadable"  # state of a run whose folder cannot be read, or whose files are corrupted


@dataclass(frozen=True)
class RunView:
    """One run as the page shows it."""

    summary: RunSummary
    state: str  # running, queued, finished, failed, stopped, not started, replaced or UNREADABLE
    use: TimeUse
    failed_step: str | None = None  # of a failed run

    @property
    def name(self) -> str:
        return self.summary.name

    @property
    def shown_state(self) -> str:
        """The state; of a run that failed after its training, with the step that failed."""
        after = self.failed_step in AFTER_TRAINING
        return f"{self.failed_step} failed" if after else self.state

    @property
    def step(self) -> int:
        return self.summary.last["step"] if self.summary.last else 0

    @property
    def tokens(self) -> int | None:
        """Tokens of the steps that the run itself trained; None if the batch size is unknown."""
        steps = max(0, self.step - self.summary.first_step)
        return steps * self.summary.step_tokens if self.summary.step_tokens else None

    @property
    def speed_of_plan(self) -> float | None:
        """Tokens per second of the latest steps relative to the plan."""
        planned, measured = self.summary.planned.get("tokens_per_second"), self.summary.tokens_per_second
        return measured / planned if planned and measured else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the last step at the latest steps' speed and the goodput so far; None before the first."""
        return self._left(self.use.goodput)

    @property
    def cost(self) -> float | None:
        """Cost of the node hours that jobs held; None without a price."""
        hourly = self._hourly
        return None if hourly is None or not self.use.total else self.use.held / 3600 * hourly

    @property
    def final_cost(self) -> float | None:
        """Expected cost at the last step; None without a price or a trained step."""
        held = self.use.held
        left = self._left(self.use.seconds["trained"] / held if held else None)
        return None if self.cost is None or left is None else self.cost + left / 3600 * (self._hourly or 0.0)

    @property
    def planned_cost(self) -> float | None:
        """Cost of the run's own steps as planned, without starts or failures; None without price or plan."""
        summary, hourly = self.summary, self._hourly
        seconds = summary.planned.get("step_seconds")
        if seconds is None or hourly is None or summary.steps is None:
            return None
        return (summary.steps - summary.first_step) * seconds / 3600 * hourly

    @property
    def _hourly(self) -> float | None:
        price, count = self.summary.node_price, self.summary.node_count
        return None if price is None else price * (count or 1)

    def _left(self, share: float | None) -> float | None:
        if self.summary.steps is None:
            return None
        steps = max(0, self.summary.steps - self.step)
        if steps == 0:
            return 0.0
        return steps * self.summary.step_seconds / share if share and self.summary.step_seconds else None

    def to_json(self) -> dict[str, Any]:
        """Name, state, progress, speed, time by category and cost."""
        summary = self.summary
        return {
            "name": self.name,
            "state": self.state,
            "failed_step": self.failed_step,
            "step": self.step,
            "steps": summary.steps,
            "loss": summary.last["loss"] if summary.last else None,
            "validation_loss": summary.validation_loss,
            "last_validation_loss": summary.last_validation_loss,
            "tokens": self.tokens,
            "tokens_per_second": summary.tokens_per_second,
            "speed_of_plan": self.speed_of_plan,
            "goodput": self.use.goodput,
            "seconds": {name: round(seconds, 3) for name, seconds in self.use.seconds.items()},
            "seconds_left": self.seconds_left,
            "cost": self.cost,
            "final_cost": self.final_cost,
            "planned_cost": self.planned_cost,
            "parent": summary.parent,
            "changed": summary.changed,
            "problem": summary.problem,
        }


@dataclass(frozen=True)
class Node:
    """Failures and straggler warnings of a node."""

    name: str
    failures: int
    runs: tuple[str, ...]  # that failed there
    stragglers: int  # warnings
    latest: float  # seconds since 1970


@dataclass(frozen=True)
class Fleet:
    """All runs, active and latest first, and nodes with failures or straggler warnings, worst first."""

    location: str  # path or URI of the store
    time: float
    runs: Sequence[RunView]
    nodes: Sequence[Node]

    @property
    def use(self) -> dict[str, float]:
        """Device seconds of all runs by category, weighted with the nodes of each."""
        totals = dict.fromkeys(CATEGORIES, 0.0)
        for run in self.runs:
            for name, seconds in run.use.seconds.items():
                totals[name] += seconds * (run.summary.node_count or 1)
        return totals


def read_fleet(store: Store, now: float | None = None) -> Fleet:
    """Read all runs of a store; the summaries of runs that did not change come from the local cache."""
    now = time.time() if now is None else now
    path = store.local_cache / CACHE
    cached = _load(state_files.read(path))
    backends = store.backends
    entries = [entry for backend in backends for entry in backend.entries("runs").items()]
    names = sorted({name for name, entry in entries if entry.is_folder and not name.startswith(".")})
    read = read_each(store, names, lambda name: _view(store, backends, name, cached.get(name), now))
    found = dict(zip(names, read, strict=True))
    kept = {name: (stamps, view.summary) for name, (stamps, view) in found.items() if stamps is not None}
    if kept != cached:
        contents = {name: [stamps, vars(summary)] for name, (stamps, summary) in kept.items()}
        try:
            state_files.write(path, orjson.dumps({"version": VERSION, "runs": contents}), durable=False)
        except OSError as error:  # a full or read-only disk; the next call reads all runs again
            log.info("%s: cannot be written: %s", path, error)
    runs = [view for _, view in found.values()]
    runs.sort(key=lambda run: (run.state not in ACTIVE, -run.summary.changed))
    return Fleet(store.location, now, runs, nodes_of(runs))


def read_run(store: Store, name: str) -> RunView:
    """Read one run, without the cache."""
    return _view(store, store.backends, name, None, time.time())[1]


def _view(
    store: Store, backends: Sequence[Backend], name: str, cached: Cached | None, now: float
) -> tuple[dict[str, str] | None, RunView]:
    """Stamps and view of a run.

    Without stamps if its files cannot be read, so that the other runs are still shown.

    An object store that does not answer fails for all runs.
    """
    try:
        stamps, summary = _read(backends, name, cached)
        view = RunView(summary, *_state(store, summary, now))
        view.to_json()  # computes everything that is shown
        nodes_of([view])
        return stamps, view
    except (PermissionError, NotADirectoryError, IsADirectoryError, state_files.NotRegularFile) as error:
        problem = f"{error.filename or store.backend.location(f'runs/{name}')}: {error.strerror}"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        location = store.backend.location(f"runs/{name}")
        problem = f"{location}: {error if isinstance(error, ValueError) else f'corrupted ({error!r})'}"
    return None, RunView(RunSummary(name, problem=problem), UNREADABLE, time_use([], [], None))


Cached = tuple[dict[str, str], RunSummary]  # stamps of files, and what was read from them


def _load(data: bytes | None) -> dict[str, Cached]:
    """The cached summaries; none if the cache is corrupted or of another version."""
    known = {each.name for each in fields(RunSummary)}
    try:
        contents = orjson.loads(data or b"{}")
        if contents.get("version") != VERSION:
            return {}
        return {
            name: (stamps, RunSummary(**summary))
            for name, (stamps, summary) in contents["runs"].items()
            if summary.keys() == known
        }
    except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError):
        return {}


def _read(backends: Sequence[Backend], name: str, cached: Cached | None) -> Cached:
    """Stamps and summary of a run, from the copy that changed last: the remote store's or this machine's."""
    copies = [(backend, backend.entries(f"runs/{name}")) for backend in backends]
    backend, entries = max(copies, key=lambda copy: _changed(copy[1]))
    stamps = {file: f"{entries[file].size}.{entries[file].stamp}" for file in FILES if file in entries}
    primary, stored = copies[0]  # where checkpoints are
    if checkpoints := stored.get(run_files.CHECKPOINTS):
        stamps[run_files.CHECKPOINTS] = str(checkpoints.modified)
    if cached and cached[0] == stamps:
        return cached
    summary = read_summary(backend, name, entries)
    if summary.finished and summary.steps is not None:
        summary.saved = MARKER in primary.entries(f"runs/{name}/{run_files.checkpoint(summary.steps)}")
    return stamps, summary


def _changed(entries: Mapping[str, FileInfo]) -> float:
    return max((entry.modified for file, entry in entries.items() if file in FILES), default=0.0)


def _state(store: Store, summary: RunSummary, now: float) -> tuple[str, TimeUse, str | None]:
    """State, time and failed step of a run.

    Queries the lock only if its files do not show that it is finished: most flows end with a report. A run that has lost its last
    checkpoint since would train its last steps again.
    """
    ended = time_use(summary.attempts, summary.events, summary.last)
    rows = [*reversed(summary.attempts), *summary.events]  # of equal times, `max` takes the first
    rows += [summary.later_failure] if summary.later_failure else []
    latest = max(rows, key=lambda row: row["time"], default={}).get("event", "")
    failed_step = latest.removesuffix(" failed") if latest.endswith(" failed") else None
    if REPLACED.search(summary.name):
        return "replaced", ended, None
    finished = summary.finished and failed_step != "train" and latest not in WAITING
    if finished and not summary.saved:
        finished, failed_step = False, None  # a step that failed has succeeded since
    if finished and summary.reported:
        return "finished", ended, None
    if activities.holder(store, "run", summary.name):
        use = time_use(summary.attempts, summary.events, summary.last, now)
        return "queued" if latest in WAITING else "running", use, None
    if failed_step:
        return "failed", ended, failed_step
    if finished:
        return "finished", ended, None
    begun = summary.last is not None or latest == STARTED or bool(summary.attempts)
    return "stopped" if begun else "not started", ended, None


def nodes_of(runs: Sequence[RunView]) -> list[Node]:
    """Nodes that the reasons of failures and straggler warnings name, most failures first."""
    failures: dict[str, list[tuple[float, str]]] = defaultdict(list)
    stragglers: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for row in run.summary.events:
            if (node := _node_of(row, run.summary.attempts)) is None:
                continue
            if row["event"] == "straggler":
                stragglers[node].append(row["time"])
            else:
                failures[node].append((row["time"], run.name))
    found = [
        Node(
            name,
            len(failures[name]),
            tuple(sorted({run for _, run in failures[name]})),
            len(stragglers[name]),
            max([moment for moment, _ in failures[name]] + stragglers[name]),
        )
        for name in sorted(failures.keys() | stragglers.keys())
    ]
    return sorted(found, key=lambda node: (-node.failures, -node.stragglers, node.name))


def _node_of(row: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> str | None:
    """Node that an event's reason names, or that ran its rank in the latest start; None if unknown."""
    match = RANK.search(row.get("reason") or "")
    if match is None or match[2]:
        return match[2] if match else None
    starts = (each for each in reversed(attempts) if each.get("nodes") and each["time"] <= row["time"])
    if (start := next(starts, None)) is None:
        return None
    nodes, rank = start["nodes"], int(match[1])
    return nodes[rank * len(nodes) // start["devices"]] if rank < start["devices"] else None
