"""A Prefect server that does not answer: one line instead of Prefect's own, and bounded waits."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import urllib.error
import urllib.request
from typing import Any

from flows.server.prefect_settings import authorization
from profiles.files.retry_policies import SERVER_START, STOPPED_SERVER

log = logging.getLogger(__name__)

# Begin Prefect's records: of each event that could not be sent, which has all of it, and of a service that ends with some unsent.
FAILED_ITEM, UNSENT = "Service %r failed to process item", "Service %r failed with"
REPEAT_SECONDS = 600.0  # between lines about the same outage
FINISH_SECONDS = 5.0  # for the last logs and events, to a local server or one that is away
TEAM_SECONDS = 60.0  # for the same, to a configured server, which may be busy
STOP_RETRIES = len(STOPPED_SERVER.delays)  # of each request of a flow that stops


class OutageFilter(logging.Filter):
    """Replaces what could not be sent to the server, events and logs, by a line every REPEAT_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if not (isinstance(record.msg, str) and record.msg.startswith((FAILED_ITEM, UNSENT))):
            return True
        self.report()
        return False

    def report(self) -> None:
        """Log the line, unless it was logged not long ago."""
        if time.monotonic() - self._logged_at > REPEAT_SECONDS:
            self._logged_at = time.monotonic()
            log.warning(
                "the Prefect server does not answer; the run continues, but its UI and alerts lack what happens meanwhile"
            )


_filter = OutageFilter()


def shorten_outages() -> None:
    """Replace Prefect's lines about a server that does not answer by one of ours; idempotent."""
    from prefect.logging.handlers import APILogWorker

    for handler in logging.getLogger("prefect._internal").handlers:
        handler.addFilter(_filter)
    worker: Any = APILogWorker
    worker._handle_batch = _send_logs


async def _send_logs(worker: Any, items: list[dict[str, Any]]) -> None:
    """Send log records; Prefect's own method writes to the terminal for each batch that cannot be sent."""
    try:
        await worker._client.create_logs(items)
    except Exception as error:  # logging must not end the worker
        log.debug("%s log records were not sent: %r", len(items), error)
        _filter.report()


def shorten_retries() -> None:
    """Retry requests for seconds only, from here on in this context: a stop does not wait for an outage."""
    from prefect.context import SettingsContext, get_settings_context
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

    now = get_settings_context()
    retries = min(STOP_RETRIES, now.settings.client.max_retries)
    settings = now.settings.copy_with_update({PREFECT_CLIENT_MAX_RETRIES: retries})
    # Not left: the flow's engine stores its final state after the flow's function, which calls this.
    SettingsContext(profile=now.profile, settings=settings).__enter__()


def finish_sending(seconds: float = FINISH_SECONDS) -> None:
    """Send the remaining logs and events, and drop what the server does not accept in time.

    At exit, Prefect would wait for as long as an outage lasts.
    """
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    kinds: tuple[Any, ...] = EventsWorker, APILogWorker  # whose instances are private
    services = {service for kind in kinds for service in kind._instances.values()}
    sending = [(service._loop, service._task) for service in services]
    for kind in kinds:
        kind.drain_all(timeout=seconds)
    for loop, task in sending:
        if loop is not None and task is not None:  # it has started
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)  # without effect once the task has ended


def await_start(api: str, seconds: float = SERVER_START.seconds) -> None:
    """Wait while nothing listens at an API's address, as while a server starts.

    Any answer ends the wait.
    """
    request = urllib.request.Request(f"{api}/health", headers=authorization())
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError as error:
            refused = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
            if not refused or time.monotonic() > deadline:
                return
        time.sleep(SERVER_START.delays[0])
