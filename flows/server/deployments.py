"""Register deployments with a Prefect server, with the result of `prefect deploy` and less work.

`prefect deploy --all` opens two clients and sends eight requests for each deployment. Here all share one client and the forms of
their flows, and only what differs from the server's deployments is sent. What a user has changed in Prefect's UI and the file
does not mention is kept: a paused deployment, and an activated schedule.

Imports Prefect, and the modules of the deployed flows.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentScheduleUpdate,
    DeploymentUpdate,
)
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import MissingFlowError, PrefectHTTPStatusError, ScriptError
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.templating import apply_values, resolve_block_document_references, resolve_variables
from pydantic import ValidationError

from profiles.errors import ProfileError

PAGE = 200  # deployments of a response, at most
INVALID = (400, 404, 409, 422)  # HTTP statuses by which a server rejects a deployment
SCHEDULE_OPTIONS = ("active", "parameters", "slug", "replaces")  # a schedule's keys besides its times


async def register(file: Path) -> None:
    """Create or update the deployments of a file in the format of prefect.yaml; prints a line for each.

    Raises:
        ProfileError: a deployment's flow cannot be imported, or the server rejects the deployment.
    """
    described = yaml.safe_load(file.read_text())
    entries: Any = described["deployments"]
    pulls: Any = [entry.pop("pull", described.get("pull")) or [] for entry in entries]
    environment = dict(os.environ)
    # A run resolves blocks, which may be secrets, and variables in these.
    pulls = apply_values(pulls, environment, remove_notset=False)
    async with get_client() as client:
        entries = await resolve_block_document_references(entries, client=client)
        entries = await resolve_variables(entries, client=client)
        entries = apply_values(entries, environment, warn_on_notset=True, skip_prefixes=["ctx."])
        known = {(each.flow_id, each.name): each async for each in _registered(client)}
        flow_ids: dict[str, UUID] = {}
        for entry, pull in zip(entries, pulls, strict=True):
            key = f"deployments.{entry['name']}"
            try:
                flow = _load_flow(entry["entrypoint"])
                if flow.name not in flow_ids:
                    flow_ids[flow.name] = await client.create_flow_from_name(flow.name)
                flow_id = flow_ids[flow.name]
                fields = {**_fields(entry, flow), "pull_steps": pull}
                await _register(client, entry, fields, flow_id, known.get((flow_id, entry["name"])))
            except ProfileError as error:
                raise error.within(key) from error
            except ValidationError as error:
                details = "; ".join(
                    f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
                )
                raise ProfileError(key, None, _reason("is invalid", details)) from error
            except PrefectHTTPStatusError as error:
                if error.response.status_code not in INVALID:
                    raise
                reason = _reason("was rejected by the Prefect server", _detail(error))
                raise ProfileError(key, None, reason) from error
            print(f"registered {flow.name}/{entry['name']}", flush=True)


async def _registered(client: PrefectClient) -> AsyncIterator[DeploymentResponse]:
    """All deployments that the server has."""
    offset = 0
    while page := await client.read_deployments(limit=PAGE, offset=offset):
        offset += len(page)
        for deployment in page:
            yield deployment


@cache
def _load_flow(entrypoint: str) -> Flow[Any, Any]:
    try:
        return load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)
    except (MissingFlowError, ScriptError, ImportError, ValueError) as error:
        reason = _reason("names no flow that can be imported", error)
        raise ProfileError("entrypoint", entrypoint, reason) from error


@cache
def _form(flow: Flow[Any, Any]) -> dict[str, Any]:
    """JSON schema of a flow's parameters, from which Prefect's UI makes a form."""
    return parameter_schema(flow).model_dump(mode="json", exclude_unset=True)


async def _register(
    client: PrefectClient,
    entry: Mapping[str, Any],
    fields: dict[str, Any],
    flow_id: UUID,
    existing: DeploymentResponse | None,
) -> None:
    """Create a deployment, or update the existing one if anything differs."""
    schedules = [*map(_schedule, entry.get("schedules") or ())]
    if existing is None:
        await client.create_deployment(flow_id, entry["name"], schedules=schedules, **fields)
        return
    # Those of triggers that the deployment had in an earlier version of the file.
    await client.delete_resource_owned_automations(f"prefect.deployment.{existing.id}")
    have = existing.model_dump(mode="json")
    have["concurrency_limit"] = (have["global_concurrency_limit"] or {}).get("limit")
    if options := have["concurrency_options"]:
        have["concurrency_options"] = {name: value for name, value in options.items() if value is not None}
    changes = {name: value for name, value in fields.items() if have[name] != value}
    if not all(any(_satisfies(each, wanted) for each in have["schedules"]) for wanted in schedules):
        changes["schedules"] = [
            DeploymentScheduleUpdate(**wanted.model_dump(exclude_unset=True)) for wanted in schedules
        ]
    if changes:
        # The server checks parameters against the form, and job variables against the pool, of the same request.
        await client.update_deployment(existing.id, DeploymentUpdate(**fields | changes))


def _fields(entry: Mapping[str, Any], flow: Flow[Any, Any]) -> dict[str, Any]:
    """A deployment's fields as Prefect's API names them, without its schedules and pull steps."""
    limit, pool = entry.get("concurrency_limit"), entry.get("work_pool") or {}
    options = None
    if isinstance(limit, Mapping):
        options = {name: value for name, value in limit.items() if name != "limit"}
        limit = limit.get("limit")
    optional = {"paused": entry.get("paused"), "work_queue_name": pool.get("work_queue_name")}
    return {
        "entrypoint": entry["entrypoint"],
        "version": entry.get("version") or flow.version,
        "description": entry.get("description") or flow.description,
        "tags": entry.get("tags") or [],
        "parameters": entry.get("parameters") or {},
        "parameter_openapi_schema": _form(flow),
        "enforce_parameter_schema": entry.get("enforce_parameter_schema", True),
        "work_pool_name": pool.get("name"),
        "job_variables": pool.get("job_variables") or {},
        "concurrency_limit": limit,
        "concurrency_options": options or None,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _schedule(wanted: Mapping[str, Any]) -> DeploymentScheduleCreate:
    times = {name: value for name, value in wanted.items() if name not in SCHEDULE_OPTIONS}
    options = {name: wanted[name] for name in SCHEDULE_OPTIONS if name in wanted}
    return DeploymentScheduleCreate(schedule=times, **options)


def _satisfies(existing: dict[str, Any], wanted: DeploymentScheduleCreate) -> bool:
    """Whether an existing schedule is as wanted, or has only been activated since."""
    expected = wanted.model_dump(mode="json", exclude_unset=True, exclude={"replaces"})
    if not expected.get("active", True):
        del expected["active"]
    times = expected.pop("schedule")
    kept: dict[str, Any] = existing["schedule"]
    return existing | expected == existing and kept | times == kept


def _reason(problem: str, details: object) -> str:
    """A reason on one line, the last of the log, which `trainshed up` prints."""
    return f"{problem}; change it in prefect.yaml: {' '.join(str(details).split())}"


def _detail(error: PrefectHTTPStatusError) -> str:
    try:
        return str(error.response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return str(error)
