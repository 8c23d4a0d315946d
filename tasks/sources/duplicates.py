"""Exact duplicates: which documents of a source appeared in it before.

Each shard's documents are hashed once (128 bits), as an artifact. All hashes of a source are then compared in PARTS ranges of the
hash, so memory is that of one range: about 2 GB for 10^9 documents. The first of equal documents is kept, in the order of shards
and documents. The key of a shard's tokens includes which of its documents are dropped, so new data affects only the shards that
lose a document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from profiles.files import state_files
from tasks import keys
from tasks.sources.formats import readers
from tasks.sources.formats.long_text import LongText
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store

if TYPE_CHECKING:
    from tasks.tokenization.dataset_plan import DatasetPlan

HASHES, DUPLICATES = "hashes", "duplicates"
PARTS = 16  # by the first 4 bits of a hash
HASH = np.dtype([("high", "<u8"), ("low", "<u8")])


def fingerprint(
    plan: DatasetPlan,
    store: Store,
    k: int,
    report: Callable[[int], None] | None = None,
    threads: int = 1,
    token: str | None = None,
) -> Artifact:
    """Publish hashes.npy: the hashes of shard k's documents, in order; 0 for a record without text."""
    shard = plan.shards[k]
    id = ArtifactId(HASHES, keys.hashes(shard.digest))
    with store.artifacts.lock(id):
        if found := store.artifacts.find(id):
            return found
        with store.artifacts.publish(id) as folder:
            digests = bytearray()  # appended to: `join` would first collect an object per document
            for document in readers.documents(shard, token):
                digests += _hash(document)
            np.save(folder / "hashes.npy", np.frombuffer(digests, HASH))
    return store.artifacts.expect(id)


def comparable(plan: DatasetPlan) -> list[int]:
    """Indices of shards whose documents are compared, by source; Megatron pairs are used unchanged."""
    compared = [k for k, shard in enumerate(plan.shards) if shard.format != "megatron"]
    return sorted(compared, key=lambda k: plan.shards[k].source)


def find(plan: DatasetPlan, store: Store, hashes: dict[int, Artifact]) -> DatasetPlan:
    """Plan with the documents to drop; `hashes` are the artifacts of the `comparable` shards, by index."""
    groups = [[*group] for _, group in groupby(comparable(plan), lambda k: plan.shards[k].source)]
    key = keys.duplicates([[hashes[k].key for k in group] for group in groups])
    id = ArtifactId(DUPLICATES, key)
    with store.artifacts.lock(id):
        if not store.artifacts.find(id):
            with store.artifacts.publish(id) as folder:
                # By rank among the compared shards: another plan with these shards may have Megatron pairs between them.
                numbers: list[np.ndarray] = []
                for group in groups:
                    numbers += find_repeated([store.artifacts.path(hashes[k]) / "hashes.npy" for k in group])
                np.save(folder / "numbers.npy", np.concatenate([np.empty(0, np.int64), *numbers]))
                digests = [hashlib.sha256(n.tobytes()).hexdigest()[:32] if len(n) else "" for n in numbers]
                summary = {"counts": [len(n) for n in numbers], "digests": digests}
                (folder / "shards.json").write_text(json.dumps(summary))
    folder = store.artifacts.path(store.artifacts.expect(id))
    summary = json.loads(state_files.contents(folder / "shards.json"))
    of_shard: dict[int, str] = dict(zip(comparable(plan), summary["digests"], strict=True))
    drops = tuple(of_shard.get(k, "") for k in range(len(plan.shards)))
    return replace(plan, drops=drops, duplicates=key)


def dropped_documents(plan: DatasetPlan, store: Store, k: int) -> np.ndarray:
    """Ascending indices (duplicates) of shard k's documents that are duplicates, memory-mapped."""
    if plan.duplicates is None or not plan.drops[k]:
        return np.empty(0, np.int64)
    folder = store.artifacts.path(store.artifacts.expect(ArtifactId(DUPLICATES, plan.duplicates)))
    counts = json.loads(state_files.contents(folder / "shards.json"))["counts"]
    rank = comparable(plan).index(k)
    start = sum(counts[:rank])
    numbers: np.ndarray = np.load(folder / "numbers.npy", mmap_mode="r")
    return numbers[start : start + counts[rank]]


def find_repeated(paths: list[Path]) -> list[np.ndarray]:
    """For each file of hashes, ascending indices of those that occur earlier in it or in a previous file."""
    repeated: list[list[np.ndarray]] = [[] for _ in paths]
    for part in range(PARTS):
        hashes, files, indices = [], [], []
        for i, path in enumerate(paths):
            mapped = np.load(path, mmap_mode="r")
            index = np.flatnonzero((mapped["high"] >> np.uint64(60)) == part)
            index = index[(mapped["high"][index] != 0) | (mapped["low"][index] != 0)]
            hashes.append(np.asarray(mapped[index]))
            files.append(np.full(len(index), i))
            indices.append(index)
        value, file, index = map(np.concatenate, (hashes, files, indices))
        order = np.lexsort((index, file, value["low"], value["high"]))
        is_repeated = np.zeros(len(order), bool)
        is_repeated[1:] = value[order[1:]] == value[order[:-1]]
        later = order[is_repeated]
        for i in range(len(paths)):
            repeated[i].append(index[later[file[later] == i]])
    return [np.sort(np.concatenate(parts)) for parts in repeated]


def _hash(document: readers.Document) -> bytes:
    if document is None:
        return bytes(16)
    if isinstance(document, LongText):
        return document.sha256()[:16]
    data = (
        document.encode() if isinstance(document, str) else b"\0ids" + document.values.astype("<i8").tobytes()
    )
    return hashlib.sha256(data).digest()[:16]
