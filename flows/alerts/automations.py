"""Automations on events of runs: notifications, and the evaluation of completed checkpoints.

There is a notification for each kind of event, once a notification block is named: one of Prefect's own for Slack, e-mail,
webhooks and others, created in Prefect's UI or by `prefect block`, and named by type and name, as in slack-webhook/team. It is
created once: changes in Prefect's UI, such as disabling one kind, persist. Without a block there are none, as an automation
without an action notifies nobody. Checkpoints are evaluated only on request (`trainshed up --evaluate`), by the deployment
evaluate/evaluate, which must be registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.events.actions import ActionTypes, DoNothing, RunDeployment, SendNotification
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from flows.server.prefect_settings import ALERT_KINDS, ALERTS, EVENT, FLOWS, REJECTED, RESOURCE
from profiles.errors import ProfileError

FAILED = "failed"  # the kind whose events are Prefect's own, so that they also cover a flow whose process was killed
NOTIFY = "notify"  # capability of notification blocks
EVALUATION = "Evaluate completed checkpoints"  # name of the automation


def register_alerts(block: str | None = None) -> None:
    """Update the automations that exist; with a block, TYPE/NAME, create the others.

    Those that an earlier version created without an action get the block's.

    Raises ProfileError if the server has no such block.
    """
    document = _block_document(block) if block else None
    for name, (kind, event) in zip(ALERTS, ALERT_KINDS.items(), strict=True):
        trigger, subject, body = trigger_for(kind), *_message(kind)
        actions: list[ActionTypes] = []
        if document:
            actions = [SendNotification(block_document_id=document, subject=subject, body=body)]
        if (existing := read_automation(name)) is None:
            if actions:
                description = f"Notify when {event}"
                Automation(name=name, description=description, trigger=trigger, actions=actions).create()
            continue
        if actions and all(isinstance(each, DoNothing) for each in existing.actions):
            existing.actions, existing.enabled = actions, True
        existing.trigger = trigger
        existing.update()


def register_evaluation(tasks: Sequence[str]) -> None:
    """Create the automation that evaluates checkpoints, or update its tasks; once disabled, it stays so.

    Raises ObjectNotFound without the deployment.
    """
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("evaluate/evaluate")
    rendered = {
        "run": "{{ event.payload.run }}",
        "store": "{{ event.payload.store }}",
        "work_dir": "{{ event.payload.folder.rpartition('/runs/')[0] }}",
    }
    parameters: dict[str, Any] = {
        name: {"__prefect_kind": "jinja", "template": text} for name, text in rendered.items()
    }
    trigger = trigger_for("checkpoint")
    action = RunDeployment(deployment_id=deployment.id, parameters={**parameters, "tasks": list(tasks)})
    if (existing := read_automation(EVALUATION)) is None:
        description = "Run evaluate/evaluate when a checkpoint is complete"
        Automation(name=EVALUATION, description=description, trigger=trigger, actions=[action]).create()
        return
    existing.trigger, existing.actions = trigger, [action]
    existing.update()


def read_automation(name: str) -> Automation | None:
    """The automation of this name; None if there is none."""
    try:
        found: Any = Automation.read(name=name)  # typed as a coroutine, which it is in an event loop only
    except ValueError as error:
        if type(error) is ValueError:  # otherwise an answer that is none of Prefect's
            return None
        raise
    automation: Automation = found
    return automation


def trigger_for(kind: str) -> EventTrigger:
    """A trigger that fires once for every event of a kind."""
    reactive = {"posture": Posture.Reactive, "threshold": 1}
    if kind == FAILED:
        states = {f"prefect.flow-run.{state}" for state in ("Failed", "Crashed", REJECTED)}
        ours = {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)}
        return EventTrigger(
            expect=states,
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(ours),
            **reactive,
        )
    match = ResourceSpecification({"prefect.resource.id": f"{RESOURCE}*"})
    return EventTrigger(expect={f"{EVENT}{kind}"}, match=match, **reactive)


def _message(kind: str) -> tuple[str, str]:
    """Subject and text of a notification, as Prefect's Jinja templates."""
    if kind == FAILED:
        labels = ("resource.name", "state-name", "state-message")
        name, state, message = (f'{{{{ event.resource["prefect.{label}"] }}}}' for label in labels)
        return f"Trainshed: {name} failed", f"{name}: {state}: {message}"
    subject = f"Trainshed: {{{{ event.payload.run }}}} {kind}"
    return subject, "{{ event.payload.message }}\n{{ event.payload.folder }}"


def _block_document(block: str) -> UUID:
    """Id of a notification block, TYPE/NAME."""
    kind, _, name = block.partition("/")
    with get_client(sync_client=True) as client:
        try:
            return client.read_block_document_by_name(name, kind).id
        except ObjectNotFound:
            known = [
                f"{document.block_type.slug}/{document.name}"
                for document in client.read_block_documents()
                if document.name and document.block_type and document.block_schema
                if NOTIFY in document.block_schema.capabilities
            ]
    reason = "the Prefect server has no such notification block; create one in its UI under Blocks"
    raise ProfileError("alerts", block, reason, known)
