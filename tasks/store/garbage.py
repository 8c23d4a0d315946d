"""Garbage of a store: what no run refers to.

A run refers to the artifacts that its steps used, in `artifacts.json`, and through their manifests to what those require. The
intermediate artifacts of an interrupted step are not referred to yet, so they are kept while a run lacks that step's artifact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modeling import run_files
from profiles import yaml_text
from profiles.errors import ProfileError
from profiles.state_files import CorruptedState, require_json
from tasks.store import activities
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.manifest import Corrupted, Manifest
from tasks.store.run_folder import REPLACED
from tasks.store.runs import files_by_run
from tasks.store.staging import abandoned_folders
from tasks.store.store import Store

# Kinds of intermediate artifacts, by the step that makes them.
PARTS = {"dataset": ("tokens", "hashes", "duplicates"), "graphs": ("graph",)}


@dataclass(frozen=True)
class Garbage:
    """Something that can be removed."""

    what: str  # replaced run, artifact, staging, scratch or quarantine
    name: str  # path in the store
    bytes: int


def find_garbage(store: Store) -> tuple[list[Garbage], list[str]]:
    """Garbage that no run refers to, and notes about unreferenced artifacts that are kept."""
    _require_linked_runs(store)
    runs = files_by_run(store)
    found = [
        Garbage("replaced run", f"runs/{name}", sum(files.values()))
        for name, files in runs.items()
        if REPLACED.search(name)
    ]
    current = {name: files for name, files in runs.items() if not REPLACED.search(name)}
    artifacts, notes = _unused_artifacts(store, current)
    found += artifacts
    found += [
        Garbage("staging", f"staging/{folder.name}", sum(store.files(f"staging/{folder.name}").values()))
        for folder in (abandoned_folders(store.work_dir / "staging") if store.has_work_dir else ())
    ]
    folders = {"quarantine": "quarantine"} | ({} if notes else {"work": "scratch"})
    for folder, what in folders.items():
        sizes: dict[str, int] = defaultdict(int)
        for file, size in store.files(folder).items():
            sizes[file.partition("/")[0]] += size
        found += [Garbage(what, f"{folder}/{name}", size) for name, size in sorted(sizes.items())]
    return found, notes


def _require_linked_runs(store: Store) -> None:
    """Raise ValueError for a run folder that is a link to a missing folder, such as on a disk not mounted."""
    for path in (store.work_dir / "runs").glob("*"):
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"{path} links to {path.readlink()}, which is missing: what the run uses is unknown"
            )


def remove(store: Store, garbage: Iterable[Garbage]) -> None:
    """Remove garbage. Raises ProfileError while a run is active: its new artifacts are still unreferenced."""
    with store.lock("gc") as lock:
        for run, process in activities.find_all(store):
            reason = f"run {run} is active in {process}; remove garbage once it has ended"
            raise ProfileError("--yes", None, reason)
        still = set(find_garbage(store)[0])
        for each in garbage:
            if each in still:
                lock.check()  # a run may have begun if this process was suspended
                store.remove(each.name)


def _unused_artifacts(store: Store, runs: Mapping[str, Mapping[str, int]]) -> tuple[list[Garbage], list[str]]:
    """Unreferenced artifacts, and notes about those kept for a run that is still making them."""
    used: set[tuple[str, str]] = set()
    kept: set[str] = {"forecast", "mixture"}  # records of predictions, a few kilobytes each
    notes = []
    for name in runs:
        record = _json(store, name, run_files.ARTIFACTS, list)
        used |= {(kind, key) for kind, found in record.items() for key in found}
        inputs = _json(store, name, run_files.INPUTS, str | None)
        used |= {(kind, key) for kind, key in inputs.items() if key}
        series = _json(store, name, run_files.STANDING)
        used |= {(kind, series[kind]) for kind in ("tokenizer", "dataset") if kind in series}
        for kind, parts in PARTS.items():
            if kind not in record and (kind != "graphs" or _compiles(store, name)):
                kept |= {*parts}
                notes.append(
                    f"run {name} has no {kind} yet: {', '.join(parts)} are kept; remove runs/{name} to collect them"
                )
    listed = store.artifacts.list_files()
    _add_required(store, used, listed)
    found = [
        Garbage("artifact", f"artifacts/{kind}/{key}", sum(files.values()))
        for (kind, key), files in sorted(listed.items())
        if (kind, key) not in used and kind not in kept
    ]
    return found, notes


def _add_required(
    store: Store, used: set[tuple[str, str]], listed: Mapping[tuple[str, str], Mapping[str, int]]
) -> None:
    """Add everything that these artifacts require, directly or indirectly."""
    waiting = list(used)
    while waiting:
        kind, key = waiting.pop()
        if MANIFEST not in listed.get((kind, key), ()):
            continue
        data = store.backend.read(f"artifacts/{kind}/{key}/{MANIFEST}")
        try:
            required = Manifest.from_bytes(data or b"", kind, key).requires
        except Corrupted as error:
            reason = "what it requires is unknown, so nothing is removed"
            raise ValueError(f"artifacts/{kind}/{key}: {error}; {reason}") from error
        waiting += [other for other in required if other not in used]
        used |= {*required}


def _json(store: Store, run: str, file: str, values: Any = object) -> dict[str, Any]:
    """The JSON object in a file of a run; empty if the file does not exist.

    Raises CorruptedState, also for values of other types.
    """
    data, location = store.run_folder(run).read(file), store.backend.location(f"runs/{run}/{file}")
    found = {} if data is None else require_json(data, location)
    if not all(isinstance(value, values) for value in found.values()):
        raise CorruptedState(
            f"{location}: corrupted (its values have other types); restore the file, or move the run away"
        )
    return found


def _compiles(store: Store, name: str) -> bool:
    """Whether a run has graphs. Raises CorruptedState."""
    try:
        profile = yaml_text.parse(store.run_folder(name).read(run_files.PROFILE) or b"") or {}
        return bool(profile.get("compile", {}).get("enabled", True))
    except (ValueError, AttributeError) as error:
        location = store.backend.location(f"runs/{name}/{run_files.PROFILE}")
        raise CorruptedState(f"{location}: corrupted; restore the file, or move the run away") from error
