"""Ladder: small runs of a target's family, several at a time, and the forecast of the target that their losses give.

    plan ─> rung ┐
            rung ├─> forecast ─> target, if asked for
            rung ┘

Each rung is an ordinary run of the pretraining flow, so one that is finished is cached, one that was interrupted resumes, and a
ladder with one rung more trains that rung alone. The forecast is in the store before the target starts.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.final_states import final_states
from flows.hooks import show_failure
from flows.pretrain import pretrain
from modeling.planning import planner
from modeling.planning.auto import resolve_auto
from modeling.planning.planner import Plan, plan
from modeling.scaling.rungs import Rung, rungs_of, target_of, warnings_of
from profiles import resolve
from profiles.errors import ProfileError
from profiles.sections import ladder as ladders
from profiles.sections.ladder import Ladder
from tasks import ladder as forecasts
from tasks.reporting import ladder_page
from tasks.reporting.format import format_duration
from tasks.store.store import Store

log = logging.getLogger(__name__)

_rung: ContextVar[str] = ContextVar("rung", default="")  # name of the rung that a log record belongs to


def run_name() -> str:
    """Name of the flow run in Prefect's UI: the ladder file's."""
    return Path(flow_run.parameters["file"]).stem


def load(file: str) -> tuple[Ladder, Rung, list[Rung], list[Plan]]:
    """A ladder, its target, its rungs and their plans. Raises ProfileError for one that cannot run or is over its budget."""
    ladder = ladders.load(file)
    target = target_of(ladder)
    rungs = rungs_of(ladder, target)
    plans = []
    for rung in rungs:
        profile = resolve_auto(rung.profile)
        plans.append(plan(profile))
        planner.require_fit(profile, plans[-1])
    _check_budget(ladder, rungs, plans)
    return ladder, target, rungs, plans


def _check_budget(ladder: Ladder, rungs: Sequence[Rung], plans: Sequence[Plan]) -> None:
    largest = max(rung.profile.world_size for rung in rungs)
    if ladder.devices is not None and ladder.devices < largest:
        raise ProfileError("devices", ladder.devices, f"is less than the {largest} of one rung", [largest])
    flops = sum(rung.flops for rung in rungs)
    if ladder.maximum_flops is not None and flops > ladder.maximum_flops:
        reason = f"is exceeded: the rungs take {flops:.3g} FLOPs; remove the largest, or shorten them"
        raise ProfileError("maximum_flops", ladder.maximum_flops, reason)
    if ladder.maximum_price is None:
        return
    if any(planned.price is None for planned in plans):
        reason = "cannot be checked: the price of a rung is unknown; set cluster.node_price"
        raise ProfileError("maximum_price", ladder.maximum_price, reason, ["null"])
    price = sum(planned.price for planned in plans)
    if price > ladder.maximum_price:
        reason = f"is exceeded: the rungs cost {price:,.2f}; remove the largest, or shorten them"
        raise ProfileError("maximum_price", ladder.maximum_price, reason)


@flow(name="ladder", flow_run_name=run_name, on_failure=[show_failure], on_crashed=[show_failure])
@final_states
def ladder(file: str, store: str = "./store", target: bool = False) -> dict[str, Any]:
    """Train the rungs of a ladder and forecast its target; returns the forecast and the paths of its page.

    Args:
        file: The ladder file.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
        target: Whether to train the target too, once the forecast is in the store.
    """
    described, goal, rungs, _ = load(file)
    for rung in rungs:
        resolve.check_start(rung.profile)
        planner.require_devices(rung.profile)
    for warning in warnings_of(goal, rungs):
        log.warning("warning: %s", warning)
    opened = Store(store, goal.profile.cluster.work_dir or "store")
    losses = _run(described, rungs, store)
    artifact = forecasts.register(opened, goal, rungs, losses)
    document = forecasts.read(opened, artifact)
    low, high = document["interval"]
    log.info(
        "forecast of %s: loss %.4f, %.0f%% interval %.4f to %.4f",
        goal.name,
        document["loss"],
        100 * document["share"],
        low,
        high,
    )
    page = ladder_page.write(opened.work_dir / "ladders" / f"{described.name}.html", described, document)
    result = {"ladder": described.name, "key": artifact.key, "page": str(page), **document}
    if target:
        trained = pretrain(described.target, list(goal.overrides), None, store)
        result["report"] = trained["report"]
        recorded = forecasts.read_recorded(opened.run_folder(trained["run"]))
        if recorded is None:
            log.warning("warning: %s had started before it was forecast", trained["run"])
        else:  # an earlier one, if the target had started since
            result["outcome"] = forecasts.outcome(recorded, trained["validation_loss"])
    return result


def _run(described: Ladder, rungs: Sequence[Rung], store: str) -> list[float]:
    """Held-out losses of the rungs, trained as far as they are not; the largest start first, within the device budget."""
    budget = described.devices or max(rung.profile.world_size for rung in rungs)
    free, changed = budget, threading.Condition()
    stopped, threads = False, set[int]()

    def work(rung: Rung) -> float:
        nonlocal free
        size = rung.profile.world_size
        with changed:
            changed.wait_for(lambda: stopped or free >= size)
            if stopped:
                raise ProfileError("rungs", rung.name, "was not started, because another rung failed")
            free -= size
            threads.add(threading.get_ident())
        try:
            _rung.set(rung.name)
            begun = time.monotonic()
            result = pretrain(described.target, list(rung.overrides), rung.name, store)
            how = {step["step"]: step["how"] for step in result["steps"]}["train"]
            _rung.set("")
            took = format_duration(time.monotonic() - begun)
            log.info("%-24s  %-6s  %8s  loss %.4f", rung.name, how, took, result["validation_loss"])
            return result["validation_loss"]
        finally:
            with changed:
                free += size
                threads.discard(threading.get_ident())
                changed.notify_all()

    ordered = sorted(rungs, key=lambda rung: -rung.flops)
    with _quiet_rungs(), ThreadPoolExecutor(min(len(rungs), budget)) as pool:
        futures: dict[str, Future[float]] = {
            rung.name: pool.submit(copy_context().run, work, rung) for rung in ordered
        }
        try:
            return [futures[rung.name].result() for rung in rungs]
        except BaseException as error:
            with changed:
                stopped = (
                    True  # what has not started does not; what runs ends first, unless the flow is stopped
                )
                changed.notify_all()
                for thread in threads if not isinstance(error, Exception) else ():
                    interrupt = ctypes.py_object(KeyboardInterrupt)  # as Ctrl-C would in the main thread
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), interrupt)
            raise


@contextmanager
def _quiet_rungs() -> Iterator[None]:
    """Show warnings of the rungs with their names in the terminal; what else they log is in Prefect and in the log file."""

    def shown(record: logging.LogRecord) -> bool:
        return not _rung.get() or record.levelno >= logging.WARNING

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
