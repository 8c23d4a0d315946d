"""Runner: runs the steps of a flow run, and records how they ended.

The store is the only cache: a step whose artifact is complete there ends in the state Cached. The lookup is part of the task, so
it is retried if the store does not answer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from prefect.client.schemas.objects import State
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.runner.records import Failures, UsedArtifacts
from flows.runner.retries import retry_options
from flows.runner.step_task import Background, StepTask, make_task, run_here
from flows.step_names import PREPARATION
from flows.ui.console import log_outcome
from profiles.schema import Profile
from tasks.failures import FatalError
from tasks.reporting.outcome import Outcome
from tasks.step import Context, Step
from tasks.store.artifacts import Artifact
from tasks.store.locks import Lock, LockLost

log = logging.getLogger(__name__)
T = TypeVar("T")

# For mapped parts: two per core, and a few that only wait.
THREADS: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=2 * (os.cpu_count() or 1) + 8)


class StepReached(Exception):
    """The step that a flow run ends with is done."""


class Runner:
    """Context manager that runs a flow run's steps and records outcomes; `open` adds the run folder.

    Args:
        lock: the lock under which the flow uses the run, which every attempt of a step requires; None if it has none.
        until: name of the step to end with, which leaves the block of `until_reached`; empty: none.
        keeps_recorded: whether to keep the references of the run folder to artifacts: for flows that only add to them.

    Attributes:
        reached: whether that step is done.
    """

    def __init__(
        self, context: Context, lock: Lock | None = None, until: str = "", *, keeps_recorded: bool = False
    ) -> None:
        self.context, self._lock = context, lock
        self._until, self.reached = until, False
        self.outcomes: list[Outcome] = []  # in the order in which the steps were started
        self._background: list[Background] = []
        self._used, self._failures = UsedArtifacts(keeps_recorded), Failures(context.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Interrupt background steps, which are still running only if the flow ends early."""
        for background in self._background:
            background.interrupt()
        for background in self._background:
            background.wait()

    @contextmanager
    def until_reached(self) -> Iterator[None]:
        """Leave the block once the step to end with is done."""
        with suppress(StepReached):
            yield

    def _pass(self, step: str) -> None:
        """Raise StepReached after the step to end with."""
        if step == self._until:
            self.reached = True
            raise StepReached(step)

    def is_done(self, step: str) -> bool:
        """Whether a step has made its artifact, or found it in the store."""
        return any(each.step == step and each.how in ("done", "cached") for each in self.outcomes)

    def open(self, profile: Profile, folder: Path) -> None:
        """Switch to this profile and run folder; its events.jsonl records failures, including earlier ones."""
        self.context = replace(self.context, profile=profile, folder=folder)
        self._failures.open(folder)
        self._used.write(self.context)

    def run_function(
        self, name: str, function: Callable[[], T], describe: Callable[[T], str], retries: int = 0
    ) -> T:
        """Run a function that makes no artifact as a task, whose run is named after the profile."""
        begun, position = time.monotonic(), self._reserve(name)
        options: dict[str, Any] = {"name": name, "task_run_name": f"{name} {self.context.profile.name}"}
        if retries:
            options |= retry_options(retries)
        state = run_here(make_task(function, options))
        how = "done" if state.is_completed() else "failed"
        found: Any = state.result(raise_on_failure=False)
        note = describe(found) if how == "done" else ""
        self._conclude(position, Outcome(name, how, time.monotonic() - begun, note))
        result: T = state.result()
        self._pass(name)
        return result

    def run(self, step: Step, context: Context | None = None) -> Artifact | None:
        """Run a step, optionally in another context. Returns its artifact, None if skipped; raises its error."""
        made, finish = self._prepare(step, context or self.context)
        artifact = finish(made.run())
        self._pass(step.name)
        return artifact

    def start(self, step: Step) -> Background | None:
        """Start a step in the background, concurrently with the following steps.

        If the flow ends with this step, runs it here; if with an earlier one that does not need it, returns None.
        """
        if step.name == self._until:
            self.run(step)
        if self._until in PREPARATION:
            return None
        background = Background(*self._prepare(step, self.context))
        self._background.append(background)
        return background

    def _prepare(self, step: Step, context: Context) -> tuple[StepTask, Callable[[State], Artifact | None]]:
        """The task of a step, and what takes its final state: records it, and returns its artifact."""
        position = self._reserve(step.name)

        def record(state: State) -> None:
            self._failures.record(step.name, "retried", state)

        made = StepTask(step, context, self.require_lock, record)
        return made, lambda state: self._finish(made, state, position)

    def require_lock(self) -> None:
        """Raise FatalError if another process has taken over the lock under which this one uses the run."""
        if self._lock is None:
            return
        try:
            self._lock.check()
        except LockLost as error:
            reason = (
                "another process took over its lock while this one was suspended or cut off from the store"
            )
            todo = "start it again to wait for that process"
            raise FatalError(f"run {self.context.profile.name}: {reason}; {todo}") from error

    def _finish(self, made: StepTask, state: State, position: int) -> Artifact | None:
        """Record the outcome of a step, and return its artifact or raise its error."""
        step, artifact, seconds = made.step, made.artifact, time.monotonic() - made.begun
        if made.stop is not None:
            self._conclude(position, Outcome(step.name, "stopped", seconds, retries=made.retries))
            raise made.stop
        if not state.is_completed():
            self._conclude(position, Outcome(step.name, "failed", seconds, retries=made.retries))
            self._failures.record(step.name, "failed", state)
        state.result()  # raises the step's error
        if artifact is None:
            self._conclude(position, Outcome(step.name, "skipped", None, state.message or ""))
            return None
        how, took = ("cached", artifact.seconds) if made.cached else ("done", seconds)
        self.record_use(artifact)
        note, summary = step.describe(artifact.summary), artifact.summary
        self._conclude(position, Outcome(step.name, how, took, note, summary, made.retries))
        return artifact

    def keep_used(self, folder: Path) -> None:
        """Add the artifacts used so far to those of a run folder that is not open."""
        self._used.keeps_recorded = True  # the run that has the folder, if any, still uses its own
        self._used.write(replace(self.context, folder=folder))

    def record_use(self, artifact: Artifact) -> None:
        """Record that the run uses an artifact, so that garbage collection keeps it."""
        self._used.add(artifact)
        if self.context.folder is not None:
            self._used.write(self.context)

    def _reserve(self, name: str) -> int:
        self.outcomes.append(Outcome(name, "running", None))
        return len(self.outcomes) - 1

    def _conclude(self, position: int, outcome: Outcome) -> None:
        self.outcomes[position] = outcome
        log_outcome(log, outcome)
