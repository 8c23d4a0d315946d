"""What Prefect calls when a flow run did not end well.

cancelled          its jobs are ended, should its process not have done so; not of a run that crashed: there the job trains
                   on, and the rerun joins it
failed, crashed    the run's page says first what happened, and what to do next
"""

from __future__ import annotations

import logging
from typing import Any

from flows.artifacts import Shown
from flows.overview import KEY, Overview, failed
from profiles import resolve
from tasks import runs
from tasks.artifacts import Store
from tasks.launchers import create, noted

log = logging.getLogger(__name__)

GRACE = 30.0  # seconds to save


def end_jobs(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel whatever this flow run's jobs still have running; done twice it does nothing, nor to those of others."""
    given = flow_run.parameters
    run = resolve.load(given["profile"], given.get("overrides") or (), given.get("name"))
    kept = Store(given.get("store") or "./store", run.cluster.work_dir or "store")
    launcher = create(run.cluster.launcher, run.cluster)
    for folder in runs.worked_in(kept, run, str(flow_run.id)):
        for handle in noted(folder / "logs"):
            launcher.cancel(handle, GRACE)


def explain(flow: Any, flow_run: Any, state: Any) -> None:
    """Put the failure on the page of the flow run, which may have failed before it had a folder, or a profile."""
    failure = _failure(state)
    given = flow_run.parameters
    try:
        run = resolve.load(given["profile"], given.get("overrides") or (), given.get("name"))
        kept = Store(given.get("store") or "./store", run.cluster.work_dir or "store")
        folder = kept.run_directory(run.name)
        if (folder / "profile.yaml").exists():
            Overview(run, folder, flow_run.id).fail(failure, runs.checkpoints(kept, folder))
            return
    except Exception as error:
        log.debug("the run has no folder to show: %s", error)
    Shown("markdown", KEY, "What happened, and what to do next", flow_run.id).show(
        lambda: failed(failure), now=True
    )


def _failure(state: Any) -> BaseException:
    try:
        result = state.result(raise_on_failure=False)
    except Exception as error:
        return error
    return result if isinstance(result, BaseException) else RuntimeError(state.message or state.name)
