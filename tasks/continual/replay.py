"""Replay in a round's dataset: the promoted model's history by the ledger, and what a round draws."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from modeling import run_files
from modeling.data.replay import HistoryStream, Replay, plan
from modeling.data.sample_order import WindowOrder, sample_number
from parallel.checkpoint.locations import MARKER
from profiles import state_files
from profiles.errors import ProfileError
from profiles.schema import Train
from tasks import keys
from tasks.continual.series import Promoted
from tasks.steps.dataset import CORPUS, DatasetStep, read_file
from tasks.store import ledger
from tasks.store.artifacts import Artifact
from tasks.store.ledger import SHARDS, LedgerEntry
from tasks.store.run_folder import RunFolder
from tasks.store.store import Store
from tasks.tokenization.dataset_plan import TOKENS

Entry = dict[str, Any]  # a shard in corpus.json
GENERATED = "continual.replay_from"  # in place of the name of a run that was trained on the data
FORMAT = 2  # of a corpus.json with replay
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class History:
    """Streams of earlier data, and the shards of each as entries of corpus.json."""

    streams: tuple[HistoryStream, ...] = ()
    shards: tuple[tuple[Entry, ...], ...] = ()

    def __add__(self, other: History) -> History:
        """Both, without streams that the first one has already."""
        known = {(stream.identity, stream.source) for stream in self.streams}
        pairs = zip(other.streams, other.shards, strict=True)
        new = [pair for pair in pairs if (pair[0].identity, pair[0].source) not in known]
        streams = self.streams + tuple(stream for stream, _ in new)
        return History(streams, self.shards + tuple(shards for _, shards in new))

    def without_generated(self) -> History:
        """Without text that was sampled from earlier models."""
        pairs = zip(self.streams, self.shards, strict=True)
        kept = [pair for pair in pairs if pair[0].run != GENERATED]
        return History(tuple(stream for stream, _ in kept), tuple(shards for _, shards in kept))

    def drawn(self, replay: Replay, span: int | None) -> Iterator[tuple[HistoryStream, Entry]]:
        """The shards that a round reads, with their streams."""
        counts = replay.counts(replay.samples)
        for stream, shards, count in zip(replay.streams, self.shards, counts, strict=True):
            length = (stream.tokens - 1) // stream.windows
            order = WindowOrder(stream.windows, stream.seed, max(1, span // length) if span else None)
            starts = order.windows(np.arange(stream.begin, stream.begin + count)) * length
            ends = np.cumsum([shard["tokens"] for shard in shards])
            first = np.searchsorted(ends, starts, side="right")
            last = np.searchsorted(ends, starts + length, side="right")
            touched = np.zeros(len(shards) + 1, np.int64)
            np.add.at(touched, first, 1)
            np.add.at(touched, np.minimum(last, len(shards) - 1) + 1, -1)
            for number in np.flatnonzero(np.cumsum(touched[:-1])).tolist():
                yield stream, shards[number]


def history(store: Store, promoted: Promoted, new: Artifact, sequence_length: int) -> History:
    """What the promoted model and its ancestors were trained on, and how much of it their rounds replayed.

    Args:
        new: the round's new data, in whose order the history is read too.

    Raises:
        ProfileError: a dataset is not in the store any more.
    """
    span, found = read_file(store, new).get("span"), History()
    for entry in ledger.lineage(store, promoted.identity):
        contents = _contents(store, entry)
        own, replayed = _recorded(entry, contents, sequence_length)
        found = found + own
        if replayed is not None:
            known = _restarted(replayed, contents.get("span") != span, sequence_length)
            found = found + known.without_generated()
            if any(stream.run != GENERATED for stream in known.streams):  # they cover all ancestors
                return found
    return found


def of_dataset(identity: str, run: str, contents: dict[str, Any], sequence_length: int) -> History:
    """The streams of the data that a run trained on first, none of it replayed yet."""
    shards = contents["train"]
    parts = contents.get("blend") or [{"weight": None, "shards": len(shards)}]
    names = [source["name"] for source in contents.get("sources", ())]
    weighted = bool(contents.get("blend"))
    streams, found, first = [], [], 0
    for number, part in enumerate(parts):
        own = tuple(shards[first : first + part["shards"]])
        first += part["shards"]
        tokens = sum(shard["tokens"] for shard in own)
        windows = max(0, tokens - 1) // sequence_length
        if not windows or (weighted and not part["weight"]):  # nothing was drawn from it
            continue
        known = names[number] if number < len(names) else str(number)
        name = part.get("name", known) if weighted else ""  # in a round's dataset, sources are held-out sets
        # Of the run and not of train.seed, so that the order stays the same in all rounds and is not that of the first reading.
        seed = int(keys.digest({"replay": [identity, number]})[:15], 16)
        stream = HistoryStream(identity, run, name, part["weight"], len(own), tokens, windows, seed)
        streams.append(replace(stream, end=windows))
        found.append(own)
    return History(tuple(streams), tuple(found))


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
    if not share or not known.streams:
        return new
    contents = read_file(store, new)
    weights = [part["weight"] for part in contents.get("blend") or () if part["weight"]]
    replay = plan(weights or [1.0], known.streams, share, samples)
    entries = [shard for shards in known.shards for shard in shards]
    train = [*contents["train"], *entries]
    selected = {**contents, "format": FORMAT, "train": train, "replay": replay.to_json()}
    drawn = list(known.drawn(replay, contents.get("span")))
    restore(drawn)
    used = [*contents["train"], *(shard for _, shard in drawn)]
    summary = {**new.summary, "replay": share, "replayed_samples": sum(replay.counts(samples))}
    return publish(store, keys.new_data(selected), selected, used, summary, read_file(store, new, SHARDS))


def publish(
    store: Store,
    key: str,
    contents: Mapping[str, Any],
    used: Iterable[Entry],
    summary: Mapping[str, Any],
    shards: Any,
) -> Artifact:
    """Publish a dataset, unless the store has it.

    Args:
        contents: its corpus.json.
        used: training shards that it requires; it requires all of its held-out ones.
        shards: its shards.json, what the ledger records.
    """
    with store.artifacts.lock(DatasetStep.kind, key):
        if found := store.artifacts.find(DatasetStep.kind, key):
            return found
        tokens = sorted(tokens_of([*used, *contents["validation"]]))
        requires = [{"kind": TOKENS, "key": shard} for shard in tokens]
        with store.artifacts.publish(DatasetStep.kind, key, dict(summary), requires) as folder:
            (folder / CORPUS).write_text(json.dumps(contents))
            (folder / SHARDS).write_text(json.dumps(shards))
    return store.artifacts.expect(DatasetStep.kind, key)


def samples_read(run: RunFolder, train: Train) -> int:
    """Number of samples that a finished run has read, those of steps that were rolled back included.

    It differs from the number for which replay was planned if steps were rolled back, or if `train.steps` was changed.
    """
    marker = state_files.parse(run.read(f"{run_files.checkpoint(train.steps)}/{MARKER}") or b"") or {}
    left_out = [(int(start), int(end)) for start, end in marker.get("left_out", ())]
    return sample_number(train.steps * train.global_batch_size, left_out)


def share_of(store: Store, dataset: Artifact) -> float:
    """The share of a round's samples that are replayed."""
    return float(read_file(store, dataset).get("replay", {}).get("share", 0.0))


def tokens_of(entries: Iterable[Entry]) -> set[str]:
    """Keys of the tokenized shards that entries of corpus.json are in; Megatron pairs are elsewhere."""
    return {entry["path"].split("/")[1] for entry in entries if entry["path"].startswith(f"{TOKENS}/")}


def _contents(store: Store, entry: LedgerEntry) -> dict[str, Any]:
    try:
        contents: dict[str, Any] = read_file(store, Artifact(DatasetStep.kind, entry.dataset, "", {}))
    except FileNotFoundError as error:
        reason = (
            f"the dataset {entry.dataset} of run {entry.run} is not in the store any more, so it is unknown what it read; "
            "restore artifacts/dataset from a backup, or set continual.replay to 0"
        )
        raise ProfileError("continual.replay", None, reason) from error
    return contents


def _recorded(
    entry: LedgerEntry, contents: dict[str, Any], sequence_length: int
) -> tuple[History, History | None]:
    """What a run trained on first, and what it replayed; None if it replayed nothing."""
    if "replay" not in contents:
        return of_dataset(entry.identity, entry.run, contents, sequence_length), None
    replay = Replay.from_json(contents["replay"])
    sizes = [stream.shards for stream in replay.streams]
    first = len(contents["train"]) - sum(sizes)
    own = {**contents, "train": contents["train"][:first]}
    ends = (first + np.cumsum(sizes)).tolist()
    shards = [tuple(contents["train"][end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    known = History(replay.after(entry.samples or replay.samples), tuple(shards))
    return of_dataset(entry.identity, entry.run, own, sequence_length), known


def _restarted(known: History, reordered: bool, sequence_length: int) -> History:
    """A history whose current pass begins anew if its windows, or their order, have changed."""
    streams = known.streams
    windows = [max(0, stream.tokens - 1) // sequence_length for stream in streams]
    if not reordered and windows == [stream.windows for stream in streams]:
        return known
    log.info(
        "the history is replayed from its beginning: train.sequence_length or data.shuffle_tokens changed"
    )
    found = [
        (replace(stream, windows=count, begin=0, end=count), shards)
        for stream, shards, count in zip(streams, known.shards, windows, strict=True)
        if count
    ]
    return History(tuple(stream for stream, _ in found), tuple(shards for _, shards in found))
