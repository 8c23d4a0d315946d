"""Prefect events of a run, `trainshed.run.<kind>`, for automations such as alerts.

The flow emits them, as ranks do not use Prefect: it reads the run folder's events.jsonl, attempts.jsonl and checkpoints.
RUN/alerts.json records what was emitted, so that a restarted flow emits what happened while no flow ran, and nothing twice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prefect.events import emit_event

from flows.server.prefect_settings import EVENT, RESOURCE
from profiles.errors import counted
from profiles.files import run_files, state_files
from profiles.files.jsonl import LogFollower, is_event
from profiles.schema import Profile
from tasks.failures import HUNG
from tasks.launchers.base import NODE_FAILED
from tasks.store.run_folder import RunFolder

log = logging.getLogger(__name__)

# events.jsonl entries, and the kinds that are emitted for them
FROM_RANKS = {
    **{event: event for event in ("rollback", "straggler", "resumed")},
    "corrupted checkpoint": "corrupted-checkpoint",
}
# Of what was emitted, in RUN/alerts.json: rows read, steps, and the number of alerts of failed saves; and whether the flow that
# began last writes a report.
STATE = dict.fromkeys(("events", "attempts", "steps", "skipped", "checkpoint", "unsaved", "reports"), int)
UNSAVED_INTERVALS = 2  # of `checkpoint.every`, after which training without a checkpoint is reported again
POLL_SECONDS = 2.0  # of the run folder's files
CHECKPOINT_POLL_SECONDS = 15.0  # of the store's checkpoints
QUEUED_SECONDS = 1800.0  # until a job that has not started is reported


def emit(kind: str, run: str, message: str, **facts: Any) -> None:
    """Emit an event of a run; a server that rejects it or is unreachable is ignored."""
    resource = {"prefect.resource.id": f"{RESOURCE}{run}", "prefect.resource.name": run}
    with contextlib.suppress(Exception):
        emit_event(f"{EVENT}{kind}", resource, payload={"run": run, "message": message, **facts})


class RunAlerts:
    """Emits the events of one run; `update` is called while it trains, several times a second.

    Args:
        reports: whether the flow ends with a report.

    Attributes:
        trained: whether the flow has trained the last step, or found it trained.
    """

    def __init__(self, profile: Profile, run: RunFolder, *, reports: bool = False) -> None:
        self._profile, self._run, self._reports, self.trained = profile, run, reports, False
        self._path = run.path / run_files.ALERTS
        self._state: dict[str, Any] = state_files.read_json(self._path, STATE) or {}
        self._events = LogFollower(run.path / run_files.EVENTS)
        self._attempts = LogFollower(run.path / run_files.ATTEMPTS)
        self._seen = {"events": 0, "attempts": 0}  # rows read
        self._polled = self._listed = 0.0
        self._submitted: float | None = None  # when the job that has not started was submitted or requeued

    def begin(self) -> None:
        before = dict(self._state)
        if "steps" not in self._state:
            self._state["steps"] = 0
            self._emit("started", f"started: {counted(self._profile.train.last_step, 'step')} to train")
        self._state["reports"] = self._reports
        if self._state != before:
            self._save()

    def finish(self) -> None:
        """Emit the remaining events, and "finished" unless it was emitted before; alerts never fail a run.

        A flow that ends with an earlier step (`--until`) has not finished the run.
        """
        self.update_last()
        steps = self._profile.train.last_step
        if self._state["steps"] != steps and self.trained:
            self._state["steps"] = steps
            self._emit("finished", f"finished after {counted(steps, 'step')}", step=steps)
            self._save()

    def update(self, *, now: bool = False) -> None:
        """Emit new events; without `now`, poll the files at most every few seconds."""
        clock = time.monotonic()
        if not now and clock - self._polled < POLL_SECONDS:
            return
        self._polled, before = clock, json.dumps(self._state)
        for row in self._new("events", self._events):
            self._event(row)
        for row in self._new("attempts", self._attempts):
            self._attempt(row)
        if self._submitted is not None and time.time() - self._submitted > QUEUED_SECONDS:
            self._submitted, minutes = None, QUEUED_SECONDS / 60
            self._emit("queued", f"its job has not started for {minutes:.0f} minutes")
        if now or clock - self._listed > CHECKPOINT_POLL_SECONDS:
            self._listed = clock
            self._checkpoints()
        if json.dumps(self._state) != before:
            self._save()

    def update_last(self) -> None:
        try:
            self.update(now=True)
        except OSError as error:
            log.warning("alerts of %s: %s; some may be missing", self._run.name, error)

    def _new(self, name: str, follower: LogFollower) -> Iterator[Mapping[str, Any]]:
        """New rows of a file, except those whose events an earlier flow run has emitted."""
        for row in follower.rows(is_event):
            self._seen[name] += 1
            if self._seen[name] > self._state.get(name, 0):
                self._state[name] = self._seen[name]
                yield row

    def _event(self, row: Mapping[str, Any]) -> None:
        """Handle a row of events.jsonl: from ranks, or a failed attempt recorded by the flow."""
        event, reason = row["event"], str(row.get("reason") or "")
        facts = {"step": row["step"]} if isinstance(row.get("step"), int) else {}
        reached = row.get("step") if event == "resumed" else row.get("back_to")  # by a rollback
        if isinstance(reached, int):  # later checkpoints are written again
            self._state["checkpoint"] = min(self._state.get("checkpoint", 0), reached)
        if event in FROM_RANKS:
            self._emit(FROM_RANKS[event], f"{event}: {reason}", **facts)
        elif event == "skipped":
            step = facts.get("step", 0)
            if step != self._state.get("skipped", -1) + 1:  # one event per spike
                self._emit("spike", f"step {step:,} skipped: {reason}", **facts)
            self._state["skipped"] = step
        elif event == "not saved":
            self._not_saved(facts.get("step", 0), reason)
        elif event == "held":
            self._emit("queued", reason)
        elif HUNG in reason:
            self._emit("hang", reason, **facts)
        elif NODE_FAILED in reason:
            self._emit("node-lost", reason, **facts)

    def _not_saved(self, step: int, reason: str) -> None:
        """Report the first failed save since a checkpoint, and that there has been none for long."""
        latest, reported = self._state.get("checkpoint", 0), self._state.get("unsaved", 0)
        message = f"step {step:,} could not be saved: {reason}"
        if not reported:
            self._state["unsaved"] = 1
            self._emit("not-saved", message, step=step)
        elif reported == 1 and step - latest > UNSAVED_INTERVALS * (
            self._profile.checkpoint.every or math.inf
        ):
            self._state["unsaved"] = 2
            since = f"no checkpoint since step {latest:,}" if latest else "no checkpoint yet"
            self._emit("not-saved", f"{message}; {since}", step=step)

    def _attempt(self, row: Mapping[str, Any]) -> None:
        """Handle a row of attempts.jsonl: a job was submitted or requeued, or its ranks have started or ended."""
        if row["event"] == "submitted" or (row["event"] == "queued" and self._submitted is None):
            self._submitted = float(row["time"])
        elif row["event"] in ("started", "ended"):
            self._submitted = None

    def _checkpoints(self) -> None:
        latest = self._state.get("checkpoint", 0)
        steps = [step for step in self._run.checkpoint_steps() if step > latest]
        for step in steps:
            self._emit("checkpoint", f"the checkpoint of step {step:,} is complete", step=step)
            self._state["checkpoint"], self._state["unsaved"] = step, 0

    def _emit(self, kind: str, message: str, **facts: Any) -> None:
        name = self._run.name
        store = str(self._run.checkpoints_location).rpartition("/runs/")[0]
        emit(kind, name, f"{name}: {message}", folder=str(self._run.path), store=store, **facts)

    def _save(self) -> None:
        with contextlib.suppress(OSError):  # a full disk may repeat an alert
            state_files.write(self._path, json.dumps(self._state))


@contextlib.contextmanager
def alerts(profile: Profile, run: RunFolder, *, reports: bool = False) -> Iterator[RunAlerts]:
    """Emit the events of a run during the block, and "finished" if it trains and ends without an error."""
    found = RunAlerts(profile, run, reports=reports)
    found.begin()
    try:
        yield found
    except BaseException:
        found.update_last()
        raise
    found.finish()
