"""A flow run's artifacts in Prefect's UI: progress bars, tables and Markdown pages, updated live.

The first update creates the artifact and later ones change it, including those of a retried task, so a flow run has one artifact
per key. Display errors never stop a run.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import UUID

log = logging.getLogger(__name__)

UPDATE_SECONDS = 5.0  # minimum between two updates of an artifact


class PrefectArtifact:
    """One artifact of a flow run.

    Args:
        kind: "markdown", "table" or "progress".
        key: lower-case letters, digits and dashes.
        flow_run: id of the flow run; None: the current one.
    """

    def __init__(self, kind: str, key: str, description: str, flow_run: UUID | None = None) -> None:
        self._kind, self._key, self._description, self._flow_run = kind, key, description, flow_run
        self._id: UUID | None = None
        self._updated_at = 0.0
        self._warned = False

    def update(self, render: Callable[[], Any], *, now: bool = False) -> None:
        """Show what `render` returns; without `now`, at most once every UPDATE_SECONDS."""
        if not now and time.monotonic() - self._updated_at < UPDATE_SECONDS:
            return
        self._updated_at = time.monotonic()
        try:
            data = render()
        except Exception as error:
            if not self._warned:
                log.warning("artifact %s: cannot be rendered: %s: %s", self._key, type(error).__name__, error)
            self._warned = True
            return
        try:
            self._send(data)
        except Exception as error:
            log.debug("artifact %s: Prefect did not accept it: %s", self._key, error)

    def _send(self, data: Any) -> None:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas import filters
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
        from prefect.runtime import flow_run, task_run

        run = self._flow_run or UUID(str(flow_run.id))
        with get_client(sync_client=True) as client:
            if self._id is None:
                by_key = filters.ArtifactFilter(key=filters.ArtifactFilterKey(any_=[self._key]))
                by_run = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[run]))
                found = client.read_artifacts(artifact_filter=by_key, flow_run_filter=by_run)
                self._id = found[0].id if found else None
            if self._id is not None:
                client.update_artifact(self._id, ArtifactUpdate(data=data, description=self._description))
                return
            artifact = ArtifactCreate(
                key=self._key,
                type=self._kind,
                description=self._description,
                data=data,
                flow_run_id=run,
                task_run_id=UUID(str(task_run.id)) if task_run.id else None,
            )
            self._id = client.create_artifact(artifact).id


class ProgressBar:
    """A progress artifact."""

    def __init__(self, key: str, description: str) -> None:
        self._artifact = PrefectArtifact("progress", key, description)

    def update(self, fraction: float) -> None:
        """Show the completed fraction, 0 to 1."""
        self._artifact.update(lambda: min(100.0, round(100 * fraction, 1)), now=fraction >= 1)


def show_table(key: str, description: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Show a table artifact."""
    PrefectArtifact("table", key, description).update(lambda: table_data(rows), now=True)


def table_data(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a table artifact's JSON, without the columns in which every value is None."""
    rows = list(rows)
    columns = [name for name in (rows[0] if rows else ()) if any(row[name] is not None for row in rows)]
    return json.dumps([{name: row[name] for name in columns} for row in rows])
