"""A Prefect server that does not answer: one line instead of Prefect's own, and waiting for its start."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
import urllib.error
import urllib.request

from flows.server.prefect_settings import authorization

log = logging.getLogger(__name__)

FAILED_ITEM = "Service %r failed to process item"  # begins Prefect's record, which has the whole event
REPEAT_SECONDS = 600.0  # between lines about the same outage
START_SECONDS = 120.0  # for a server to start
FINISH_SECONDS = 5.0  # for the last logs and events


class OutageFilter(logging.Filter):
    """Replaces the records of events that could not be sent to the server by a line every REPEAT_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if not (isinstance(record.msg, str) and record.msg.startswith(FAILED_ITEM)):
            return True
        if time.monotonic() - self._logged_at > REPEAT_SECONDS:
            self._logged_at = time.monotonic()
            log.warning(
                "the Prefect server does not answer; the run continues, but its UI and alerts lack what happens meanwhile"
            )
        return False


_filter = OutageFilter()


def shorten_outages() -> None:
    """Filter Prefect's records about a server that does not answer; idempotent."""
    for handler in logging.getLogger("prefect._internal").handlers:
        handler.addFilter(_filter)


def finish_sending(seconds: float = FINISH_SECONDS) -> None:
    """Send the remaining logs and events, and drop what the server does not accept in time.

    At exit, Prefect would wait for as long as an outage lasts.
    """
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    services = {*EventsWorker._instances.values(), *APILogWorker._instances.values()}
    for kind in EventsWorker, APILogWorker:
        kind.drain_all(timeout=seconds)
    for service in services:
        with contextlib.suppress(queue.Empty):
            while True:
                service._queue.get_nowait()
        service._queue.put_nowait(None)  # ends it


def await_start(api: str, seconds: float = START_SECONDS) -> None:
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
        time.sleep(0.2)
