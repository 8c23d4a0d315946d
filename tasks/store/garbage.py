"""Garbage of a store: artifacts no run refers to, replaced runs, abandoned and quarantined folders.

A run refers to the artifacts that its steps used, in `artifacts.json`, and through their manifests to what those require. The
intermediate artifacts of an interrupted step are not referred to yet, so they are kept while a run lacks that step's artifact.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from profiles.errors import ProfileError
from profiles.files import folders, run_files, state_files, yaml_text
from profiles.files.state_files import CorruptedState
from tasks.store import activities, ledger
from tasks.store.artifacts import ArtifactId
from tasks.store.backends.backend import NAME
from tasks.store.backends.folder import REMOVED
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.manifest import Corrupted, Manifest
from tasks.store.run_folder import REPLACED
from tasks.store.staging import abandoned_folders
from tasks.store.store import Store, read_each

# Kinds of intermediate artifacts, by the step that makes them.
PARTS = {"dataset": ("tokens", "hashes", "duplicates"), "graphs": ("graph",)}
ANCESTRAL = ("dataset", "tokens")  # kinds that a round uses of the runs that it descends from
FULL = {errno.ENOSPC, errno.EDQUOT}
CHECK_SECONDS = 1.0  # between checks that the lock is still held


@dataclass(frozen=True)
class Garbage:
    """Something that can be removed."""

    what: str  # replaced run, artifact, staging, scratch or quarantine
    name: str  # path in the store
    bytes: int


def find_garbage(store: Store) -> tuple[list[Garbage], list[str]]:
    """Garbage that no run refers to, and notes about unreferenced artifacts that are kept."""
    _require_linked_records(store)
    found = [
        Garbage("replaced run", f"runs/{name}", sum(store.files(f"runs/{name}").values()))
        for name in _runs(store)
        if REPLACED.search(name)
    ]
    kept, notes = _kept_artifacts(store)
    listed = store.artifacts.list_files()
    _add_required(store, kept.used, listed)
    found += [
        Garbage("artifact", f"artifacts/{id.kind}/{id.key}", sum(files.values()))
        for id, files in sorted(listed.items())
        if not kept.has(id)
    ]
    abandoned = abandoned_folders(store.work_dir / "staging") if store.has_work_dir else ()
    left = [f"staging/{folder.name}" for folder in abandoned]
    left += [f"runs/{name}" for name in store.backend.entries("runs") if name.startswith(f".{REMOVED}")]
    found += [Garbage("staging", name, sum(store.files(name).values())) for name in left]
    folders = {"quarantine": "quarantine"} | ({} if notes else {"work": "scratch"})
    for folder, what in folders.items():
        sizes: dict[str, int] = defaultdict(int)
        for file, size in store.files(folder).items():
            sizes[file.partition("/")[0]] += size
        found += [Garbage(what, f"{folder}/{name}", size) for name, size in sorted(sizes.items())]
    return found, notes


def _require_linked_records(store: Store) -> None:
    """Raise CorruptedState if runs or the ledger are a dangling link, as to a disk not mounted."""
    runs = store.work_dir / "runs"
    for path in (store.work_dir / "ledger", runs, *folders.matches(runs, "*")):
        if state_files.is_link(path) and not state_files.exists(path):
            reason = (
                f"links to {path.readlink()}, which is missing: what runs use is unknown; mount or restore it"
            )
            raise CorruptedState(f"{path}: {reason}")


def remove(store: Store, garbage: Sequence[Garbage]) -> None:
    """Remove garbage. Raises ProfileError while a run is active: its new artifacts are still unreferenced.

    New runs wait until all of it has its new name; a local store's files are deleted after that. On a full disk, which has no
    room for the lock either, garbage is removed without the lock until it has.
    """
    left = list(garbage)
    with ExitStack() as stack:
        while True:
            try:
                lock = stack.enter_context(store.lock("gc"))
                break
            except OSError as error:
                if error.errno not in FULL or not left:
                    raise
                _remove_without_lock(store, left.pop())
        still = _still_garbage(store, left)
        checked, aside = time.monotonic(), []
        for each in still:
            if time.monotonic() - checked > CHECK_SECONDS:
                lock.check()  # a run may have begun if this process was suspended
                checked = time.monotonic()
            aside += store.set_aside(each.name)
    _delete(aside)


def _remove_without_lock(store: Store, each: Garbage) -> None:
    """Remove garbage unless a run has begun.

    It is renamed first, so that a run that begins later does not find it.

    Raises ProfileError for an active run.
    """
    if not _still_garbage(store, [each]):
        return
    aside, is_garbage = store.set_aside(each.name), False
    try:
        is_garbage = bool(_still_garbage(store, [each]))
    finally:
        if not is_garbage:
            for folder in aside:
                folder.rename(store.work_dir / each.name)
    _delete(aside)


def _delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _still_garbage(store: Store, garbage: Sequence[Garbage]) -> list[Garbage]:
    """Garbage of those found earlier that no run has begun to use.

    Raises ProfileError while a run is active.

    Reads the runs' records only: listing all files again would keep new runs waiting.
    """
    for run, process in activities.find_all(store):
        reason = f"run {run} is active in {process}; remove garbage once it has ended"
        raise ProfileError("--yes", None, reason)
    kept, notes = _kept_artifacts(store)
    _add_required(store, kept.used)
    return [
        each
        for each in garbage
        if not (each.what == "artifact" and kept.has(ArtifactId(*each.name.split("/")[1:])))
        and not (notes and each.what == "scratch")
    ]


@dataclass(frozen=True)
class _Kept:
    """Artifacts that are not garbage."""

    used: set[ArtifactId]
    kinds: set[str]  # of which all are kept

    def has(self, id: ArtifactId) -> bool:
        return id in self.used or id.kind in self.kinds


def _runs(store: Store) -> list[str]:
    """Names of the store's runs, replaced ones too."""
    entries = store.backend.entries("runs")
    return sorted(
        name for name, entry in entries.items() if entry.is_folder and NAME.fullmatch(REPLACED.sub("", name))
    )


def _kept_artifacts(store: Store) -> tuple[_Kept, list[str]]:
    """What runs refer to, and notes about kinds kept for a run that is still making or may use them.

    Without what the artifacts require in turn.
    """
    used: set[ArtifactId] = set()
    kept: set[str] = {"forecast", "mixture", "share"}  # records of predictions, a few kilobytes each
    notes = []
    names = [name for name in _runs(store) if not REPLACED.search(name)]
    files = ((run_files.ARTIFACTS, list), (run_files.INPUTS, str | None), (run_files.PROMOTED, object))
    records = read_each(store, names, lambda name: [_json(store, name, *each) for each in files])
    # Read in threads: each entry names the next one, so that a lineage alone waits for one after the other.
    series_names = {name for name, (_, _, series) in zip(names, records, strict=True) if series}
    rounds = [
        inputs["identity"]
        for name, (_, inputs, _) in zip(names, records, strict=True)
        if name.partition("-round-")[0] in series_names and inputs.get("identity")
    ]
    known = dict(zip(rounds, read_each(store, rounds, partial(_entry, store)), strict=True))
    for name, (record, inputs, series) in zip(names, records, strict=True):
        if not (record or inputs or store.backend.entries(f"runs/{name}")):
            continue  # an empty folder
        used |= {ArtifactId(kind, key) for kind, found in record.items() for key in found}
        used |= {ArtifactId(kind, key) for kind, key in inputs.items() if key}
        used |= {ArtifactId(kind, series[kind]) for kind in ("tokenizer", "dataset") if kind in series}
        used |= {ArtifactId("dataset", key) for key in (series.get("held_out"),) if key}
        # Rounds replay runs that the series descends from, also if their folders are gone.
        try:
            for entry in ledger.lineage(store, series.get("identity"), known):
                used.add(ArtifactId("dataset", entry.dataset))
        except ledger.MissingEntry as error:  # the datasets of all earlier ancestors are unknown
            kept |= {*ANCESTRAL}
            advice = f"restore the entry, or remove runs/{name} to collect them"
            notes.append(
                f"run {name}: {error}: all artifacts of kind {', '.join(ANCESTRAL)} are kept; {advice}"
            )
        for kind, parts in PARTS.items():
            if kind not in record and (kind != "graphs" or _compiles(store, name)):
                kept |= {*parts}
                missing, listed = f"run {name} has no {kind} yet", ", ".join(parts)
                advice = f"remove runs/{name} to collect them"
                notes.append(f"{missing}: all artifacts of kind {listed} are kept; {advice}")
    return _Kept(used, kept), notes


def _entry(store: Store, identity: str) -> ledger.LedgerEntry | None:
    """A run's ledger entry; None if it cannot be read, which matters only if a series descends from it."""
    with suppress(CorruptedState, PermissionError):
        return ledger.find(store, identity)
    return None


def _add_required(
    store: Store, used: set[ArtifactId], listed: Mapping[ArtifactId, Mapping[str, int]] | None = None
) -> None:
    """Add everything that these artifacts require, directly or indirectly.

    Args:
        listed: all artifacts, which saves requests for manifests of those that do not exist.
    """
    waiting = used
    while waiting:
        there = [each for each in waiting if listed is None or MANIFEST in listed.get(each, ())]
        required = {other for found in read_each(store, there, partial(_required, store)) for other in found}
        waiting = required - used
        used |= waiting


def _required(store: Store, id: ArtifactId) -> Iterable[ArtifactId]:
    """What an artifact requires directly; nothing if it does not exist.

    Raises CorruptedState for a corrupted manifest.
    """
    data = store.backend.read(f"{id.path}/{MANIFEST}")
    if data is None:
        return ()
    try:
        return Manifest.from_bytes(data, id).requires
    except Corrupted as error:
        reason = (
            "what it requires is unknown, so nothing is removed; restore it, or run its run again, which makes it anew; "
            "if that run is gone, move this folder out of the store: later rounds cannot replay it"
        )
        raise CorruptedState(f"{id.path}: {error}; {reason}") from error


def _json(store: Store, run: str, file: str, values: Any = object) -> dict[str, Any]:
    """The JSON object in a file of a run; empty if the file does not exist.

    Raises CorruptedState, also for values of other types.
    """
    folder, location = store.run_folder(run), store.backend.location(f"runs/{run}/{file}")
    found = folder.require_json(file)
    if found is None and state_files.is_link(folder.path / file):  # perhaps to a disk that is not mounted
        raise CorruptedState(
            f"{location}: is a link to nothing; restore what it links to, or move the run away"
        )
    found = found or {}
    keys = (key for value in found.values() for key in value) if values is list else ()
    if not all(isinstance(value, values) for value in found.values()) or not all(
        isinstance(key, str) for key in keys
    ):
        raise CorruptedState(
            f"{location}: corrupted (its values have other types); restore the file, or move the run away"
        )
    return found


def _compiles(store: Store, name: str) -> bool:
    """Whether a run has graphs. Raises CorruptedState."""
    try:
        profile = yaml_text.parse_sections(store.run_folder(name).read(run_files.PROFILE) or b"", ["compile"])
        return bool(profile.get("compile", {}).get("enabled", True))
    except (ValueError, AttributeError) as error:
        location = store.backend.location(f"runs/{name}/{run_files.PROFILE}")
        raise CorruptedState(f"{location}: corrupted; restore the file, or move the run away") from error
