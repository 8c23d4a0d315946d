"""What a flow run shows among the artifacts of Prefect's UI while it goes on: bars, a table, pages of text.

An artifact is made when it is first shown and changed afterwards, also by a later attempt of its task, so that each stands once.
What cannot be made, or Prefect cannot take now, is left out: the work goes on.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import UUID

log = logging.getLogger(__name__)

SECONDS = 5.0  # between two changes of an artifact


class Shown:
    """One artifact of a flow run.

    Args:
        kind: "markdown", "table" or "progress".
        key: lower-case letters, digits and dashes.
        flow_run: its id; None takes the run that goes on.
    """

    def __init__(self, kind: str, key: str, description: str, flow_run: UUID | None = None) -> None:
        self._kind, self._key, self._description, self._flow_run = kind, key, description, flow_run
        self._id: UUID | None = None
        self._sent_at = 0.0
        self._warned = False

    def show(self, make: Callable[[], Any], *, now: bool = False) -> None:
        """Show what `make` gives from now on; it is not called where the last change was only just made, unless `now`."""
        if not now and time.monotonic() - self._sent_at < SECONDS:
            return
        self._sent_at = time.monotonic()
        try:
            data = make()
        except Exception as error:  # of a file that someone else spoilt, or a mistake of ours
            if not self._warned:
                log.warning("the artifact %s cannot be shown: %s: %s", self._key, type(error).__name__, error)
            self._warned = True
            return
        try:
            self._send(data)
        except Exception as error:
            log.debug("Prefect did not take the artifact %s: %s", self._key, error)

    def _send(self, data: Any) -> None:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
        from prefect.client.schemas.filters import (
            ArtifactFilter,
            ArtifactFilterKey,
            FlowRunFilter,
            FlowRunFilterId,
        )
        from prefect.runtime import flow_run, task_run

        run = self._flow_run or UUID(str(flow_run.id))
        with get_client(sync_client=True) as client:
            if self._id is None:
                mine = ArtifactFilter(key=ArtifactFilterKey(any_=[self._key]))
                within = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
                found = client.read_artifacts(artifact_filter=mine, flow_run_filter=within)
                self._id = found[0].id if found else None
            if self._id is not None:
                client.update_artifact(self._id, ArtifactUpdate(data=data, description=self._description))
                return
            made = ArtifactCreate(
                key=self._key,
                type=self._kind,
                description=self._description,
                data=data,
                flow_run_id=run,
                task_run_id=UUID(str(task_run.id)) if task_run.id else None,
            )
            self._id = client.create_artifact(made).id


class Bar:
    """A progress bar."""

    def __init__(self, key: str, description: str) -> None:
        self._shown = Shown("progress", key, description)

    def show(self, done: float) -> None:
        """The share that is done, 0 to 1."""
        self._shown.show(lambda: min(100.0, round(100 * done, 1)), now=done >= 1)


def cells(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a table artifact has them, without columns that are empty throughout."""
    rows = list(rows)
    columns = [name for name in (rows[0] if rows else ()) if any(row[name] is not None for row in rows)]
    return json.dumps([{name: row[name] for name in columns} for row in rows])
