"""Activities: what uses a store's runs right now, so that garbage collection waits.

Each holds a lock that is named after its kind and run. Scratch folders and new artifacts, which nothing refers to yet, belong to
one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal, get_args

from profiles.errors import ProfileError
from tasks.store import locks
from tasks.store.locks import Lock
from tasks.store.store import Store

# Locks of artifacts are named similarly, so no kind is one of theirs.
Kind = Literal["run", "continual", "evaluate", "averaging", "exporting"]
READERS: dict[Kind, str] = {  # kinds that read checkpoints of a run that they do not train
    "evaluate": "evaluates",
    "averaging": "averages checkpoints of",
    "exporting": "exports",
    "continual": "continues",
}


@contextmanager
def begin(store: Store, kind: Kind, name: str) -> Iterator[Lock]:
    """Hold the lock of a run's name for a block: one activity of a kind uses it at a time, others wait."""
    with store.lock(f"{kind}-{name}") as lock:
        with store.lock("gc"):  # wait for a garbage collection that has not seen this activity
            pass
        yield lock


@contextmanager
def without_readers(store: Store, name: str) -> Iterator[None]:
    """Keep every reader from using a run for a block that moves it.

    Raises ProfileError if one is active, rather than wait for it: an evaluation may follow the run until it ends.
    """

    def reject(kind: Kind) -> None:
        process = holder(store, kind, name) or "another process"
        reason = (
            f"{process} {READERS[kind]} the run that this one replaces; start it again once that has ended"
        )
        raise ProfileError("name", name, reason)

    with ExitStack() as stack:
        for kind in READERS:
            stack.enter_context(store.lock(f"{kind}-{name}", partial(reject, kind)))
        yield


def holder(store: Store, kind: Kind, name: str) -> str | None:
    """The process that performs an activity; None if there is none."""
    return locks.holder(store.backend, f"locks/{kind}-{name}")


def find_all(store: Store) -> Iterator[tuple[str, str]]:
    """Run and process of every activity."""
    for lock in sorted(store.backend.entries("locks")):
        kind, _, name = lock.partition("-")
        if kind in get_args(Kind) and (process := locks.holder(store.backend, f"locks/{lock}")):
            yield name, process
