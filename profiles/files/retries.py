"""Retries of network calls on temporary errors: exponential backoff with jitter, or Retry-After.

The clients' own retries end within seconds, while an object store throttles for minutes and the hub counts requests in windows
of five minutes. So calls to the hub, to sources on object stores and for shards of training data go through `call`. Files and
objects of the store go through `state_files.retried`, and reads of checkpoints through `retry_reads` in
parallel/checkpoint/locations.py, which may not import this module.

The loop is not tenacity's or stamina's, which no dependency installs: either would replace ten lines of `call`, but neither
`seconds_to_wait` nor the waits that another thread ends, and would need callbacks for both.
"""

from __future__ import annotations

import errno
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from profiles.files import retry_policies

MAX_WAIT = 600.0  # seconds; limit of a wait, even if the server asks for more
TIMEOUT, EARLY, THROTTLED, SERVER_ERROR = 408, 425, 429, 500  # HTTP status codes; the last one and above
# Exceptions of httpx, aiohttp and botocore for a connection that failed; by name, since none of them must be installed.
NETWORK_ERRORS = {
    "TransportError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "HTTPClientError",
    "IncompleteReadError",
}
PERMANENT = {"FileExpired", "OfflineModeIsEnabled", "UnsupportedProtocol"}  # similar to those above
ERRNOS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EHOSTUNREACH,
    errno.EIO,
    errno.ENETUNREACH,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_thread = threading.local()  # `stop`: the event that ends the waits of a thread of `call_in_threads`


def call(
    function: Callable[[], T],
    what: str,
    delays: Sequence[float] = retry_policies.NETWORK.delays,
    permanent: tuple[type[Exception], ...] | None = None,
) -> T:
    """The result of a function, retried while its errors are temporary.

    Args:
        what: prefix of the log lines and of the error's message.
        delays: seconds to wait before each retry, on average.
        permanent: None: retry only errors that are known to be temporary (`seconds_to_wait`). Otherwise retry all errors but
            these, and these too if their cause is temporary.

    Raises:
        ConnectionError: every attempt failed with a temporary error.
        Exception: a permanent error, as it was raised.
    """
    for delay in (*delays, None):
        try:
            return function()
        except Exception as error:
            least = seconds_to_wait(error)
            if least is None and (permanent is None or isinstance(error, permanent)):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            if delay is None:
                raise ConnectionError(f"{what}: {reason}") from error
            seconds = (least or 0.0) + delay * random.uniform(0.5, 1.5)
            log.warning("%s: %s; retrying in %.0f s", what, reason, seconds)
            sleep(seconds)
    raise AssertionError("unreachable")


def seconds_to_wait(error: BaseException | None) -> float | None:
    """Minimum time to wait before a retry: 0, or what the server asks for. None if the error is permanent."""
    if error is None:
        return None
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "status", None)
    if isinstance(status, int):
        if status in (TIMEOUT, EARLY, THROTTLED) or status >= SERVER_ERROR:
            return _retry_after(getattr(response, "headers", None) or getattr(error, "headers", None) or {})
        return None
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & PERMANENT:
        return None
    if isinstance(error, FileNotFoundError):  # some clients turn any failure into it
        return seconds_to_wait(error.__cause__ or error.__context__)
    if isinstance(error, TimeoutError | socket.gaierror) or names & NETWORK_ERRORS:
        return 0.0
    return 0.0 if isinstance(error, OSError) and error.errno in ERRNOS else None


def _retry_after(headers: Any) -> float:
    """Seconds from response headers: Retry-After, or the time to the hub's next window; 0 if neither."""
    value = str(headers.get("Retry-After") or "").strip()
    seconds = 0.0
    if value.isdigit():
        seconds = float(value)
    elif value:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            seconds = 0.0
    elif window := re.search(r"\br\s*=\s*0\b.*?\bt\s*=\s*(\d+)", str(headers.get("RateLimit") or "")):
        seconds = float(window[1])
    return min(max(seconds, 0.0), MAX_WAIT)


def call_in_threads(function: Callable[[T], R], values: Sequence[T], threads: int) -> list[R]:
    """Map a function that uses the network on `threads` threads; returns the results in order.

    If this thread is interrupted, the others stop waiting for their retries.
    """
    stop = threading.Event()

    def call_stoppable(value: T) -> R:
        _thread.stop = stop
        return function(value)

    with ThreadPoolExecutor(threads) as pool:
        try:
            return list(pool.map(call_stoppable, values))
        except BaseException:
            stop.set()
            raise


def sleep(seconds: float) -> None:
    stop = getattr(_thread, "stop", None)
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise InterruptedError("another call failed, or the user interrupted this one")
