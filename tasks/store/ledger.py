"""Data ledger: the shards each run was trained on, from which continual pretraining finds new data.

    <store>/ledger/<identity>.json    {run, identity, parent, dataset, shards: [key, ...], samples, weights}

A run is identified by its identity hash; its parent is the run whose weights it started from: the base of a round, the parent of
a fork, or the run of the store that exported init.from. Every run is recorded before it trains, whether or not it ends or is
promoted. Data is new to a run's successor if it is in no entry of the run or its ancestors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from profiles.files.state_files import CorruptedState, retried
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

SHARDS = "shards.json"  # in a dataset artifact: keys of its shards, in order


class MissingEntry(CorruptedState):
    """The ledger has no entry for a run."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class LedgerEntry:
    """One run's entry."""

    run: str
    identity: str
    parent: str | None  # identity of the run whose weights it started from; None: from scratch or unknown
    dataset: str  # its key
    shards: tuple[str, ...]  # their keys
    samples: int | None = None  # that it read, if it is a promoted round; earlier versions recorded none
    weights: str | None = None  # initial ones, if its parent is unknown; "": from scratch; None: not recorded


def record(
    store: Store,
    run: str,
    identity: str,
    dataset: Artifact,
    parent: str | None = None,
    weights: str | None = None,
) -> LedgerEntry:
    """Record that a run is trained on a dataset; idempotent."""
    path = store.artifacts.path(dataset, with_required=False) / SHARDS
    shards = json.loads(retried(path.read_text))
    entry = LedgerEntry(run, identity, parent, dataset.key, tuple(shards), weights=weights)
    store.backend.write(_name(identity), json.dumps(asdict(entry)).encode())
    return entry


def record_samples(store: Store, identity: str, samples: int) -> None:
    """Record how many samples a recorded run has read."""
    entry = _require(store, identity)
    store.backend.write(_name(identity), json.dumps(asdict(replace(entry, samples=samples))).encode())


def find(store: Store, identity: str) -> LedgerEntry | None:
    """A run's entry; None if there is none. Raises CorruptedState if the file is not a ledger entry."""
    data = store.backend.read(_name(identity))
    if data is None:
        return None
    try:
        return TypeAdapter(LedgerEntry).validate_json(data)
    except ValidationError as error:
        wrong = error.errors()[0]
        what = " ".join([*map(str, wrong["loc"]), wrong["msg"]])
        reason = f"corrupted (not a ledger entry: {what}); restore the file"
        raise CorruptedState(f"{store.backend.location(_name(identity))}: {reason}") from error


def lineage(
    store: Store, identity: str | None, known: Mapping[str, LedgerEntry | None] | None = None
) -> Iterator[LedgerEntry]:
    """A run's entry, then its ancestors', of which some may be `known`.

    Raises CorruptedState at a cycle or missing entry.
    """
    visited: set[str] = set()
    while identity is not None:
        entry = (known or {}).get(identity) or _require(store, identity)
        if identity in visited:
            raise CorruptedState(f"{store.uri}: the ledger's parents form a cycle at run {identity}")
        visited.add(identity)
        yield entry
        identity = entry.parent


def trained_on(store: Store, identity: str | None) -> frozenset[str]:
    """Keys of all shards that a run and its ancestors were trained on."""
    return frozenset(key for entry in lineage(store, identity) for key in entry.shards)


def _require(store: Store, identity: str) -> LedgerEntry:
    if (entry := find(store, identity)) is None:
        raise MissingEntry(f"{store.uri}: the ledger has no entry for run {identity}")
    return entry


def _name(identity: str) -> str:
    return f"ledger/{identity}.json"
