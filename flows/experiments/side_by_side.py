"""Runs of a ladder, mixture or branches: train several at a time.

Each is an ordinary run of the pretraining flow, so finished ones are cached and interrupted ones resume.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from flows.pretrain import pretrain
from flows.runner.interruption import Interruption
from flows.ui.console import log_waiting
from modeling.scaling.planned_run import PlannedRun
from profiles.errors import ProfileError, counted
from profiles.experiments import Experiment
from tasks.reporting.format import format_duration

log = logging.getLogger(__name__)

_run: ContextVar[str] = ContextVar("run", default="")  # name of the run that log records belong to


def file_name() -> str:
    """Name of the flow run in Prefect's UI: the name of the file that describes the runs."""
    return Path(flow_run.parameters["file"]).stem


def train_alone(run: PlannedRun, store: str) -> dict[str, Any]:
    """Train a run in a flow run of its own; returns its result."""
    return pretrain(run.source, list(run.overrides), run.name, store, fork=run.fork)


def run_side_by_side(
    experiment: Experiment,
    runs: Sequence[PlannedRun],
    store: str,
    train: Callable[[PlannedRun, str], dict[str, Any]] = train_alone,
) -> list[dict[str, Any]]:
    """Train the unfinished runs, largest first, within the device budget; returns the results of all runs.

    Args:
        train: trains a run, given the store, in a flow run of its own.
    """
    budget = experiment.devices or max(run.profile.world_size for run in runs)
    free, changed = budget, threading.Condition()
    failures, stop = list[BaseException](), Interruption(KeyboardInterrupt)
    training, done = set[str](), set[str]()

    def show() -> None:
        names = ", ".join(sorted(training))
        log_waiting(log, f"{len(done)} of {counted(len(runs), 'run')} done, training {names}")

    def work(run: PlannedRun) -> dict[str, Any]:
        nonlocal free
        size = run.profile.world_size
        with changed:
            changed.wait_for(lambda: failures or free >= size)
            if failures:
                raise ProfileError(experiment.name, run.name, "was not started, because another run failed")
            free -= size
            training.add(run.name)
        show()
        try:
            with stop:
                _run.set(run.name)
                begun = time.monotonic()
                result = train(run, store)
                how = {step["step"]: step["how"] for step in result["steps"]}["train"]
                _run.set("")
                took = format_duration(time.monotonic() - begun)
                log.info("%-24s  %-6s  %8s  loss %.4f", run.name, how, took, result["validation_loss"])
                return result
        except BaseException as error:
            with changed:
                failures.append(error)  # before this thread takes the next run, which must not start
            raise
        finally:
            with changed:
                free += size
                training.discard(run.name)
                done.add(run.name)
                changed.notify_all()
            if training:
                show()

    ordered = sorted(runs, key=lambda run: -run.flops)
    with _quiet_runs(), ThreadPoolExecutor(min(len(runs), budget)) as pool:
        futures: dict[str, Future[dict[str, Any]]] = {}
        try:
            for run in ordered:
                futures[run.name] = pool.submit(copy_context().run, work, run)
            wait(futures.values(), return_when=FIRST_EXCEPTION)
            if failures:
                raise failures[0]
            return [futures[run.name].result() for run in runs]
        except BaseException as error:
            with changed:
                # No further run starts; running ones finish, unless the flow is stopped.
                failures.append(error)
                changed.notify_all()
                if not isinstance(error, Exception):
                    stop.interrupt()
            raise


@contextmanager
def _quiet_runs() -> Iterator[None]:
    """Show only warnings of the runs in the terminal; other messages go to Prefect and the log file."""

    def shown(record: logging.LogRecord) -> bool:
        return not _run.get() or record.levelno >= logging.WARNING

    handlers = [
        handler for handler in logging.getLogger().handlers if not isinstance(handler, logging.FileHandler)
    ]
    for handler in handlers:
        handler.addFilter(shown)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(shown)
