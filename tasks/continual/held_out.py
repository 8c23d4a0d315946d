"""Held-out sets of a series: text that no round trains on, by origin (such as round 1) and source.

A document is held out by its own hash (`data.validation_fraction`), which stays that of the first run: then it is held out in
whichever file a later round lists it. Sources for which another rule decides, such as Megatron pairs, are compared by content.
The sets are the `validation` split of a round's dataset, whose sources are named ORIGIN/SOURCE.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np

from modeling.data.indexed import map_index, map_tokens, read_header
from profiles.errors import ProfileError, counted
from profiles.local_paths import RUN
from profiles.rules import data_sources
from profiles.schema import Data, Profile
from tasks.sources.shard import local_path
from tasks.store.artifacts import ArtifactId
from tasks.store.store import Store

FIRST, STAND_IN = "first", "stand-in"  # origins, besides round-N and run:NAME
OTHERS = "others"  # name for sources that are too short for a set of their own
# Kinds of sources whose documents are held out by the hash of their text.
BY_HASH = ("python-docs", "files", "hub")
Entry = dict[str, Any]  # a shard in corpus.json
log = logging.getLogger(__name__)


def origin_of(name: str) -> str:
    """The origin of a set: first, round-N, stand-in or run:NAME."""
    return name.partition("/")[0]


def source_of(name: str) -> str:
    """The source of a set; "" for several that are too short."""
    source = name.partition("/")[2]
    return "" if source == OTHERS else source


def round_origin(number: int) -> str:
    """Origin of the sets that a round holds out."""
    return f"round-{number}"


@dataclass(frozen=True)
class HeldOut:
    """Held-out shards: entries of corpus.json, and the sets that divide them in order."""

    entries: Sequence[Entry] = ()
    sets: Sequence[Mapping[str, Any]] = ()  # name, shards, by_hash

    @classmethod
    def of(cls, contents: Mapping[str, Any]) -> HeldOut:
        """The sets of a round's dataset, from its corpus.json."""
        return cls(contents["validation"], contents["sources"])

    @classmethod
    def from_sources(
        cls,
        origin: str,
        contents: Mapping[str, Any],
        by_hash: Collection[str],
        selected: Sequence[bool] | None = None,
    ) -> HeldOut:
        """The sets of an origin: one per source, and one for those that have less than a window.

        Args:
            contents: corpus.json of a dataset with all shards of the sources.
            by_hash: names of the sources that hold out documents by their hash.
            selected: whether each shard belongs to the origin; None: all do.
        """
        length = contents["sequence_length"]
        # Datasets of early versions do not list sources.
        sources = contents.get("sources") or [{"name": "data", "shards": len(contents["validation"])}]
        pairs = zip(contents["validation"], selected or [True] * len(contents["validation"]), strict=True)
        large, small = cls(), cls()
        for source in sources:
            found = [entry for entry, chosen in islice(pairs, source["shards"]) if chosen and entry["tokens"]]
            held_by_hash = source["name"] in by_hash
            if source["name"] != OTHERS and sum(entry["tokens"] for entry in found) > length:
                large += cls._set(f"{origin}/{source['name']}", found, by_hash=held_by_hash)
            elif found:
                small += cls._set("", found, by_hash=held_by_hash)
        if small.entries:
            every = all(each["by_hash"] for each in small.sets)
            large += cls._set(f"{origin}/{OTHERS}", small.entries, by_hash=every)
        return large

    @classmethod
    def of_ancestor(
        cls, run: str, contents: Mapping[str, Any], by_hash: Collection[str], known: HeldOut
    ) -> HeldOut:
        """The sets of a run that the first run descends from, by source, without entries of known sets.

        Args:
            contents: corpus.json of its dataset; if it is a round's, its series' earlier sets are in it too.
            by_hash: names of the sources that hold out documents by their hash, as the series does.
        """
        places, taken = {place(entry) for entry in known.entries}, {*map(origin_of, known.names)}
        # Several runs may have had the name.
        origins = (f"{RUN}{run}{number}" for number in chain([""], (f"~{n}" for n in count(1))))
        origin = next(name for name in origins if name not in taken)
        if any("by_hash" in source for source in contents.get("sources", ())):  # are held-out sets
            parts: dict[str, list[Entry]] = defaultdict(list)
            entries = iter(contents["validation"])
            for each in contents["sources"]:
                name = source_of(each["name"]) or OTHERS
                parts[name] += islice(entries, each["shards"])
                if not each["by_hash"]:
                    by_hash = {*by_hash} - {name}
            sources = [{"name": name, "shards": len(found)} for name, found in parts.items()]
            contents = {**contents, "validation": [*chain(*parts.values())], "sources": sources}
        new = [place(entry) not in places for entry in contents["validation"]]
        return cls.from_sources(origin, contents, by_hash, new)

    @classmethod
    def _set(cls, name: str, entries: Sequence[Entry], *, by_hash: bool) -> HeldOut:
        return cls(entries, [{"name": name, "shards": len(entries), "by_hash": by_hash}])

    def __add__(self, other: HeldOut) -> HeldOut:
        return HeldOut([*self.entries, *other.entries], [*self.sets, *other.sets])

    @property
    def names(self) -> list[str]:
        """Names of all sets."""
        return [each["name"] for each in self.sets]

    def tokens(self, origin: str = "") -> int:
        """Number of tokens, of one origin or all."""
        return sum(tokens for name, tokens in self._tokens().items() if origin in ("", origin_of(name)))

    def evaluated(self, sequence_length: int) -> list[str]:
        """Names of the sets that have at least one window; logs the others."""
        found = {name: tokens > sequence_length for name, tokens in self._tokens().items()}
        if short := [name for name, enough in found.items() if not enough]:
            log.info("held-out sets that are shorter than a window, and not evaluated: %s", ", ".join(short))
        return [name for name, enough in found.items() if enough]

    def _tokens(self) -> dict[str, int]:
        entries = iter(self.entries)
        return {
            each["name"]: sum(entry["tokens"] for entry in islice(entries, each["shards"]))
            for each in self.sets
        }


def place(entry: Entry) -> tuple[str, int]:
    """What a shard's entry is told from others by."""
    return entry["path"], entry.get("start", 0)


def held_out_by_hash(data: Data) -> set[str]:
    """Names of the sources whose documents are held out by the hash of their text."""
    pairs = zip(data_sources.names(data), data.sources, strict=True)
    return {name for name, source in pairs if source.kind in BY_HASH and source.use == "split"}


def by_hash_of_run(store: Store, run: str) -> set[str]:
    """`held_out_by_hash` of a run; none if its profile cannot be read, so that contents are compared."""
    try:
        return held_out_by_hash(Data(**store.run_folder(run).sections()["data"]))
    except (ValueError, LookupError, TypeError):
        return set()


def expected_sets(data: Data, origin: str) -> list[str]:
    """Names of the sets that new data of some sources may have, or the stand-in sources."""
    pairs = zip(data_sources.names(data), data.sources, strict=True)
    uses = {"split"} if data.validation_fraction else set()
    if origin == STAND_IN:  # of a round, they would hold out what is not new
        uses.add("validation")
    return [f"{origin}/{name}" for name, source in pairs if source.use in uses]


def check_fraction(store: Store, profile: Profile) -> None:
    """Reject another `data.validation_fraction` than that of the series' first run. Raises ProfileError."""
    try:
        fraction = store.run_folder(profile.name).sections()["data"]["validation_fraction"]
    except (LookupError, TypeError):  # corrupted, and reported when the run is loaded
        return
    if fraction != profile.data.validation_fraction:
        reason = (
            f"the series {profile.name} holds out {fraction:g} of its documents; with another fraction, a round would train on "
            "some of those"
        )
        raise ProfileError("data.validation_fraction", profile.data.validation_fraction, reason, [fraction])


def check_disjoint(store: Store, contents: Mapping[str, Any], new_by_hash: bool) -> None:
    """Reject a round that would train on held-out documents. Raises ProfileError.

    Args:
        contents: corpus.json of the round's dataset.
        new_by_hash: whether all new documents are held out by their hash; with sets of the same kind, none can be in both.
    """
    if new_by_hash and all(each.get("by_hash") for each in contents["sources"]):
        return
    held_out = {digest for entry in contents["validation"] for digest in _documents(store, contents, entry)}
    for entry in contents["train"]:
        if count := sum(digest in held_out for digest in _documents(store, contents, entry)):
            listed = f"{entry['path']} lists {counted(count, 'document')} that the series holds out"
            raise ProfileError("data.sources", None, f"{listed}; remove them from the new data")


def _documents(store: Store, contents: Mapping[str, Any], entry: Entry) -> Iterator[bytes]:
    """Digest of the tokens of each document of a shard, without its EOS; not of empty documents."""
    prefix = _prefix(store, entry)
    if prefix is None:
        return
    header = read_header(prefix)
    index, tokens = map_index(prefix, header), map_tokens(prefix, header.dtype)
    starts = index.pointers[index.document_indices[:-1]] // header.dtype.itemsize
    ends = np.append(starts[1:], len(tokens))
    first, last = entry.get("start", 0), entry.get("start", 0) + entry["tokens"]
    inside = (starts >= first) & (starts < last)
    for start, end in zip(starts[inside].tolist(), ends[inside].tolist(), strict=True):
        document = np.asarray(tokens[start:end], "<i8")
        if len(document) and document[-1] == contents["eos"]:
            document = document[:-1]
        if len(document):
            yield hashlib.blake2b(document.tobytes(), digest_size=16).digest()


def shard_path(store: Store, entry: Entry) -> Path:
    """A tokenized shard's files on this machine, downloaded from the store."""
    tokens, _, split = str(entry["path"]).rpartition("/")
    return store.artifacts.path(store.artifacts.expect(ArtifactId.parse(tokens))) / split


def _prefix(store: Store, entry: Entry) -> Path | None:
    """A shard's files on this machine; None for a remote Megatron pair."""
    if entry["path"].startswith("tokens/"):
        return shard_path(store, entry)
    local = local_path(entry["path"])
    if local is None:
        log.warning(
            "%s: is not on this machine, so its documents are not compared with held-out ones", entry["path"]
        )
    return local
