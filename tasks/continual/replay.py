"""Replay in a round's dataset: the promoted model's history by the ledger, and what a round draws.

The share of replay is an argument: flows/continual.py chooses each attempt's, from `continual.replay` on.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modeling.data.records import Rows, rows_path
from modeling.data.replay import HistoryStream, Replay, plan
from modeling.data.sample_order import WindowOrder, sample_number
from parallel.checkpoint.locations import MARKER
from profiles.errors import ProfileError
from profiles.files import run_files
from tasks import keys
from tasks.continual import series
from tasks.continual.held_out import place
from tasks.continual.series import Promoted
from tasks.steps.dataset import CORPUS, DatasetStep, read_file
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.ledger import SHARDS, LedgerEntry
from tasks.store.run_folder import RunFolder
from tasks.store.store import Store
from tasks.tokenization.dataset_plan import TOKENS

Entry = dict[str, Any]  # a shard in corpus.json
GENERATED = "continual.replay_from"  # in place of the name of a run that was trained on the data
FORMAT = 2  # of a corpus.json with replay
log = logging.getLogger(__name__)


class Part(NamedTuple):
    """A stream of earlier data, its shards as entries of corpus.json, and its rows if it has records."""

    stream: HistoryStream
    shards: tuple[Entry, ...]
    rows: Rows | None = None

    def drawn(self, begin: int, count: int, span: int | None) -> list[Entry]:
        """The shards of its samples [begin, begin + count)."""
        length = (self.stream.tokens - 1) // self.stream.windows
        own_span = max(1, span // length) if span and self.rows is None else None
        order = WindowOrder(self.stream.windows, self.stream.seed, own_span)
        samples = order.windows(np.arange(begin, begin + count))
        ends = np.cumsum([shard["tokens"] for shard in self.shards])
        if self.rows is not None:
            rows = np.repeat(np.arange(len(self.rows)), np.diff(self.rows.ends, prepend=0))
            starts = self.rows.starts[np.isin(rows, samples)]  # of sequences, each within a shard
            return [self.shards[i] for i in np.unique(np.searchsorted(ends, starts, side="right")).tolist()]
        starts = samples * length
        first = np.searchsorted(ends, starts, side="right")
        last = np.searchsorted(ends, starts + length, side="right")
        touched = np.zeros(len(self.shards) + 1, np.int64)
        np.add.at(touched, first, 1)
        np.add.at(touched, np.minimum(last, len(self.shards) - 1) + 1, -1)
        return [self.shards[i] for i in np.flatnonzero(np.cumsum(touched[:-1])).tolist()]


@dataclass(frozen=True)
class History:
    """Streams of earlier data."""

    parts: tuple[Part, ...] = ()

    @property
    def streams(self) -> tuple[HistoryStream, ...]:
        return tuple(part.stream for part in self.parts)

    def __add__(self, other: History) -> History:
        """Both, without streams that the first one has already."""
        known = {(stream.identity, stream.source) for stream in self.streams}
        new = (part for part in other.parts if (part.stream.identity, part.stream.source) not in known)
        return History((*self.parts, *new))

    def without_generated(self) -> History:
        """Without text that was sampled from earlier models."""
        return History(tuple(part for part in self.parts if part.stream.run != GENERATED))

    def without(self, known: History, sequence_length: int) -> History:
        """Without shards that a known history has, as of a fork that reads its parent's data again.

        Records, whose samples may be of several shards, stay unless all of them are known.
        """
        places, kept = {place(shard) for part in known.parts for shard in part.shards}, []
        for part in self.parts:
            shards = tuple(shard for shard in part.shards if place(shard) not in places)
            if part.rows is None and len(shards) < len(part.shards):
                tokens = sum(shard["tokens"] for shard in shards)
                windows = max(0, tokens - 1) // sequence_length
                shorter = {"shards": len(shards), "tokens": tokens, "windows": windows, "end": windows}
                part = Part(replace(part.stream, **shorter), shards)
            if shards and part.stream.windows:
                kept.append(part)
        return History(tuple(kept))

    def drawn(self, replay: Replay, span: int | None) -> Iterator[tuple[HistoryStream, Entry]]:
        """The shards that a round reads, with their streams."""
        counts = replay.counts(replay.samples)
        for stream, part, count in zip(replay.streams, self.parts, counts, strict=True):
            for shard in part.drawn(stream.begin, count, span):
                yield stream, shard


def history(store: Store, promoted: Promoted, new: Artifact, sequence_length: int) -> History:
    """What the promoted model and its ancestors were trained on, and how much of it their rounds replayed.

    Args:
        new: the round's new data, in whose order the history is read too.

    Raises:
        ProfileError: a dataset of the series is not in the store any more.
    """
    span, found = read_file(store, new).get("span"), History()

    def read(entry: LedgerEntry, contents: dict[str, Any]) -> tuple[History, History]:
        """What a run trained on first, and what it replayed."""
        rows = rows_of(store, Artifact(DatasetStep.id(entry.dataset)), contents)
        own, replayed = _recorded(entry, contents, sequence_length, rows)
        return own, _restarted(replayed, contents.get("span") != span, sequence_length)

    ancestors = series.ancestors_of(store, promoted)
    for entry in ancestors.series:
        own, replayed = read(entry, _contents(store, entry))
        found = found + own + replayed.without_generated()
        if any(stream.run != GENERATED for stream in replayed.streams):  # they cover all earlier runs
            break
    for run in ancestors.known:
        if run.entry.identity not in {stream.identity for stream in found.streams}:
            own, replayed = read(run.entry, run.contents)
            found = found + own.without(found, sequence_length) + replayed.without_generated()
    return found


def rows_of(store: Store, dataset: Artifact, contents: dict[str, Any]) -> Rows | None:
    """The rows of a dataset's training split, if it has records; `contents` is its corpus.json."""
    if not contents.get("records"):
        return None
    return Rows.read(rows_path(store.artifacts.path(dataset, with_required=False), "train"))


def of_dataset(
    identity: str, run: str, contents: dict[str, Any], sequence_length: int, rows: Rows | None = None
) -> History:
    """The streams of the data that a run trained on first, none of it replayed yet.

    Args:
        rows: of records, which have no windows.
    """
    shards = contents["train"]
    parts = contents.get("blend") or [{"weight": None, "shards": len(shards)}]
    names = [source["name"] for source in contents.get("sources", ())]
    weighted = bool(contents.get("blend"))
    history_parts, first = [], 0
    for number, part in enumerate(parts):
        own = tuple(shards[first : first + part["shards"]])
        first += part["shards"]
        tokens = sum(shard["tokens"] for shard in own)
        windows = max(0, tokens - 1) // sequence_length if rows is None else len(rows)
        if not windows or (weighted and not part["weight"]):  # nothing was drawn from it
            continue
        known = names[number] if number < len(names) else str(number)
        name = part.get("name", known) if weighted else ""  # in a round's dataset, sources are held-out sets
        # Of the run and not of train.seed, so that the order stays the same in all rounds and is not that of the first reading.
        seed = int(keys.digest({"replay": [identity, number]})[:15], 16)
        stream = HistoryStream(identity, run, name, part["weight"], len(own), tokens, windows, seed)
        history_parts.append(Part(replace(stream, end=windows), own, rows))
    return History(tuple(history_parts))


def with_replay(
    store: Store,
    new: Artifact,
    known: History,
    share: float,
    samples: int,
    restore: Callable[[Iterable[tuple[HistoryStream, Entry]]], None],
) -> Artifact:
    """Dataset of a round's new data, mixed with a share of samples from the history.

    Its `shards.json`, which the ledger records, lists the new shards only.

    Args:
        samples: number of samples of the round, new and replayed.
        restore: makes the shards that the round draws from the history, and that the store lacks.
    """
    if not share or not known.parts:
        return new
    contents = read_file(store, new)
    weights = [part["weight"] for part in contents.get("blend") or () if part["weight"]]
    replay = plan(weights or [1.0], known.streams, share, samples)
    entries = [shard for part in known.parts for shard in part.shards]
    train = [*contents["train"], *entries]
    selected = {**contents, "format": FORMAT, "train": train, "replay": replay.to_json()}
    drawn = list(known.drawn(replay, contents.get("span")))
    restore(drawn)
    used = [*contents["train"], *(shard for _, shard in drawn)]
    summary = {**new.summary, "replay": share, "replayed_samples": sum(replay.counts(samples))}
    summary["generated"] = all(stream.run == GENERATED for stream in known.streams)
    rows = partial(_write_rows, store, new, known) if contents.get("records") else None
    shards = read_file(store, new, SHARDS)
    return publish(store, keys.new_data(selected), selected, used, summary, shards, rows)


def publish(
    store: Store,
    key: str,
    contents: Mapping[str, Any],
    used: Iterable[Entry],
    summary: Mapping[str, Any],
    shards: Any,
    write_rows: Callable[[Path], Mapping[str, int]] | None = None,
) -> Artifact:
    """Publish a dataset, unless the store has it.

    Args:
        contents: its corpus.json.
        used: training shards that it requires; it requires all of its held-out ones.
        shards: its shards.json, what the ledger records.
        write_rows: of records, writes the rows into the dataset's folder; returns more of the summary.
    """
    id, published = DatasetStep.id(key), dict(summary)
    with store.artifacts.lock(id):
        if found := store.artifacts.find(id):
            return found
        tokens = sorted(tokens_of([*used, *contents["validation"]]))
        with store.artifacts.publish(id, published, [ArtifactId(TOKENS, key) for key in tokens]) as folder:
            (folder / CORPUS).write_text(json.dumps(contents))
            (folder / SHARDS).write_text(json.dumps(shards))
            if write_rows is not None:
                published |= write_rows(folder)
    return store.artifacts.expect(id)


def _write_rows(store: Store, new: Artifact, known: History, folder: Path) -> Mapping[str, int]:
    """Write the rows of a round's records into its dataset: new ones, then each stream's."""
    source = store.artifacts.path(new, with_required=False)
    tokens = sum(entry["tokens"] for entry in read_file(store, new)["train"])
    parts = [(Rows.read(rows_path(source, "train")), tokens)]
    parts += [(part.rows, part.stream.tokens) for part in known.parts if part.rows is not None]
    Rows.joined(parts).write(rows_path(folder, "train"))
    shutil.copyfile(rows_path(source, "validation"), rows_path(folder, "validation"))
    return {}  # the summary counts the new ones


def samples_read(run: RunFolder, steps: int, batch: int) -> int:
    """Number of samples that a finished run has read, those of steps that were rolled back included.

    It differs from the number for which replay was planned if steps were rolled back, or if `train.steps` was changed.

    Args:
        steps: the run's last one.
        batch: samples of a step.
    """
    marker = run.read_json(f"{run_files.checkpoint(steps)}/{MARKER}")
    left_out = [(int(start), int(end)) for start, end in marker.get("left_out", ())]
    return sample_number(steps * batch, left_out)


def share_of(store: Store, dataset: Artifact) -> float:
    """The share of a round's samples that are replayed."""
    return float(read_file(store, dataset).get("replay", {}).get("share", 0.0))


def tokens_of(entries: Iterable[Entry]) -> set[str]:
    """Keys of the tokenized shards that entries of corpus.json are in; Megatron pairs are elsewhere."""
    return {entry["path"].split("/")[1] for entry in entries if entry["path"].startswith(f"{TOKENS}/")}


def _contents(store: Store, entry: LedgerEntry) -> dict[str, Any]:
    try:
        contents: dict[str, Any] = read_file(store, Artifact(DatasetStep.id(entry.dataset)))
    except FileNotFoundError as error:
        reason = (
            f"the dataset {entry.dataset} of run {entry.run} is not in the store any more, so it is unknown what it read; "
            "restore artifacts/dataset from a backup, or set continual.replay to 0"
        )
        raise ProfileError("continual.replay", None, reason) from error
    return contents


def _recorded(
    entry: LedgerEntry, contents: dict[str, Any], sequence_length: int, rows: Rows | None
) -> tuple[History, History]:
    """What a run trained on first, and what it replayed."""
    if "replay" not in contents:
        return of_dataset(entry.identity, entry.run, contents, sequence_length, rows), History()
    replay = Replay.from_json(contents["replay"])
    streams = replay.after(entry.samples or replay.samples)
    shard = len(contents["train"]) - sum(stream.shards for stream in streams)
    own = {**contents, "train": contents["train"][:shard]}
    token = sum(entry["tokens"] for entry in own["train"])
    row = 0 if rows is None else len(rows) - sum(stream.windows for stream in streams)
    own_rows = None if rows is None else rows.part(0, row, 0)
    parts = []
    for stream in streams:
        shards = tuple(contents["train"][shard : shard + stream.shards])
        found = None if rows is None else rows.part(row, row + stream.windows, token)
        parts.append(Part(stream, shards, found))
        shard, token, row = shard + stream.shards, token + stream.tokens, row + stream.windows
    return of_dataset(entry.identity, entry.run, own, sequence_length, own_rows), History(tuple(parts))


def _restarted(known: History, reordered: bool, sequence_length: int) -> History:
    """A history whose current pass begins anew if its windows, or their order, have changed."""
    windows = [
        stream.windows if rows is not None else max(0, stream.tokens - 1) // sequence_length
        for stream, _, rows in known.parts
    ]
    if not known.parts or (not reordered and windows == [stream.windows for stream in known.streams]):
        return known
    log.info(
        "the history is replayed from its beginning: train.sequence_length or data.shuffle_tokens changed"
    )
    found = []
    for part, count in zip(known.parts, windows, strict=True):
        if count:
            found.append(part._replace(stream=replace(part.stream, windows=count, begin=0, end=count)))
    return History(tuple(found))
