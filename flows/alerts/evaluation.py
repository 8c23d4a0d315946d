"""Automation that evaluates each checkpoint as soon as it is complete.

Create it with `python -m flows.alerts.evaluation [--task NAME ...]`. It runs the deployment evaluate/evaluate, which must be
registered, for the run and the store that the event names. The automation is created only on request (`trainshed up --evaluate`);
once disabled in Prefect's UI, it stays disabled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.events.actions import RunDeployment

from flows.alerts.automations import read_automation, trigger_for
from profiles.arguments import Parser

NAME = "Evaluate completed checkpoints"
DEPLOYMENT = "evaluate/evaluate"


def register_evaluation(tasks: Sequence[str] = ()) -> None:
    """Create the automation, or update its tasks. Raises ObjectNotFound without the deployment."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(DEPLOYMENT)
    trigger = trigger_for("checkpoint")
    work_dir = "event.payload.folder.rpartition('/runs/')[0]"
    parameters = {
        "run": _template("{{ event.payload.run }}"),
        "tasks": list(tasks),
        "store": _template("{{ event.payload.store }}"),
        "work_dir": _template(f"{{{{ {work_dir} }}}}"),
    }
    action = RunDeployment(deployment_id=deployment.id, parameters=parameters)
    if (existing := read_automation(NAME)) is None:
        about = "Run evaluate/evaluate when a checkpoint is complete"
        Automation(name=NAME, description=about, trigger=trigger, actions=[action]).create()
        return
    existing.trigger, existing.actions = trigger, [action]
    existing.update()


def _template(text: str) -> dict[str, Any]:
    """A parameter that Prefect renders for each event."""
    return {"__prefect_kind": "jinja", "template": text}


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="flows.alerts.evaluation")
    parser.add_argument("--task", dest="tasks", action="append", default=[], metavar="NAME")
    register_evaluation(parser.parse_args(arguments).tasks)


if __name__ == "__main__":
    main()
