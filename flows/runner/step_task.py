"""One step of a flow run as a Prefect task, in the foreground or the background.

How a step ends:

    Prefect's state         Outcome.how   the flow gets                       when
    ─────────────────────   ───────────   ─────────────────────────────────   ──────────────────────────────────────────────
    Completed "Skipped"     skipped       None                                the profile does not need it
    Completed "Cached"      cached        the artifact                        the store has it
    Completed               done          the artifact                        it was made
    Cancelled "Stopped"     stopped       what stopped it, raised again       Ctrl-C, SIGTERM or `Background.interrupt`
    Failed                  failed        its error                           an attempt failed and is not retried

Each attempt waits if `may_retry` asked for it, requires the run's lock, looks in the store, and makes a missing artifact.
A foreground step is called in the flow's thread, so that a cancellation of the flow reaches the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, replace
from typing import Any, TypeVar

from prefect import Task, task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Completed

from flows.runner.interruption import Interruption, await_end
from flows.runner.retries import StepRetries, retry_options
from flows.server.prefect_settings import STOPPED
from flows.ui.artifacts import show_table
from flows.ui.console import log_waiting
from flows.ui.progress import ProgressReporter
from tasks.step import Context, Step
from tasks.store.artifacts import Artifact

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


class Interrupted(BaseException):
    """Raised in a background step when the flow ends early."""


STOPS = (KeyboardInterrupt, TerminationSignal, Interrupted)


def make_task(function: Callable[..., Any], options: dict[str, Any]) -> Task[..., Any]:
    """A Prefect task whose results are not cached."""
    made: Task[..., Any] = task(cache_policy=NO_CACHE, **options)(function)
    return made


def run_here(made: Task[..., Any]) -> State:
    """Run a task without arguments in this thread; returns its final state."""
    found: Any = made(return_state=True)  # typed as a coroutine, which it is for asynchronous functions only
    state: State = found
    return state


class StepTask:
    """A step's Prefect task, to be run once.

    Args:
        check: called before each attempt; raises if the flow may not go on.
        record: called with the state of each attempt that is retried.

    Attributes:
        artifact: found in the store or made; None before that, and if the step is skipped.
        cached: whether the store had it.
        stop: what stopped the step; None if nothing did.
        retries: number of retries so far.
        begun: when the task was made, on the clock of time.monotonic.
    """

    def __init__(
        self, step: Step, context: Context, check: Callable[[], None], record: Callable[[State], None]
    ) -> None:
        self.step, self.begun = step, time.monotonic()
        self.artifact: Artifact | None = None
        self.cached, self.retries = False, 0
        self.stop: BaseException | None = None
        self.interruption = Interruption(Interrupted)
        if reason := step.skip_reason(context.profile):
            options = {"name": step.name, "task_run_name": step.name}
            self._task = make_task(lambda: Completed(name="Skipped", message=reason), options)
        else:
            self._task = self._make(context, check, record)

    def run(self) -> State:
        """Run it in this thread; returns its final state."""
        return run_here(self._task)

    def _make(
        self, context: Context, check: Callable[[], None], record: Callable[[State], None]
    ) -> Task[..., Any]:
        step, profile = self.step, context.profile
        key = step.key(context)
        progress = ProgressReporter(step.kind, f"{profile.name}: progress of {step.name}")
        context = replace(context, progress=progress, table=show_table, map=map_items)

        def count(state: State) -> None:
            self.retries += 1
            record(state)

        retries = StepRetries(step, context, count)

        def attempt() -> State:
            try:
                with self.interruption:
                    retries.wait()
                    check()
                    found = step.find(context, key) if key is not None else None
                    if found is None:
                        log_waiting(log, step.title(profile))
                    self.artifact, self.cached = found or step.run(context, key), found is not None
                    progress.finish()
            except STOPS as stop:
                self.stop = stop
                return Cancelled(name=STOPPED)
            return Completed(name="Cached" if self.cached else "Completed", data=asdict(self.artifact))

        return make_task(
            attempt, {"name": step.name, "task_run_name": step.title(profile), **retries.options}
        )


class Background:
    """A step that runs in a thread of its own.

    Args:
        finish: called in that thread with the step's final state; returns its artifact or raises its error.
    """

    def __init__(self, made: StepTask, finish: Callable[[State], Artifact | None]) -> None:
        self.task = made
        pool = ThreadPoolExecutor(1)
        # In the flow's context, so that Prefect assigns the task run and its log records to the flow run.
        self._result = pool.submit(copy_context().run, lambda: finish(made.run()))
        pool.shutdown(wait=False)  # the thread ends with the step

    def result(self) -> Artifact | None:
        """Wait for the step. Returns its artifact, None if skipped; raises the error that made it fail."""
        await_end(self._result)
        return self._result.result()

    def interrupt(self) -> None:
        """Raise `Interrupted` in the step; `wait` for its end.

        A step that waits for its next attempt raises it when that begins.
        """
        self.task.interruption.interrupt()

    def wait(self) -> None:
        """Wait for the end of the step, however it ends."""
        await_end(self._result)


@task(task_run_name="{name}", cache_policy=NO_CACHE, **retry_options())
def map_item(function: Callable[[T], R], item: T, name: str) -> R:
    """Process one item of a step, as a separate task."""
    return function(item)


def map_items(function: Callable[[T], R], items: Sequence[T], names: Sequence[str]) -> Iterable[R]:
    """Run a function for each item as a separate task, which Prefect shows and retries."""
    futures: Iterable[Any] = map_item.map(unmapped(function), list(items), list(names))
    for future in futures:
        await_end(future.wrapped_future)
        yield future.result()
