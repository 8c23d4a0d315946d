"""Register the work pool with its limit, automations and deployments with a Prefect server.

`python -m flows.registration` registers with the server of PREFECT_API_URL, idempotently: the work pool with its concurrency
limit, the alert automations (flows/alerts), an automation that marks flow runs without a heartbeat as crashed, since a run
whose worker was killed would stay in state Running, and deployments.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from pathlib import Path

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectAlreadyExists

from flows.alerts.automations import read_automation, register_alerts, register_evaluation
from flows.server import deployments
from flows.server.prefect_settings import AUTOMATION, GATE_MISSED, POOL, REJECTED, SILENCE_SECONDS, STOPPED
from profiles.arguments import Parser
from profiles.errors import ProfileError

CONCURRENT_RUNS = 4
# Prefect names the event of a final state after the state; some are our own (final_states.py, continual.py).
FINAL_STATES = (
    "Completed",
    "Failed",
    "Cancelled",
    "Crashed",
    STOPPED,
    REJECTED,
    GATE_MISSED,
    "Promoted",
    "NotPromoted",
    "NoNewData",
    "NoFinishedRun",
)


def register_pool() -> None:
    """Create or update the process work pool."""
    with get_client(sync_client=True) as client:
        try:
            pool = WorkPoolCreate(name=POOL, type="process", concurrency_limit=CONCURRENT_RUNS)
            client.create_work_pool(pool)
        except ObjectAlreadyExists:
            client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=CONCURRENT_RUNS))


def register_automation(silence: float = SILENCE_SECONDS) -> None:
    """Create or update the automation: heartbeats at most `silence` seconds apart, until a final state."""
    heartbeat = "prefect.flow-run.heartbeat"
    trigger = EventTrigger(
        after={heartbeat},
        expect={heartbeat, *(f"prefect.flow-run.{state}" for state in FINAL_STATES)},
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=silence),
    )
    message = "no heartbeat: the flow run's process ended; its cluster job keeps running, and a rerun re-attaches to it"
    actions: list[ActionTypes] = [ChangeFlowRunState(state=StateType.CRASHED, message=message)]
    if (existing := read_automation(AUTOMATION)) is None:
        Automation(name=AUTOMATION, trigger=trigger, actions=actions).create()
        return
    existing.trigger, existing.actions, existing.enabled = trigger, actions, True
    existing.update()


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="flows.registration")
    help_text = "notification block that alerts are sent to, such as slack-webhook/team"
    parser.add("--alerts TYPE/NAME", help_text)
    help_text = "register the deployments of this file, in the format of prefect.yaml"
    parser.add("--deployments FILE", help_text, type=Path)
    help_text = "evaluate each completed checkpoint, with these tasks of lm-evaluation-harness"
    parser.add("--evaluate TASK", help_text, nargs="*")
    options = parser.parse_args(arguments)
    register_pool()
    register_automation()
    try:
        register_alerts(options.alerts)
        if options.deployments:
            asyncio.run(deployments.register(options.deployments))
        if options.evaluate is not None:
            register_evaluation(options.evaluate)
    except ProfileError as error:
        print(f"trainshed: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
