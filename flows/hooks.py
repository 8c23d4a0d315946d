"""Handlers for flow runs that do not complete; all but the last are Prefect hooks.

cancelled          cancels the jobs of the run or of its subflows' runs, if the flow's process has not done so
failed, crashed    shows the failure and the next action on the overview; jobs keep running, and a rerun re-attaches to them
stopped            shows what is saved; the jobs have been cancelled by the flow itself
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType

from flows import working_folder
from flows.chained_runs import chained_runs
from flows.ui.artifacts import PrefectArtifact
from flows.ui.overview import KEY, Overview, failure_markdown, stop_markdown
from profiles import resolve
from profiles.files import run_files
from tasks.launchers import Launcher, create, latest_jobs
from tasks.launchers.local import LocalLauncher
from tasks.store import runs
from tasks.store.store import Store

log = logging.getLogger(__name__)


def cancel_jobs(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel the running jobs of this flow run; idempotent."""
    located = _locate_runs(flow_run.parameters)
    for store, name in located:
        for folder in runs.folders_of_flow_run(store, name, str(flow_run.id)):
            cluster = runs.load_profile(folder).cluster
            _cancel(create(cluster), folder, cluster.grace)
    for folder in runs.scratch_folders_of_flow_run(located[0][0], str(flow_run.id)):
        _cancel(LocalLauncher(), folder, grace=0)  # compilation jobs


def cancel_subflow_jobs(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel the running jobs of a flow run's unfinished subflows, such as a ladder's rungs; idempotent."""
    unfinished = FlowRunFilterState(type=FlowRunFilterStateType(not_any_=[StateType.COMPLETED]))
    parent = FlowRunFilterParentFlowRunId(any_=[flow_run.id])
    with get_client(sync_client=True) as client:
        subflows = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(parent_flow_run_id=parent, state=unfinished)
        )

    def cancel(subflow: FlowRun) -> None:
        try:
            cancel_jobs(flow, subflow, state)
        except Exception as error:  # must not keep the other jobs running
            log.warning("%s: its jobs cannot be cancelled: %r; cancel them by hand", subflow.name, error)

    with ThreadPoolExecutor() as pool:  # each may take cluster.grace to save
        list(pool.map(cancel, subflows))


def show_failure(flow: Any, flow_run: Any, state: Any) -> None:
    """Show the failure on the flow run's overview; there may be no valid profile or run folder yet."""
    failure = _failure(state)
    try:
        store, name, folders = _latest(flow_run.parameters, str(flow_run.id))
        folder = folders[0] if folders else store.run_folder(name).path
        checkpoints = store.run_folder(folder.name).checkpoint_steps()
        notice = failure_markdown(state.name, failure, folder / run_files.LOGS, checkpoints)
        Overview(runs.load_profile(folder), folder, flow_run.id).end(notice)
        return
    except Exception as error:
        log.debug("no overview of the run folder: %s", error)
    page = PrefectArtifact("markdown", KEY, "The failure and what to do next", flow_run.id)
    page.update(lambda: failure_markdown(state.name, failure), now=True)


def show_stop(flow_run: str, parameters: Mapping[str, Any]) -> str:
    """Show on the overview that the flow run stopped and what is saved; returns the latter as one line."""
    try:
        store, _, folders = _latest(parameters, flow_run)
        if not folders:
            trains = "run" not in parameters  # the flows `evaluate` and `export` name a finished run
            return f"{'before training; ' if trains else ''}completed steps are kept"
        steps = store.run_folder(folders[0].name).checkpoint_steps()
        message = f"saved at step {max(steps):,}" if steps else "before the first checkpoint"
        profile = runs.load_profile(folders[0])
        Overview(profile, folders[0], UUID(flow_run)).end(stop_markdown(message))
        return message
    except Exception as error:
        log.debug("cannot read what is saved: %s", error)
        return "completed steps and checkpoints are kept"


# Options of flows. Prefect's types of hooks differ from one option to the next.
SHOW_FAILURE: dict[str, Any] = {"on_failure": [show_failure], "on_crashed": [show_failure]}
HOOKS: dict[str, Any] = {"on_cancellation": [cancel_jobs], **SHOW_FAILURE}
EXPERIMENT_HOOKS: dict[str, Any] = {"on_cancellation": [cancel_subflow_jobs], **SHOW_FAILURE}


def _cancel(launcher: Launcher, folder: Path, grace: float) -> None:
    for handle in latest_jobs(folder / run_files.LOGS):
        launcher.cancel(handle, grace)


def _latest(parameters: Mapping[str, Any], flow_run: str) -> tuple[Store, str, list[Path]]:
    """The store, name and folders of a flow run's run; for a chain, those of the run that it started last."""
    located = _locate_runs(parameters)
    for store, name in reversed(located):
        if folders := runs.folders_of_flow_run(store, name, flow_run):
            return store, name, folders
    return *located[0], []


def _locate_runs(parameters: Mapping[str, Any]) -> list[tuple[Store, str]]:
    """Store and name of each run that a flow run with these parameters trains; a chain has several."""
    working_folder.enter()
    uri = parameters.get("store") or "./store"
    if "run" in parameters:  # the flows `evaluate` and `export`
        return [(Store(uri, parameters.get("work_dir") or "store"), parameters["run"])]
    overrides, name = parameters.get("overrides") or (), parameters.get("name") or ""
    if "profiles" in parameters:  # the flow of flows/chain.py
        found = [each.profile for each in chained_runs(parameters["profiles"], overrides, name)]
    else:
        found = [resolve.load(parameters["profile"], overrides, name or None)]
    return [(Store(uri, run.cluster.work_dir or "store"), run.name) for run in found]


def _failure(state: Any) -> BaseException:
    try:
        result = state.result(raise_on_failure=False)
    except Exception as error:
        return error
    return result if isinstance(result, BaseException) else RuntimeError(state.message or state.name)
