"""What a Prefect server needs to know once: `python -m flows.registration`, for the server that PREFECT_API_URL names.

The work pool, how many runs it starts at once, and what becomes of flow runs that give no sign of life: without it, a run whose
worker was killed would show as running for ever. Run again it changes what differs, and nothing else.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectAlreadyExists

from flows.prefect_settings import AUTOMATION, HEARTBEAT_SECONDS, POOL

RUNS_AT_ONCE = 4
SILENCE = timedelta(seconds=3 * HEARTBEAT_SECONDS)
ENDS = ("Completed", "Failed", "Cancelled", "Crashed")


def pool() -> None:
    """A pool of processes on the workers' machines."""
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=RUNS_AT_ONCE))
        except ObjectAlreadyExists:
            client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=RUNS_AT_ONCE))


def automation() -> None:
    """After a heartbeat there has to be another, or an end; else the run is marked as crashed. A rerun joins its job."""
    beat = "prefect.flow-run.heartbeat"
    trigger = EventTrigger(
        after={beat},
        expect={beat, *(f"prefect.flow-run.{end}" for end in ENDS)},
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=SILENCE,
    )
    message = "no heartbeat: its process is gone; a job on a cluster runs on, and the same run again joins it"
    actions = [ChangeFlowRunState(state=StateType.CRASHED, message=message)]
    made = Automation(name=AUTOMATION, trigger=trigger, actions=actions)
    try:
        known = Automation.read(name=AUTOMATION)
    except ValueError:
        made.create()
        return
    known.trigger, known.actions, known.enabled = trigger, actions, True
    known.update()


if __name__ == "__main__":
    pool()
    automation()
