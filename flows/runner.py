"""Runs steps as Prefect tasks, cached by the store.

The store is the only cache: a step whose artifact is complete there ends in the state Cached. The lookup is part of the task, so
it is retried if the store does not answer.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from prefect import Task, task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.futures import PrefectFuture
from prefect.logging.handlers import APILogHandler
from prefect.states import Cancelled, Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.server.outages import shorten_outages
from flows.server.prefect_settings import GATE_MISSED, REJECTED, STOPPED
from flows.step_names import PREPARATION
from flows.ui.artifacts import show_table
from flows.ui.console import ProgressFilter, log_outcome, one_line
from flows.ui.progress import progress_reporter
from modeling.training.metrics import record_event
from profiles.errors import ProfileError
from profiles.files import retry_policies, run_files, state_files
from profiles.schema import Profile
from profiles.sections.base import required
from tasks.failures import RESTARTING, FatalError
from tasks.launchers import JobFailed
from tasks.reporting.outcome import Outcome
from tasks.sources.shard import SOURCE_ERRORS
from tasks.step import Context, Step
from tasks.store import runs
from tasks.store.artifacts import Artifact
from tasks.store.locks import Lock, LockLost
from tasks.tokenization.worker_pool import PoolClosed
from trainshed import PACKAGES

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")

RETRIES = len(retry_policies.STEP.delays)  # of steps without `may_retry`
RETRY_POLL = 0.2  # seconds, so that `Background.interrupt` takes effect
UNLIMITED = 1_000_000  # retries, for steps whose `may_retry` decides
REJECTIONS = (ProfileError, *SOURCE_ERRORS)  # errors of the input
PREFECT_PROGRESS_SECONDS = 15.0  # between progress lines in Prefect's log
PREFECT_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
NOISE = ("Task run failed with %s: %r - Retry", "Running hook ", "Hook ")  # formats of Prefect's records
FAILURES = tuple(f"Finished in state {name}(" for name in ("Failed", REJECTED, GATE_MISSED))
# Seconds before each retry; the last applies to all further ones. Jitter keeps runs that were stopped by a common cause from
# restarting all at once.
DELAYS: dict[str, Any] = {"retry_delay_seconds": [*retry_policies.RESTART.delays], "retry_jitter_factor": 0.3}
# Background steps and mapped parts share the flow's threads: two parts per core, and room for the steps that wait for them.
THREADS: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=2 * (os.cpu_count() or 1) + 8)


class StepReached(Exception):
    """The step that a flow run ends with is done."""


class Interrupted(BaseException):
    """Raised in a background step when the flow ends early."""


STOPS = (KeyboardInterrupt, TerminationSignal, Interrupted)


@dataclass
class _Call:
    """One call of a step in a flow run."""

    step: Step
    position: int  # index of its outcome
    task: Task[..., Any] | None = None
    artifact: Artifact | None = None  # found in the store or made
    cached: bool = False  # whether the store had it
    retries: int = 0
    retry_at: float = 0.0  # earliest time of the next attempt, on the clock of time.monotonic
    begun: float = field(default_factory=time.monotonic)
    thread: int | None = None  # id of the thread that it runs in; None before, between attempts and after
    interrupted: bool = False  # whether its next attempt must not begin
    stop: BaseException | None = None  # what interrupted it


class Background:
    """A step that runs in the background."""

    def __init__(self, call: _Call, finish: Callable[[_Call, State], Artifact | None]) -> None:
        self.call = call
        self._result: Future[Artifact | None] = Future()
        context = copy_context()  # so that Prefect assigns log records to the flow run
        self.future: PrefectFuture[Any] = required(call.task).submit()

        def conclude(future: PrefectFuture[Any]) -> None:
            try:
                future.wait()  # copies the final state from the thread
                self._result.set_result(context.run(finish, call, future.state))
            except BaseException as error:
                self._result.set_exception(error)

        self.future.add_done_callback(conclude)

    def result(self) -> Artifact | None:
        """Wait for the step. Returns its artifact, None if skipped; raises the error that made it fail."""
        return self._result.result()

    def interrupt(self) -> None:
        """Raise `Interrupted` in the step, as Ctrl-C would in the main thread, and wait for its end.

        A step that waits for a thread or for its next attempt raises it when that attempt begins.
        """
        self.call.interrupted = True  # before `thread` is read, which `work` sets before it reads this
        if (thread := self.call.thread) is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupted))
        wait([self._result])


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
        self.context, self._keeps_recorded = context, keeps_recorded
        self._lock, self._until, self.reached = lock, until, False
        self.outcomes: list[Outcome] = []  # in the order in which the steps were started
        self._background: list[Background] = []
        self._used: dict[str, list[str]] = {}  # keys of the artifacts that were used, by kind
        self._unrecorded: list[dict[str, Any]] = []  # failures before there was a run folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Interrupt background steps, which are still running only if the flow ends early."""
        for background in self._background:
            background.interrupt()

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

    def open(self, profile: Profile, folder: Path) -> None:
        """Switch to this profile and run folder; its events.jsonl records failures, including earlier ones."""
        self.context = replace(self.context, profile=profile, folder=folder)
        for failure in self._unrecorded:
            record_event(folder, **failure)
        self._unrecorded.clear()
        self._write_use()

    def run_function(
        self, name: str, function: Callable[[], T], describe: Callable[[T], str], retries: int = 0
    ) -> T:
        """Run a function that makes no artifact as a task, whose run is named after the profile."""
        begun, position = time.monotonic(), self._reserve(name)
        options: dict[str, Any] = {"name": name, "task_run_name": f"{name} {self.context.profile.name}"}
        if retries:
            options |= {**DELAYS, "retries": retries, "retry_condition_fn": worth_retrying}
        state = _run_here(_task(function, options))
        how = "done" if state.is_completed() else "failed"
        found: Any = state.result(raise_on_failure=False)
        note = describe(found) if how == "done" else ""
        self._conclude(position, Outcome(name, how, time.monotonic() - begun, note))
        result: T = state.result()
        self._pass(name)
        return result

    def run(self, step: Step, context: Context | None = None) -> Artifact | None:
        """Run a step, optionally in another context. Returns its artifact, None if skipped; raises its error."""
        # Called directly, not submitted, so that a cancellation reaches the step, which then ends its child processes.
        call = self._prepare(step, context or self.context)
        artifact = self._finish(call, _run_here(required(call.task)))
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
        background = Background(self._prepare(step, self.context), self._finish)
        self._background.append(background)
        return background

    def _prepare(self, step: Step, context: Context) -> _Call:
        call, profile = _Call(step, self._reserve(step.name)), context.profile
        if reason := step.skip_reason(profile):

            def skip() -> State:
                return Completed(name="Skipped", message=reason)

            call.task = _task(skip, {"name": step.name, "task_run_name": step.name})
            return call
        key = step.key(context)
        progress = progress_reporter(step.kind, f"{profile.name}: progress of {step.name}")
        context = replace(context, progress=progress, table=show_table, map=_map)

        def work() -> State:
            call.thread = threading.get_ident()
            try:
                if call.interrupted:
                    raise Interrupted
                while time.monotonic() < call.retry_at:
                    time.sleep(RETRY_POLL)
                self.require_lock()
                found = step.find(context, key) if key is not None else None
                call.artifact, call.cached = found or step.run(context, key), found is not None
            except STOPS as stop:
                call.stop = stop
                return Cancelled(name=STOPPED)
            finally:
                call.thread = None
            return Completed(name="Cached" if call.cached else "Completed", data=call.artifact.to_json())

        options = {"name": step.name, "task_run_name": step.title(profile), **self._retries(call, context)}
        call.task = _task(work, options)
        return call

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

    def _retries(self, call: _Call, context: Context) -> dict[str, Any]:
        """Prefect's options for the retries of a step."""
        decide = call.step.may_retry(context)

        def condition(made: Task[..., Any], run: TaskRun, state: State) -> bool:
            if not worth_retrying(made, run, state):
                return False
            pause = 0.0 if decide is None else decide(state.result(raise_on_failure=False))
            if pause is None:
                return False
            call.retry_at = time.monotonic() + pause
            call.retries += 1
            self._record(call.step.name, "retried", state)
            if decide is None:  # `may_retry` logs its own decisions
                log.warning("%s failed: %s", call.step.name, _reason(state))
                log.warning(RESTARTING, call.step.name, call.retries + 1, RETRIES + 1)
            return True

        return {
            **DELAYS,
            "retries": RETRIES if decide is None else UNLIMITED,
            "retry_condition_fn": condition,
        }

    def _finish(self, call: _Call, state: State) -> Artifact | None:
        """Record the outcome of a step, and return its artifact or raise its error."""
        name, position, seconds = call.step.name, call.position, time.monotonic() - call.begun
        if call.stop is not None:
            self._conclude(position, Outcome(name, "stopped", seconds, retries=call.retries))
            raise call.stop
        if not state.is_completed():
            self._conclude(position, Outcome(name, "failed", seconds, retries=call.retries))
            self._record(name, "failed", state)
        state.result()  # raises the step's error
        artifact = call.artifact
        if artifact is None:
            self._conclude(position, Outcome(name, "skipped", None, state.message or ""))
            return None
        how, took = ("cached", artifact.seconds) if call.cached else ("done", seconds)
        self.record_use(artifact)
        note, summary = call.step.describe(artifact.summary), artifact.summary
        self._conclude(position, Outcome(name, how, took, note, summary, call.retries))
        return artifact

    def record_use(self, artifact: Artifact) -> None:
        """Record that the run uses an artifact, so that garbage collection keeps it."""
        if artifact.key and artifact.key not in self._used.get(artifact.kind, ()):
            self._used.setdefault(artifact.kind, []).append(artifact.key)
        if self.context.folder is not None:
            self._write_use()

    def _write_use(self) -> None:
        """Record the used artifacts in the run folder: in place of those of the same kinds, or in addition."""
        store = self.context.store
        run = store.run_folder(self.context.run_folder.name)
        with store.lock(f"artifacts-{run.name}"):  # an evaluation may record its artifacts at the same time
            known = self._recorded_use(run.read(run_files.ARTIFACTS))
            kept = known if self._keeps_recorded else {}
            own = {kind: [*dict.fromkeys([*kept.get(kind, ()), *keys])] for kind, keys in self._used.items()}
            if known != (used := known | own):
                run.write(run_files.ARTIFACTS, json.dumps(used, indent=1).encode())

    def _recorded_use(self, data: bytes | None) -> dict[str, list[str]]:
        """The artifacts that the run folder refers to.

        Empty if the file is corrupted and this flow uses all artifacts anyway.
        """
        if data is None:
            return {}
        location = self.context.run_folder / run_files.ARTIFACTS
        types = dict.fromkeys(state_files.parse(data) or (), list)
        if self._keeps_recorded:
            return state_files.require_json(data, location, types)
        if (known := state_files.parse_json(data, location, types)) is None:
            log.warning("%s: written anew", location)
        return known or {}

    def _record(self, name: str, how: str, state: State) -> None:
        """Record a failed attempt in events.jsonl, with the last training step.

        An OSError is logged and not raised, because it would keep Prefect from retrying the step.
        """
        event: dict[str, Any] = {
            "event": f"{name} {how}",
            "time": round(time.time(), 3),
            "reason": _reason(state),
        }
        folder = self.context.folder
        if folder is None:
            self._unrecorded.append(event)
            return
        try:
            row = runs.last_training_row(folder) if name == "train" else None
            record_event(folder, **event, **({"step": row["step"]} if row else {}))
        except OSError as error:
            log.warning("not recorded in the run's events: %s; %s", event["event"], error)

    def _reserve(self, name: str) -> int:
        self.outcomes.append(Outcome(name, "running", None))
        return len(self.outcomes) - 1

    def _conclude(self, position: int, outcome: Outcome) -> None:
        self.outcomes[position] = outcome
        log_outcome(log, outcome)


def _reason(state: State) -> str | None:
    """The error that made a task fail, in one line."""
    failure = state.result(raise_on_failure=False)
    return one_line(failure) if isinstance(failure, Exception) else state.message


def worth_retrying(made: Task[..., Any], run: TaskRun, state: State) -> bool:
    """Whether a retry could succeed.

    Not if the input was rejected, a state file is corrupted, or a job's failure was fatal.
    """
    try:
        state.result()
    except (*REJECTIONS, PoolClosed, FatalError, state_files.CorruptedState):
        return False
    except Exception:
        return True
    return False


def forward_logs() -> None:
    """Send our log records to Prefect's UI, and filter Prefect's own there (`_is_news`)."""
    shorten_outages()
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            handler = APILogHandler()
            handler.addFilter(lambda _: bool(TaskRunContext.get() or FlowRunContext.get()))
            handler.addFilter(_throttle)
            logger.addHandler(handler)
    for name in PREFECT_LOGGERS:
        for existing in logging.getLogger(name).handlers:
            if isinstance(existing, APILogHandler):
                existing.addFilter(_is_news)


_throttle = ProgressFilter(PREFECT_PROGRESS_SECONDS)  # shared by all packages


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a Prefect log record adds information to our lines and the final states.

    Prefect's retry line would count up to UNLIMITED, and the message of a rejection or a failed job needs no traceback. Prefect
    logs the end of every flow run as information; that of one that failed is an error.
    """
    if isinstance(record.msg, str) and record.msg.startswith(NOISE):
        return False
    if isinstance(record.msg, str) and record.msg.startswith(FAILURES):
        record.levelno, record.levelname = logging.ERROR, logging.getLevelName(logging.ERROR)
    error = record.exc_info and record.exc_info[1]
    return not isinstance(error, (*REJECTIONS, JobFailed, CancelledRun))


def _task(function: Callable[..., Any], options: dict[str, Any]) -> Task[..., Any]:
    """A Prefect task whose results are not cached."""
    made: Task[..., Any] = task(cache_policy=NO_CACHE, **options)(function)
    return made


def _run_here(made: Task[..., Any]) -> State:
    """Run a task without arguments here; returns its final state."""
    found: Any = made(return_state=True)  # typed as a coroutine, which it is for asynchronous functions only
    state: State = found
    return state


@task(
    task_run_name="{name}",
    retries=RETRIES,
    retry_condition_fn=worth_retrying,
    cache_policy=NO_CACHE,
    **DELAYS,
)
def map_item(function: Callable[[T], R], item: T, name: str) -> R:
    """Process one item of a step, as a separate task."""
    return function(item)


def _map(function: Callable[[T], R], items: Sequence[T], names: Sequence[str]) -> Iterable[R]:
    """Run a function for each item as a separate task, which Prefect shows and retries."""
    futures: Iterable[Any] = map_item.map(unmapped(function), list(items), list(names))
    for future in futures:
        yield future.result()
