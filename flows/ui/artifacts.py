"""A flow run's artifacts in Prefect's UI: progress bars, tables and Markdown pages, updated live.

The first update creates the artifact and later ones change it, including those of a retried task, so a flow run has one artifact
per key. Display errors never stop a run, and a server that does not answer does not hold it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from functools import partial
from typing import Any
from uuid import UUID

log = logging.getLogger(__name__)

UPDATE_SECONDS = 5.0  # minimum between two updates of an artifact
FLUSH_SECONDS = 5.0  # that an artifact's last update waits for the server


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
        self._context: Context | None = None
        self._updated_at = 0.0
        self._warned = False

    def update(self, render: Callable[[], Any], *, now: bool = False) -> None:
        """Show what `render` returns.

        Without `now`, at most once every UPDATE_SECONDS, and in the background; with it, it waits for FLUSH_SECONDS at most.
        """
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
        from prefect.runtime import flow_run, task_run

        run = self._flow_run or flow_run.id
        if run is None:
            return  # outside of a flow
        self._context = self._context or copy_context()  # with Prefect's settings and client
        send = partial(
            self._context.run, self._send, data, UUID(str(run)), task_run.id and UUID(str(task_run.id))
        )
        _sender.put(self, send)
        if now:
            _sender.flush(FLUSH_SECONDS)

    def _send(self, data: Any, run: UUID, task: UUID | None) -> None:
        """Send the data to the server, without retries."""
        from prefect.client.orchestration import get_client
        from prefect.client.schemas import filters
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        with _without_retries(), get_client(sync_client=True) as client:
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
                task_run_id=task,
            )
            self._id = client.create_artifact(artifact).id


def _without_retries() -> AbstractContextManager[Any]:
    """Prefect's settings without retries of requests.

    Creating them takes 0.1 s of CPU, so the last ones are kept.
    """
    from prefect.context import SettingsContext, get_settings_context
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

    global _settings
    now = get_settings_context()
    if _settings is None or _settings[0] is not now.settings:
        _settings = now.settings, now.settings.copy_with_update({PREFECT_CLIENT_MAX_RETRIES: 0})
    return SettingsContext(profile=now.profile, settings=_settings[1])


_settings: tuple[Any, Any] | None = None  # those of a flow, and the same without retries


class _Sender:
    """A thread that sends the latest data of each artifact, so that no caller waits for Prefect's server.

    Data that the server does not accept is dropped: the next update replaces it.
    """

    def __init__(self) -> None:
        self._pending: dict[PrefectArtifact, Callable[[], None]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._sending = False

    def put(self, artifact: PrefectArtifact, send: Callable[[], None]) -> None:
        with self._changed:
            self._pending[artifact] = send
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="artifacts")
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Wait until everything is sent or dropped, or these seconds have passed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending and not self._sending, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                send = self._pending.pop(next(iter(self._pending)))
                self._sending = True
            try:
                send()
            except Exception as error:
                log.debug("Prefect did not accept an artifact: %s", error)
            with self._changed:
                self._sending = False
                self._changed.notify_all()


_sender = _Sender()


def progress_bar(key: str, description: str) -> Callable[[float], None]:
    """A function that shows a completed fraction, 0 to 1, as a progress artifact."""
    artifact = PrefectArtifact("progress", key, description)
    return lambda done: artifact.update(lambda: min(100.0, round(100 * done, 1)), now=done >= 1)


def show_table(key: str, description: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Show a table artifact."""
    PrefectArtifact("table", key, description).update(lambda: table_data(rows), now=True)


def table_data(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a table artifact's JSON, without the columns in which every value is None."""
    rows = list(rows)
    columns = [name for name in (rows[0] if rows else ()) if any(row[name] is not None for row in rows)]
    return json.dumps([{name: row[name] for name in columns} for row in rows])
