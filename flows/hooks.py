"""What Prefect calls when a flow run was cancelled from outside: the run's jobs are ended, should its process not have done so.

Not for a run that crashed: there the job trains on, and the rerun joins it.
"""

from __future__ import annotations

import logging
from typing import Any

from profiles import resolve
from tasks.artifacts import Store
from tasks.launchers import create, noted

log = logging.getLogger(__name__)

GRACE = 30.0  # seconds to save


def end_jobs(flow: Any, flow_run: Any, state: Any) -> None:
    """Cancel whatever this flow run's jobs still have running; done twice it does nothing."""
    given = flow_run.parameters
    run = resolve.load(given["profile"], given.get("overrides") or (), given.get("name"))
    kept = Store(given.get("store") or "./store", run.cluster.work_dir or "store")
    launcher = create(run.cluster.launcher, run.cluster)
    runs = kept.run_directory(run.name).parent
    for pattern in (run.name, f"{run.name}~*", f"{run.name}-round-*"):  # moved aside, and of a series
        for folder in runs.glob(f"{pattern}/logs"):
            for handle in noted(folder):
                launcher.cancel(handle, GRACE)
