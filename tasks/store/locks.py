"""Locks between processes and machines, on any backend with exclusive create.

A lock is a folder of numbered tickets, one small JSON file each: {owner, expires, released, nonce}. The highest number holds
the lock until it is released, expires, or its process is gone; the next holder creates the following number, which only one
process can. The highest ticket is never deleted, so that no number is created twice. A thread of the holder renews the
expiry. Acquiring costs one listing and one write, and leaves one file.

A ticket's number is its fencing token: a holder that lost the lock while it was suspended or partitioned gets LockLost from the
`check` that precedes every publication. Expiry times are compared between hosts: their clocks must agree within two thirds of
the expiry, or a holder whose clock is behind loses its lock. One whose clock is ahead does not block others: who waits for a lock
also watches whether its ticket is renewed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from pydantic.dataclasses import dataclass

from tasks.store.backends.backend import Backend

log = logging.getLogger(__name__)

EXPIRY = 60.0  # seconds without a renewal
POLL = 0.2  # seconds between the first attempts to acquire a lock that is held; later up to the backend's longest_poll
BACKOFF = 1.5
START_TOLERANCE = 5.0  # seconds; start times shift when the clock is set


@dataclass(frozen=True)
class LockOwner:
    """Owner of a lock or a staging folder: a process on a host, which others can check for liveness.

    Its start tells it from a later one with the same pid.
    """

    host: str
    pid: int
    started: float  # seconds since 1970
    # Boot id of the kernel and inode of the pid namespace: a container may reuse a host's name, but not these. Empty where the
    # system has none; None in the files of earlier versions.
    system: str | None = None
    # Start in clock ticks since boot, which does not shift when the clock is set; None as above, and where it is unknown.
    ticks: int | None = None

    @classmethod
    def current(cls) -> LockOwner:
        pid, started = os.getpid(), psutil.Process().create_time()
        return cls(socket.gethostname(), pid, started, _system(), _start_ticks(pid))

    @property
    def is_local(self) -> bool:
        """Whether the owner runs in this host's pid namespace, so that its pid can be checked."""
        return (self.host, self.system) == (socket.gethostname(), _system())

    @property
    def is_gone(self) -> bool:
        """Whether the process has certainly ended; always False for a process of another host or container."""
        if not self.is_local:
            return False
        try:
            process = psutil.Process(self.pid)
            ticks = _start_ticks(self.pid)
            if ticks is None or self.ticks is None:
                is_other = abs(process.create_time() - self.started) > START_TOLERANCE
            else:
                is_other = ticks != self.ticks
            return is_other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class LockLost(RuntimeError):
    """Another process took over a lock not renewed in time; nothing may be published under it."""


class Lock:
    """A lock that this process holds, unless it lost it.

    Attributes:
        ticket: its fencing token; higher than that of every earlier holder.
        thread: identifier of the thread that has acquired it.
        since: time.monotonic() when it was acquired.
    """

    def __init__(self, backend: Backend, name: str, ticket: int, expiry: float) -> None:
        self.ticket, self.thread, self.since = ticket, threading.get_ident(), time.monotonic()
        self._backend, self._name, self._expiry = backend, name, expiry
        self._lost = False
        self._stopped = threading.Event()
        self._renewing = threading.Lock()  # serializes renewals and checks
        self._renewal = threading.Thread(target=self._renew, name="lock-renewal", daemon=True)

    def check(self) -> None:
        """Verify that no other process has taken the lock over, and renew it.

        Raises:
            LockLost: another process has taken it over.
            OSError: it cannot be verified.
        """
        with self._renewing:
            if self._lost or max(_tickets(self._backend, self._name), default=0) > self.ticket:
                self._lost = True
                reason = f"this process did not renew it for {self._expiry:g} s, and another one took it over"
                raise LockLost(f"{self._name}: lock lost: {reason}; its result is not published")
            _write_ticket(self._backend, self._name, self.ticket, self._expiry)

    def _renew(self) -> None:
        while not self._stopped.wait(self._expiry / 3):
            try:
                self.check()
            except LockLost as error:
                log.warning("%s", error)
                return
            except Exception as error:
                log.warning("%s: cannot renew the lock: %s; retrying", self._name, error)

    def _release(self) -> None:
        self._stopped.set()
        self._renewal.join()
        if self._lost:
            return
        try:
            _write_ticket(self._backend, self._name, self.ticket, self._expiry, released=True)
        except OSError as error:
            message = "%s: cannot release the lock: %s; it expires in %g s"
            log.warning(message, self._name, error, self._expiry)


@contextlib.contextmanager
def acquire(
    backend: Backend, name: str, expiry: float = EXPIRY, watch: Callable[[], None] = lambda: None
) -> Iterator[Lock]:
    """Wait for the lock of this name and hold it for the block; not reentrant.

    Args:
        watch: called several times a minute while waiting; may raise to give up.
        expiry: seconds without a renewal after which another process takes the lock over. The lock of a process that ended on
            this host is taken over at once.
    """
    lock = Lock(backend, name, _acquire_ticket(backend, name, expiry, watch), expiry)
    lock._renewal.start()
    try:
        yield lock
    finally:
        lock._release()


def holder(backend: Backend, name: str) -> str | None:
    """The holder of the lock of this name; None if it is free."""
    last = max(_tickets(backend, name), default=0)
    found = _holder(backend.read(f"{name}/{last}") or b"") if last else None
    corrupted = (
        f", whose ticket {backend.location(f'{name}/{last}')} is corrupted" if found == _UNREADABLE else ""
    )
    return f"{found}{corrupted}" if found else None


def _acquire_ticket(backend: Backend, name: str, expiry: float, watch: Callable[[], None]) -> int:
    """Number of the ticket with which this process holds the lock."""
    logged = False
    pause = POLL
    # Number and contents of the last ticket, and since when it has them.
    watched, since = (0, b""), time.monotonic()
    while True:
        last = max(_tickets(backend, name), default=0)
        data = (backend.read(f"{name}/{last}") or b"") if last else b""
        if (last, data) != watched:
            watched, since = (last, data), time.monotonic()
        holder = _holder(data) if last else None
        # A ticket that is not renewed: its process ended, with a clock that was ahead or while it wrote the ticket. One that is
        # corrupted is written anew by its holder, if there is one, after a third of the expiry.
        if time.monotonic() - since > (expiry / 2 if holder == _UNREADABLE else expiry):
            holder = None
        if holder is None:
            if backend.create(f"{name}/{last + 1}", _state(expiry)):
                try:
                    if _confirm(backend, name, last + 1):
                        return last + 1
                except BaseException:  # release the ticket now, or others would wait until it expires
                    with contextlib.suppress(OSError):
                        _write_ticket(backend, name, last + 1, expiry, released=True)
                    raise
            pause = POLL  # another process was faster
        elif not logged:
            logged = True
            what = name.rpartition("/")[2].replace("-", " ", 1)  # such as run tiny
            log.info("waiting for %s, in use by %s", what, holder)
        watch()
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * BACKOFF, backend.longest_poll)


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
            with contextlib.suppress(OSError):  # a later holder removes it
                backend.remove(f"{name}/{lower}")
    return True


_UNREADABLE = "another process"


def _holder(ticket: bytes) -> LockOwner | str | None:
    """Owner of a ticket; None if released, expired or its process is gone; _UNREADABLE if unparsable."""
    try:
        state = json.loads(ticket)
        owner = LockOwner(**state["owner"])
        is_over = state["released"] or float(state["expires"]) < time.time()
    except (ValueError, KeyError, TypeError):
        return _UNREADABLE
    return None if is_over or owner.is_gone else owner


def _tickets(backend: Backend, name: str) -> list[int]:
    return [int(file) for file in backend.files(name) if file.isdigit()]


def _write_ticket(backend: Backend, name: str, ticket: int, expiry: float, released: bool = False) -> None:
    backend.write(f"{name}/{ticket}", _state(expiry, released), durable=False)  # a power failure releases it


def _state(expiry: float, released: bool = False) -> bytes:
    state: dict[str, Any] = {
        "owner": asdict(LockOwner.current()),
        "expires": time.time() + expiry,
        "released": released,
        "nonce": uuid4().hex,
    }
    return json.dumps(state).encode()


def _start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it is unknown."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # not Linux, or it has ended
        return None
    after_name = status.rpartition(b") ")[2].split()  # fields 3 and later
    return int(after_name[22 - 3])


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux
        return ""
