"""What each run has been trained on: the ledger of shard keys that continual pretraining asks what is new.

    <store>/ledger/<identity>.json    {run, identity, parent, dataset, shards: [key, ...]}

A run is known by its identity, which says what it was trained on; its parent is the run whose weights it started from. Every
run is recorded, promoted or not. What is new to a run's successor is in no record of that run and its ancestors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tasks.dataset import SHARDS
from tasks.store.store import Artifact, Store


@dataclass(frozen=True)
class Record:
    """One run's entry.

    Attributes:
        run: its name.
        identity: of its mathematics.
        parent: identity of the run that it goes on from; None where it starts anew.
        dataset: key of its corpus.
        shards: keys of the corpus' shards.
    """

    run: str
    identity: str
    parent: str | None
    dataset: str
    shards: tuple[str, ...]


def record(store: Store, run: str, identity: str, corpus: Artifact, parent: str | None = None) -> Record:
    """Enter a run that trained on this corpus; entering it again changes nothing."""
    shards = json.loads((store.path(corpus, whole=False) / SHARDS).read_text())
    entry = Record(run, identity, parent, corpus.key, tuple(shards))
    store.storage.write(_name(identity), json.dumps(asdict(entry)).encode())
    return entry


def find(store: Store, identity: str) -> Record | None:
    """A run's entry.

    Raises:
        ValueError: the entry is damaged.
    """
    data = store.storage.read(_name(identity))
    if data is None:
        return None
    try:
        value = json.loads(data)
        return Record(**{**value, "shards": tuple(value["shards"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{store.storage.location(_name(identity))}: is no ledger entry: {error}") from error


def lineage(store: Store, identity: str | None) -> Iterator[Record]:
    """A run's entry, then its parent's, and so on to the first.

    Raises:
        ValueError: one has no entry, so what it was trained on cannot be told; or they go in a circle.
    """
    seen: set[str] = set()
    while identity is not None:
        entry = find(store, identity)
        if entry is None:
            raise ValueError(f"the ledger of {store.uri} has no entry of run {identity}")
        if identity in seen:
            raise ValueError(f"the ledger of {store.uri} goes in a circle at run {identity}")
        seen.add(identity)
        yield entry
        identity = entry.parent


def trained_on(store: Store, identity: str | None) -> frozenset[str]:
    """Keys of all shards that a run and its ancestors were trained on; for `dataset.run`'s `without`."""
    return frozenset(key for entry in lineage(store, identity) for key in entry.shards)


def _name(identity: str) -> str:
    return f"ledger/{identity}.json"
