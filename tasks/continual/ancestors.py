"""Runs that the first run of a series descends from, whose data rounds replay and hold out.

The first run may be a fork, or have started from the export of a run of the same store (`init.from: run:NAME`). What other
initial weights were trained on is unknown. An ancestor whose dataset was removed, or has samples of another kind, is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from profiles.schema import Data
from profiles.sections.objective import OBJECTIVES
from tasks.continual.held_out import HeldOut, held_out_by_hash
from tasks.steps.dataset import DatasetStep, read_file
from tasks.store import ledger, runs
from tasks.store.artifacts import Artifact
from tasks.store.ledger import LedgerEntry
from tasks.store.store import Store

Sections = Mapping[str, Any]  # of a run's profile.yaml


@dataclass(frozen=True)
class Ancestor:
    """A run up to the first one, its dataset's corpus.json and its profile; empty if they are gone."""

    entry: LedgerEntry
    contents: dict[str, Any]
    profile: Sections

    @classmethod
    def of(cls, store: Store, entry: LedgerEntry) -> Ancestor:
        try:
            contents = read_file(store, Artifact(DatasetStep.id(entry.dataset)))
        except FileNotFoundError:
            contents = {}
        folder = runs.find_folder(store, entry.run, entry.identity)
        return cls(entry, contents, folder.sections() if folder else {})

    @property
    def initial_weights(self) -> str | None:
        """Initial weights of a run without a known parent, its own name if nothing says; None from scratch."""
        if self.entry.weights is not None:
            return self.entry.weights or None
        try:
            weights: str | None = self.profile["init"]["from"]
        except (LookupError, TypeError):
            return self.entry.run
        return weights

    def has_samples_for(self, first: Ancestor) -> bool:
        """Whether rounds of a series with this first run can read the run's samples too."""
        if not self.contents or not first.contents:
            return False
        if not self.has_records and not first.has_records:
            return True
        ours = _records(self.profile)
        return self.has_records and first.has_records and ours is not None and ours == _records(first.profile)

    @property
    def has_records(self) -> bool:
        """Whether it was trained on records, not on texts."""
        return bool(self.contents.get("records"))

    def held_out(self, known: HeldOut, fraction: float | None) -> HeldOut:
        """The sets that it held out, named `run:NAME/SOURCE`, without text of the known sets.

        Args:
            fraction: `data.validation_fraction` of the series.
        """
        try:
            data = Data(**self.profile["data"])
            # By another fraction, the series holds out other documents, so that contents have to be compared.
            by_hash = held_out_by_hash(data) if data.validation_fraction == fraction else set()
        except (ValueError, LookupError, TypeError):
            by_hash = set()
        return HeldOut.of_ancestor(self.entry.run, self.contents, by_hash, known)


@dataclass(frozen=True)
class Ancestors:
    """The runs that a series' promoted model descends from, the latest first.

    Attributes:
        series: ledger entries of the promoted model and the rounds before it, and of the first run.
        known: those before the first run whose data rounds can read.
        unknown: initial weights, or name of a run, whose data is unknown or cannot be read; None if there are none.
        fraction: `data.validation_fraction` of the first run; None if its profile is gone.
        left_out: names of those with records, which rounds cannot read.
    """

    series: tuple[LedgerEntry, ...]
    known: tuple[Ancestor, ...]
    unknown: str | None
    fraction: float | None
    left_out: tuple[str, ...]

    def held_out(self, known: HeldOut) -> HeldOut:
        """The sets that they held out, without text of the known sets."""
        found = HeldOut()
        for run in self.known:
            found += run.held_out(known + found, self.fraction)
        return found


def find(store: Store, identity: str, dataset: str) -> Ancestors:
    """What the promoted model of a series descends from.

    Args:
        identity: of the promoted model.
        dataset: key of the first run's dataset.
    """
    entries = list(ledger.lineage(store, identity))
    number = next((k for k, entry in enumerate(entries) if entry.dataset == dataset), len(entries) - 1)
    first, *above = (Ancestor.of(store, entry) for entry in entries[number:])
    readable = [run for run in above if run.has_samples_for(first)]
    # What the promoted round replays has its shards, even if the dataset is gone.
    contents = Ancestor.of(store, entries[0]).contents if number else {}
    replayed = {stream["identity"] for stream in contents.get("replay", {}).get("streams", ())}
    known = {run.entry.identity for run in readable} | replayed
    missing = next((run.entry.run for run in above if run.entry.identity not in known), None)
    # Only the last one may have initial weights of no run in the ledger.
    unknown = missing or [first, *above][-1].initial_weights
    fraction = first.profile.get("data", {}).get("validation_fraction")
    left_out = tuple(run.entry.run for run in above if run.has_records and run.entry.identity not in known)
    return Ancestors(tuple(entries[: number + 1]), tuple(readable), unknown, fraction, left_out)


def _records(profile: Sections) -> tuple[Any, ...] | None:
    """What the records of two runs must have in common for a round to read both; None if it is unknown."""
    try:
        objective = profile["objective"]
        packing = objective["packing"]
        packs = OBJECTIVES[objective["kind"]].packs if packing is None else packing
        return objective["kind"], packs, profile["train"]["sequence_length"]
    except (LookupError, TypeError):
        return None
