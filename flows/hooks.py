"""What Prefect calls when a flow run did not end well.

cancelled          its jobs are ended, should its process not have done so; not of a run that crashed: there the job trains
                   on, and the rerun joins it
failed, crashed    the run's page says first what happened, and what to do next
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flows import working_folder
from flows.ui.artifacts import Shown
from flows.ui.overview import KEY, Overview, failed
from profiles import resolve
from tasks.launchers import create, latest_jobs
from tasks.store import runs
from tasks.store.store import Store

log = logging.getLogger(__name__)


def end_jobs(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel whatever this flow run's jobs still have running; done twice it does nothing, nor to those of others."""
    kept, name = _run(flow_run.parameters)
    for folder in runs.folders_of_flow_run(kept, name, str(flow_run.id)):
        cluster = resolve.load(str(folder / "profile.yaml")).cluster
        launcher = create(cluster.launcher, cluster)
        for handle in latest_jobs(folder / "logs"):
            launcher.cancel(handle, cluster.grace)


def explain(flow: Any, flow_run: Any, state: Any) -> None:
    """Put the failure on the page of the flow run, which may have failed before it had a folder, or a profile."""
    failure = _failure(state)
    try:
        kept, name = _run(flow_run.parameters)
        worked_in = runs.folders_of_flow_run(kept, name, str(flow_run.id))
        folder = worked_in[0] if worked_in else kept.run_folder(name).path
        run = resolve.load(str(folder / "profile.yaml"))
        Overview(run, folder, flow_run.id).fail(failure, kept.run_folder(folder.name).checkpoint_steps())
        return
    except Exception as error:
        log.debug("the run has no folder to show: %s", error)
    Shown("markdown", KEY, "What happened, and what to do next", flow_run.id).show(
        lambda: failed(failure), now=True
    )


def _run(given: Mapping[str, Any]) -> tuple[Store, str]:
    """The store and the name of the run that a flow run with these parameters is about."""
    working_folder.enter()
    uri = given.get("store") or "./store"
    if "run" in given:  # the flow `export`, of a run that is there
        return Store(uri, given.get("work_dir") or "store"), given["run"]
    run = resolve.load(given["profile"], given.get("overrides") or (), given.get("name"))
    return Store(uri, run.cluster.work_dir or "store"), run.name


def _failure(state: Any) -> BaseException:
    try:
        result = state.result(raise_on_failure=False)
    except Exception as error:
        return error
    return result if isinstance(result, BaseException) else RuntimeError(state.message or state.name)
