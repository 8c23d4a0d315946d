"""Overview of all runs of a store: fleet.html in the store, and an artifact in Prefect's UI.

Its deployment refreshes both on a schedule, which is inactive until you enable it in Prefect's UI.
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.final_states import final_states
from flows.ui.artifacts import PrefectArtifact
from flows.ui.pages import FLEET, fleet_markdown
from profiles.errors import ProfileError
from tasks.fleet.fleet import read_fleet
from tasks.fleet.page import render
from tasks.store.store import Store

PAGE = "fleet.html"  # in the store


@flow(name="fleet", flow_run_name="fleet")
@final_states
def fleet(store: str = "./store", work_dir: str = "./store") -> str:
    """Write a page of all runs; returns its location.

    Args:
        store: Where runs are kept: a folder or an s3:// prefix.
        work_dir: With a store on S3, the local folder of run folders, like cluster.work_dir of a profile.
    """
    opened = Store(store, Path(work_dir)).existing()
    found = read_fleet(opened)
    location = opened.backend.location(PAGE)
    try:
        opened.backend.write(PAGE, render(found).encode())
    except OSError as error:
        reason = (
            f"the page cannot be written: {error.strerror or error}; `trainshed runs` lists the same runs"
        )
        raise ProfileError("--store", location, reason) from error
    artifact = PrefectArtifact("markdown", FLEET, "All runs: progress, speed, goodput and cost")
    artifact.update(lambda: fleet_markdown(found, location), now=True)
    return location
