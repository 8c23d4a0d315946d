"""Rows of record datasets: sequences, packed or one per row, and how many tokens the loss counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modeling.data.indexed import map_index, map_tokens, read_header
from modeling.data.records import Rows, pack_pairs, pack_rows
from profiles.errors import counted
from profiles.schema import Profile
from tasks.store.artifacts import Artifact
from tasks.store.store import Store


def write(profile: Profile, store: Store, shards: Sequence[Artifact], path: Path, split: str) -> int:
    """Write the rows of one split of tokenized shards; returns the number of samples."""
    rows = of_shards(profile, [store.artifacts.path(shard) / split for shard in shards])
    rows.write(path)
    return len(rows) // profile.rows_per_sample


def of_shards(profile: Profile, prefixes: Sequence[Path]) -> Rows:
    """The rows of tokenized shards, given by their `.bin`/`.idx` without suffix."""
    found = [_sequences(prefix) for prefix in prefixes]
    lengths, counted = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    rows = None
    if profile.packs:
        pack = pack_pairs if profile.objective.traits.pairs else pack_rows
        rows = pack(lengths, profile.train.sequence_length)
    return Rows.of(lengths, counted, rows)


def _sequences(prefix: Path) -> tuple[np.ndarray, np.ndarray]:
    """Number of tokens, and of those that the loss counts, of each sequence in a shard."""
    header = read_header(prefix)
    lengths = np.array(map_index(prefix, header).lengths, np.int64)
    if not len(lengths):
        return lengths, lengths
    counted = np.concatenate(([0], np.cumsum(map_tokens(prefix, header.dtype) >= 0)))
    ends = np.cumsum(lengths)
    return lengths, counted[ends] - counted[ends - lengths]


def describe(summary: Mapping[str, Any]) -> str:
    """The data in one line, from the dataset's summary."""
    parts = [
        f"{counted(summary['documents'], 'sequence')} in {counted(summary['samples'], 'sample')} to train on"
    ]
    parts.append(f"{counted(summary['validation_samples'], 'sample')} held out")
    for name, reason in (
        ("truncated", "truncated"),
        ("too_long", "too long"),
        ("missing", "unusable"),
        ("endless", "without the end of an answer in the loss"),
    ):
        if summary.get(name):  # an artifact of an earlier version lacks some
            parts.append(f"{counted(summary[name], 'record')} {reason}")
    return ", ".join(parts)
