"""Locks between processes and machines, on any backend with exclusive create.

A lock is a folder of numbered tickets, one small JSON file each: {owner, expires, released, nonce}. The highest number holds
the lock until it is released, expires, or its process is gone; the next holder creates the following number, which only one
process can. The highest ticket is never deleted, so that no number is created twice. A thread of the holder renews the
expiry. Acquiring costs one listing and one write, and leaves one file.

Expiry times are compared between hosts: their clocks must agree within two thirds of the expiry.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from tasks.store.backends import Backend
from tasks.store.lock_owner import LockOwner

log = logging.getLogger(__name__)

EXPIRY = 60.0  # seconds without a renewal
POLL = 0.2  # seconds between attempts to acquire a lock that is held


@contextlib.contextmanager
def acquire(backend: Backend, name: str, expiry: float = EXPIRY) -> Iterator[None]:
    """Wait for the lock of this name and hold it for the block; not reentrant.

    Args:
        expiry: seconds without a renewal after which another process takes the lock over. The lock of a process that ended on
            this host is taken over at once.
    """
    ticket = _acquire_ticket(backend, name, expiry)
    stopped = threading.Event()
    renewal = threading.Thread(target=_renew, args=(backend, name, ticket, expiry, stopped), daemon=True)
    renewal.start()
    try:
        yield
    finally:
        stopped.set()
        renewal.join()
        backend.write(f"{name}/{ticket}", _state(expiry, released=True))


def holder(backend: Backend, name: str) -> str | None:
    """Who holds the lock of this name; None if nobody does."""
    last = max(_tickets(backend, name), default=0)
    found = _holder(backend, name, last) if last else None
    return str(found) if found else None


def _acquire_ticket(backend: Backend, name: str, expiry: float) -> int:
    """Number of the ticket with which this process holds the lock."""
    logged = False
    unreadable_since: dict[int, float] = {}  # ticket -> when this process first failed to read it
    while True:
        last = max(_tickets(backend, name), default=0)
        holder = _holder(backend, name, last) if last else None
        if holder is _UNREADABLE:  # being written, or its process was killed during the write
            since = unreadable_since.setdefault(last, time.monotonic())
            holder = None if time.monotonic() - since > expiry else holder
        if holder is None:
            if backend.create(f"{name}/{last + 1}", _state(expiry)) and _confirm(backend, name, last + 1):
                return last + 1
            continue
        if not logged:
            logged = True
            log.info("waiting for %s, locked by %s", name.rpartition("/")[2], holder)
        time.sleep(POLL)


def _confirm(backend: Backend, name: str, ticket: int) -> bool:
    """Whether the new ticket is the highest; removes the lower ones if so, and itself if not.

    It is not the highest if its number was used before and removed by a later holder between our listing and our create.
    """
    tickets = _tickets(backend, name)
    if max(tickets, default=ticket) > ticket:
        backend.remove(f"{name}/{ticket}")
        return False
    for lower in tickets:
        if lower < ticket:
            backend.remove(f"{name}/{lower}")
    return True


_UNREADABLE = "another process"


def _holder(backend: Backend, name: str, ticket: int) -> LockOwner | str | None:
    """Owner of a ticket; None if it is released, expired or its process gone; _UNREADABLE if it cannot be parsed."""
    try:
        state = json.loads(backend.read(f"{name}/{ticket}") or b"")
        owner = LockOwner.from_json(state["owner"])
        is_over = state["released"] or float(state["expires"]) < time.time()
    except (ValueError, KeyError, TypeError):
        return _UNREADABLE
    return None if is_over or owner.is_gone else owner


def _renew(backend: Backend, name: str, ticket: int, expiry: float, stopped: threading.Event) -> None:
    while not stopped.wait(expiry / 3):
        try:
            if max(_tickets(backend, name), default=ticket) > ticket:
                log.warning("%s: lock lost; this process did not renew it for %g s", name, expiry)
                return
            backend.write(f"{name}/{ticket}", _state(expiry))
        except OSError as error:
            log.warning("%s: cannot renew the lock: %s; retrying", name, error)


def _tickets(backend: Backend, name: str) -> list[int]:
    return [int(file) for file in backend.files(name) if file.isdigit()]


def _state(expiry: float, released: bool = False) -> bytes:
    state: dict[str, Any] = {
        "owner": LockOwner.current().to_json(),
        "expires": time.time() + expiry,
        "released": released,
        "nonce": uuid4().hex,
    }
    return json.dumps(state).encode()
