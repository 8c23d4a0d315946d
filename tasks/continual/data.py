"""What a round of continual pretraining trains on: the data that is new to the promoted model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from modeling.data.records import Rows, rows_path
from profiles.schema import Profile
from tasks import keys
from tasks.continual.held_out import Entry, HeldOut, round_origin, shard_path
from tasks.continual.replay import publish
from tasks.continual.series import Promoted
from tasks.steps.dataset import read_file
from tasks.store import ledger
from tasks.store.artifacts import Artifact
from tasks.store.ledger import SHARDS
from tasks.store.store import Store
from tasks.tokenization import record_rows


def new_data(
    store: Store,
    promoted: Promoted,
    dataset: Artifact,
    sequence_length: int,
    old: HeldOut,
    by_hash: Collection[str],
    records: Profile | None = None,
) -> Artifact | None:
    """Dataset of the shards new to the promoted model; None if they are too few for one sample.

    Its held-out text is that of the series, and of the new shards. A source with a weight keeps it; it is left out if its new
    shards are too few for one sample, and they remain new.

    Args:
        dataset: of all shards.
        old: held-out sets of the promoted model.
        by_hash: names of the sources that hold out documents by their hash.
        records: the round's profile, if it trains on records; their samples are packed again, each held-out set's separately.
    """
    contents = read_file(store, dataset)
    known = ledger.trained_on(store, promoted.identity)
    shards = read_file(store, dataset, SHARDS)
    pairs = zip(contents["train"], shards, strict=True)
    new, blend = _select(pairs, contents.get("blend"), known, sequence_length)
    # The sources of the dataset are those of its held-out text.
    for part, source in zip(blend or (), contents.get("sources", ()), strict=False):
        part["name"] = source["name"]
    train = [entry for entry, _ in new]
    if sum(entry["tokens"] for entry in train) <= sequence_length:
        return None
    chosen = {shard for _, shard in new}
    origin = round_origin(promoted.next_round)
    sets = old + HeldOut.from_sources(origin, contents, by_hash, [shard in chosen for shard in shards])
    held_out, parts = list(sets.entries), list(sets.sets)
    selected = {**contents, "train": train, "validation": held_out, "sources": parts, "blend": blend}
    if records is not None:
        selected["packing"] = records.packs
    summary = {
        "tokens": sum(entry["tokens"] for entry in train),
        "validation_tokens": sum(entry["tokens"] for entry in held_out),
        "shards": len(train),
    }
    if "template" in dataset.summary:
        summary["template"] = dataset.summary["template"]
    rows = partial(_write_rows, store, records, train, sets) if records else None
    return publish(
        store, keys.new_data(selected), selected, train, summary, [shard for _, shard in new], rows
    )


def _write_rows(
    store: Store, profile: Profile, train: Sequence[Entry], sets: HeldOut, folder: Path
) -> dict[str, int]:
    """Write the rows of both splits of a dataset of records; returns their counts, for its summary."""
    rows = record_rows.of_shards(profile, [shard_path(store, entry) for entry in train])
    rows.write(rows_path(folder, "train"))
    entries, parts = iter(sets.entries), []
    for each in sets.sets:
        own = list(islice(entries, each["shards"]))
        prefixes = [shard_path(store, entry) for entry in own]
        parts.append((record_rows.of_shards(profile, prefixes), sum(entry["tokens"] for entry in own)))
    held_out = Rows.joined(parts)
    held_out.write(rows_path(folder, "validation"))
    documents = sum(entry["documents"] for entry in train)
    return {"documents": documents, "samples": len(rows), "validation_samples": len(held_out)}


def _select(
    pairs: Iterable[tuple[Entry, str]],
    blend: list[dict[str, Any]] | None,
    known: Set[str],
    sequence_length: int,
) -> tuple[list[tuple[Entry, str]], list[dict[str, Any]] | None]:
    """The shards that are not known, as (entry of corpus.json, key), and their blend.

    Args:
        pairs: all shards, in the order of their sources.
        blend: corpus.json's weight and number of shards of each source; None if sources have no weights.
    """
    if blend is None:
        return [(entry, shard) for entry, shard in pairs if shard not in known], None
    selected, parts, pairs = [], [], iter(pairs)
    for part in blend:
        new = [(entry, shard) for entry, shard in islice(pairs, part["shards"]) if shard not in known]
        if part["weight"] and sum(entry["tokens"] for entry, _ in new) <= sequence_length:
            new = []  # a source with a weight is a stream of its own, of at least one sample
        selected += new
        parts.append({"weight": part["weight"] if new else None, "shards": len(new)})
    return selected, parts
