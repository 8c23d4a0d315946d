"""Which documents of a source have appeared in it before, exactly.

Each shard's documents are hashed (128 bits) once, as an artifact of its own. Then all hashes of a source are looked at together,
a sixteenth of their range at a time, so that memory is that of a sixteenth: of 10^9 documents about 2 GB. The first of equal
documents stays, in the order of shards and documents. A shard's tokens depend on the numbers that are dropped from it, so data
that is added makes those shards again that lose a document by it, and no other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks import keys
from tasks.sources import readers
from tasks.sources.long_text import LongText
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

if TYPE_CHECKING:
    from tasks.tokenization.dataset_plan import DatasetPlan

HASHES, DUPLICATES = "hashes", "duplicates"
PARTS = 16
HASH = np.dtype([("high", "<u8"), ("low", "<u8")])


def fingerprint(
    plan: DatasetPlan,
    store: Store,
    k: int,
    report: Callable[[int], None] | None = None,
    threads: int = 1,
    token: str | None = None,
) -> Artifact:
    """The hashes of shard k's documents, in their order: an artifact with hashes.npy; 0 where a record has no text."""
    shard = plan.shards[k]
    identity = keys.hashes(shard.digest)
    with store.artifacts.lock(HASHES, identity):
        found = store.artifacts.find(HASHES, identity)
        if found:
            return found
        with store.artifacts.publish(HASHES, identity) as folder:
            digests = b"".join(_hash(document) for document in readers.documents(shard, token))
            np.save(folder / "hashes.npy", np.frombuffer(digests, HASH))
    return store.artifacts.expect(HASHES, identity)


def comparable(plan: DatasetPlan) -> list[int]:
    """Numbers of the shards whose documents are compared: all but ready-made pairs, which are used as they are."""
    return [i for i, shard in enumerate(plan.shards) if shard.format != "megatron"]


def find(plan: DatasetPlan, store: Store, hashes: dict[int, Artifact]) -> DatasetPlan:
    """The plan with what is to be dropped from each shard, published as one artifact.

    Args:
        hashes: by number, of the shards that are `comparable`.
    """
    sources = sorted({plan.shards[i].source for i in hashes})
    groups = [[i for i in sorted(hashes) if plan.shards[i].source == source] for source in sources]
    identity = keys.duplicates([[hashes[i].key for i in group] for group in groups])
    with store.artifacts.lock(DUPLICATES, identity):
        if not store.artifacts.find(DUPLICATES, identity):
            with store.artifacts.publish(DUPLICATES, identity) as folder:
                drops: dict[int, np.ndarray] = {}
                for group in groups:
                    paths = [store.artifacts.path(hashes[i]) / "hashes.npy" for i in group]
                    drops |= dict(zip(group, repeated(paths), strict=True))
                each = [drops.get(i, np.empty(0, np.int64)) for i in range(len(plan.shards))]
                np.save(folder / "numbers.npy", np.concatenate([np.empty(0, np.int64), *each]))
                digests = [hashlib.sha256(own.tobytes()).hexdigest()[:32] if len(own) else "" for own in each]
                about = {"counts": [len(own) for own in each], "digests": digests}
                (folder / "shards.json").write_text(json.dumps(about))
    about = json.loads(
        (store.artifacts.path(store.artifacts.expect(DUPLICATES, identity)) / "shards.json").read_text()
    )
    return replace(plan, drops=tuple(about["digests"]), duplicates=identity)


def dropped(plan: DatasetPlan, store: Store, k: int) -> set[int]:
    """Numbers of shard k's documents that have appeared before."""
    if not plan.drops or not plan.drops[k]:
        return set()
    folder = store.artifacts.path(store.artifacts.expect(DUPLICATES, plan.duplicates))
    counts = json.loads((folder / "shards.json").read_text())["counts"]
    start = sum(counts[:k])
    return set(np.load(folder / "numbers.npy", mmap_mode="r")[start : start + counts[k]].tolist())


def repeated(paths: list[Path]) -> list[np.ndarray]:
    """For each file of hashes the numbers (ascending) of those that are in an earlier file, or before in its own."""
    drops: list[list[np.ndarray]] = [[] for _ in paths]
    for part in range(PARTS):
        found, files, numbers = [], [], []
        for i, path in enumerate(paths):
            hashes = np.load(path, mmap_mode="r")
            own = np.flatnonzero((hashes["high"] >> np.uint64(60)) == part)
            own = own[(hashes["high"][own] != 0) | (hashes["low"][own] != 0)]
            found.append(np.asarray(hashes[own]))
            files.append(np.full(len(own), i))
            numbers.append(own)
        every, file, number = map(np.concatenate, (found, files, numbers))
        order = np.lexsort((number, file, every["low"], every["high"]))
        again = np.zeros(len(order), bool)
        again[1:] = every[order[1:]] == every[order[:-1]]
        later = order[again]
        for i in range(len(paths)):
            drops[i].append(number[later[file[later] == i]])
    return [np.sort(np.concatenate(own)) for own in drops]


def _hash(document: readers.Document) -> bytes:
    if document is None:
        return bytes(16)
    if isinstance(document, LongText):
        total = hashlib.sha256()
        for chunk in document.chunks():
            total.update(chunk.encode())
        return total.digest()[:16]
    data = (
        document.encode() if isinstance(document, str) else b"\0ids" + document.values.astype("<i8").tobytes()
    )
    return hashlib.sha256(data).digest()[:16]
