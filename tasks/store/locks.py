"""Locks for work that must happen once, over any storage that can create a file exclusively.

A lock is a folder of numbered turns, one small file each: {owner, expires, released, nonce}. The highest number has the
lock, until it is released, expires or its process is gone; who comes next creates the number after it, and only one can. The
highest is never deleted, so that a late comer cannot create a number a second time. A holder moves its expiry on while it
lives, from a thread. Costs a listing and a write to take, and leaves one file.

Hosts compare each other's expiry times: their clocks must agree within two thirds of the expiry.
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

from tasks.store.backends import Storage
from tasks.store.lock_owner import Owner

log = logging.getLogger(__name__)

EXPIRY = 60.0  # seconds without a sign of life
POLL = 0.2  # seconds between looks at a lock that another one has


@contextlib.contextmanager
def held(storage: Storage, name: str, expiry: float = EXPIRY) -> Iterator[None]:
    """Wait for the lock of this name, and hold it for the block. It is not reentrant."""
    turn = _take(storage, name, expiry)
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(storage, name, turn, expiry, ended), daemon=True)
    heart.start()
    try:
        yield
    finally:
        ended.set()
        heart.join()
        storage.write(f"{name}/{turn}", _state(expiry, released=True))


def _take(storage: Storage, name: str, expiry: float) -> int:
    """The number of the turn that is now ours."""
    told = False
    unreadable: dict[int, float] = {}  # since when a turn cannot be read, by our own clock
    while True:
        last = max(_turns(storage, name), default=0)
        holder = _holder(storage, name, last) if last else None
        if holder is _UNREADABLE:  # being written, or its process was killed while it wrote
            since = unreadable.setdefault(last, time.monotonic())
            holder = None if time.monotonic() - since > expiry else holder
        if holder is None:
            if storage.create(f"{name}/{last + 1}", _state(expiry)) and _confirmed(storage, name, last + 1):
                return last + 1
            continue
        if not told:
            told = True
            log.info("waiting for %s, which is being made by %s", name.rpartition("/")[2], holder)
        time.sleep(POLL)


def _confirmed(storage: Storage, name: str, turn: int) -> bool:
    """Whether our turn is the highest; then the older ones are of no more use.

    It is not where ours had been there before, and was deleted by a later holder, between our look and our creating it.
    """
    turns = _turns(storage, name)
    if max(turns, default=turn) > turn:
        storage.remove(f"{name}/{turn}")
        return False
    for older in turns:
        if older < turn:
            storage.remove(f"{name}/{older}")
    return True


_UNREADABLE = "another process"


def _holder(storage: Storage, name: str, turn: int) -> Owner | str | None:
    """Whose turn it is: an owner, None where it is over, or _UNREADABLE."""
    try:
        state = json.loads(storage.read(f"{name}/{turn}") or b"")
        owner, expires, released = Owner.from_json(state["owner"]), float(state["expires"]), state["released"]
    except (ValueError, KeyError, TypeError):
        return _UNREADABLE
    return None if released or expires < time.time() or owner.gone else owner


def _beat(storage: Storage, name: str, turn: int, expiry: float, ended: threading.Event) -> None:
    while not ended.wait(expiry / 3):
        try:
            if max(_turns(storage, name), default=turn) > turn:
                log.warning(
                    "the lock of %s was lost: this process gave no sign of life for %g s", name, expiry
                )
                return
            storage.write(f"{name}/{turn}", _state(expiry))
        except OSError as error:  # the storage may answer again at the next beat
            log.warning("the lock of %s could not be prolonged: %s", name, error)


def _turns(storage: Storage, name: str) -> list[int]:
    return [int(file) for file in storage.files(name) if file.isdigit()]


def _state(expiry: float, released: bool = False) -> bytes:
    state: dict[str, Any] = {
        "owner": Owner.current().to_json(),
        "expires": time.time() + expiry,
        "released": released,
        "nonce": uuid4().hex,
    }
    return json.dumps(state).encode()
