"""A run's mutable folder, `<store>/runs/<run>/`: lock, profile, checkpoints, metrics, logs, report.

The folder is local. If the store is remote, checkpoints are written there directly, and RunSync uploads the rest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from parallel.checkpoint import locations
from profiles.errors import ProfileError
from profiles.files import run_files, state_files, yaml_text
from profiles.files.file_locks import locked
from profiles.files.state_files import make_folder, retried
from tasks.store.backends.backend import Backend, checked_name
from tasks.store.backends.folder import FolderBackend
from tasks.store.backends.objects import ObjectBackend
from tasks.store.manifest import Manifest
from tasks.store.staging import staging_folder
from tasks.store.sync import DIRECT, RunSync, attempt_in, is_append_only, is_excluded

log = logging.getLogger(__name__)

COMPLETE = re.compile(rf"{run_files.CHECKPOINTS}/{locations.STEP.pattern}/{locations.MARKER}")
REPLACED = re.compile(r"~\d+$")  # ends the name of a run that was replaced by another
TRACES = (run_files.CHECKPOINTS, run_files.METRICS)  # by which a run's folder is recognised without run.json
# Local file with the attempt that the folder was downloaded with; no training has run in the folder since, if that is still its
# attempt.
DOWNLOADED = ".downloaded"


@dataclass(frozen=True)
class Parent:
    """The run, and the step of its checkpoint, that another run was forked from."""

    run: str
    identity: str
    step: int


@dataclass(frozen=True)
class CheckpointId:
    """A complete checkpoint of a run."""

    step: int
    digest: str  # of its marker, which differs if a rolled-back run writes the step again

    @classmethod
    def of(cls, run: RunFolder, step: int) -> CheckpointId | None:
        """The checkpoint of this step; None if it is not complete, or was removed meanwhile."""
        marker = run.read(f"{run_files.checkpoint(step)}/{locations.MARKER}")
        return None if marker is None else cls(step, hashlib.sha256(marker).hexdigest())


class RunFolder:
    """One run of a store, which need not exist yet."""

    def __init__(self, name: str, local: FolderBackend, remote: ObjectBackend | None) -> None:
        self.name = name
        checked_name(REPLACED.sub("", name))
        self.path = local.path(f"runs/{name}")
        self._prefix = f"runs/{name}"
        self._local, self._remote = local, remote
        self._primary: Backend = remote or local

    @property
    def identity(self) -> str | None:
        """Identity of the run in the local folder; None if the folder is not a run.

        Raises:
            CorruptedState: run.json is corrupted.
            OSError: run.json cannot be read.
        """
        return self._read_identity(self._local).get("identity")

    @property
    def stored_identity(self) -> str | None:
        """Identity of the run in the store; None if the store has no such run. Raises as `identity`."""
        return self._read_identity(self._primary).get("identity")

    @property
    def owner(self) -> dict[str, Any]:
        """What markers of the run's checkpoints record of it; empty if the store has no such run."""
        return run_files.owner(self._read_identity(self._primary))

    @property
    def parent(self) -> Parent | None:
        """The run that this one was forked from; None if it was not."""
        parent = self._read_identity(self._primary).get("parent")
        return Parent(**parent) if parent else None

    def prepare(self, identity: str, parent: Parent | None = None) -> Path:
        """The run's local folder; created, or downloaded from the remote store, if this machine has none.

        Files that another machine has added to the run are downloaded, too. A local copy of another run of that name is moved to
        `<name>~N`. Raises ProfileError for a folder with a run's files but without run.json.
        """
        with self._local_copy_locked():
            return self._prepare(identity, parent)

    def move_aside(self) -> str:
        """Rename the run to the first free `<name>~N`, in the store and locally; returns that name."""
        name = self._free_name()
        if self._local.exists(self._prefix):
            self._local.move(self._prefix, f"runs/{name}")
        if self._remote:
            # First, so that a job of the run that still trains elsewhere completes no checkpoint in the meantime.
            self._remote.remove(f"{self._prefix}/{run_files.CHECKPOINTS}/{locations.OWNER}")
            self._remote.move(self._prefix, f"runs/{name}")
        return name

    def read(self, file: str) -> bytes | None:
        """Contents of one of the run's small files in the store; None if it does not exist."""
        return self._primary.read(f"{self._prefix}/{file}")

    def read_json(self, file: str) -> dict[str, Any]:
        """The JSON object in one of the run's small files; empty if it does not exist or is corrupted."""
        return state_files.parse(self.read(file) or b"") or {}

    def require_json(self, file: str) -> dict[str, Any] | None:
        """As `read_json`; None if the file does not exist. Raises CorruptedState."""
        data, location = self.read(file), self._primary.location(f"{self._prefix}/{file}")
        return None if data is None else state_files.require_json(data, location)

    def sections(self) -> dict[str, Any]:
        """The sections of the run's profile.yaml in the store; empty if it does not exist or is corrupted."""
        try:
            found = yaml_text.parse(self.read(run_files.PROFILE) or b"")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, file: str, data: bytes) -> None:
        """Write a small file of the run in the store, then in the local folder."""
        for backend in (self._remote, self._local):
            if backend:
                backend.write(f"{self._prefix}/{file}", data)

    @property
    def checkpoints_location(self) -> Path | str:
        """Where training writes checkpoints: a path, or a URI if the store is remote."""
        if self._remote:
            return self._remote.location(f"{self._prefix}/{run_files.CHECKPOINTS}")
        return self.path / run_files.CHECKPOINTS

    def checkpoint_steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        return checkpoint_steps(
            f"{run_files.CHECKPOINTS}/{file}" for file in self.files(run_files.CHECKPOINTS)
        )

    def is_remote(self, part: str) -> bool:
        """Whether a part of the run exists in the remote store only."""
        return self._remote is not None and part.startswith(f"{run_files.CHECKPOINTS}/")

    def files(self, part: str) -> dict[str, int]:
        """Sizes in bytes of the files of a part of the run in the store, by their paths relative to it."""
        return self._primary.files(f"{self._prefix}/{part}")

    def location(self, part: str) -> str:
        """Path or URI of a part of the run."""
        backend = self._primary if self.is_remote(part) else self._local
        return backend.location(f"{self._prefix}/{part}")

    @contextmanager
    def local_checkpoint(self, part: str, *, keep_on_error: bool = False) -> Iterator[Path]:
        """Local folder of a complete checkpoint during the block, downloaded if the store is remote.

        The download is a scratch folder, named after the digest of the marker: a checkpoint that is written again is downloaded
        again. Processes share it, and the last one removes it.

        Args:
            part: the checkpoint's path in the run folder.
            keep_on_error: keep the download if the block raises, for a job that may still be running.

        Raises:
            FileNotFoundError: the checkpoint is not complete, or was removed.
            OSError: it cannot be read, or was replaced while it was downloaded.
        """
        if not (remote := self._remote):
            yield self.path / part
            return
        marker = self.read(f"{part}/{locations.MARKER}")
        if marker is None:
            reason = "is not a complete checkpoint; choose another one"
            raise FileNotFoundError(f"{self.location(part)}: {reason}")
        scratch = f"work/checkpoint-{hashlib.sha256(marker).hexdigest()[:16]}"
        copy = f"{scratch}/{Path(part).name}"
        lock = self._local.path(f"{scratch}/lock")
        retried(lambda: make_folder(lock.parent))
        keep = keep_on_error
        try:
            with self._downloaded(remote, part, marker, copy, lock):
                yield self._local.path(copy)
            keep = False
        finally:
            if not keep:
                with suppress(BlockingIOError), locked(lock, wait=False, required=False) as held:
                    if held:  # otherwise another process may read it; `trainshed gc` removes it
                        self._local.remove(copy)

    def copy_checkpoint(self, part: str, target: RunFolder, into: str) -> None:
        """Copy a complete checkpoint to a part of a run of the store, its marker last.

        Raises FileNotFoundError if the checkpoint does not exist, is not complete, or is removed meanwhile.
        """
        if self._remote:
            self._remote.copy(f"{self._prefix}/{part}", f"{target._prefix}/{into}", last=locations.MARKER)
        else:
            source, copy = self.path / part, target.path / into
            state_files.remove(copy)
            copy.mkdir(parents=True)
            names = sorted(path.name for path in source.iterdir() if path.name != locations.MARKER)
            for name in [*names, locations.MARKER]:
                _link(source / name, copy / name)

    def restore(self, part: str) -> None:
        """Download a part of the run that only the remote store has."""
        if self._remote and not self._local.exists(f"{self._prefix}/{part}"):
            self._fetch(self._remote, part, self.files(part))

    def download(self, part: str, manifest: Manifest) -> None:
        """Replace a part of the local folder by its files in the remote store.

        Raises:
            Corrupted, FileNotFoundError: the store's files are not those of the manifest; the local ones are kept.
        """
        if self._remote:
            files, name = {file.name: file for file in manifest.files}, f"{self._prefix}/{part}"
            manifest.verify_sizes(self.files(part))
            with self._staging() as folder:
                self._remote.download(name, list(files), folder, lambda file: files[file].verify(folder))
                self._local.remove(name)
                self._local.move(str(folder), name)

    def quarantine_checkpoint(self, part: str, reason: str) -> None:
        """Move a corrupted checkpoint to training's quarantine.

        While it is there, training does not silently start from scratch. The caller holds the lock of the checkpoint's artifact.
        """
        moved = locations.quarantine(self.checkpoints_location, int(part.rpartition("_")[2]), reason)
        log.warning("run %s: %s; moved to %s", self.name, reason, moved)

    def sync(self, part: str = "") -> RunSync:
        """The upload of this folder, or a part of it, to the remote store; does nothing if the store is local."""
        return RunSync(self.path / part, self._remote, f"{self._prefix}/{part}".rstrip("/"))

    def _read_identity(self, backend: Backend) -> dict[str, Any]:
        """Contents of run.json, which have an identity; empty if it does not exist."""
        name = f"{self._prefix}/{run_files.IDENTITY}"
        data = backend.read(name)
        if data is None:
            return {}
        found = state_files.require_json(data, backend.location(name))
        if "identity" not in found:
            reason = "restore the file, or move its folder away to start the run from the beginning"
            raise state_files.CorruptedState(f"{backend.location(name)}: corrupted (no identity); {reason}")
        return found

    def _prepare(self, identity: str, parent: Parent | None) -> Path:
        record = self._read_identity(self._local)
        local = record.get("identity")
        traces = (name for name in TRACES if self._local.exists(f"{self._prefix}/{name}"))
        if local is None and (found := next(traces, None)):
            reason = f"{self.path} has {found} but no {run_files.IDENTITY}; restore that file, or move the folder away"
            raise ProfileError("name", self.name, reason)
        stored = self._read_identity(self._remote) if self._remote else {}
        is_stored = stored.get("identity") == identity
        if local not in (None, identity) or (is_stored and run_files.is_other_run(stored, record)):
            name = self._free_name()
            self._local.move(self._prefix, f"runs/{name}")
            log.warning("run %s: moved this machine's copy of another run to %s", self.name, name)
        if self._remote and is_stored:
            self._restore(self._remote)
        retried(lambda: make_folder(self.path))
        if not self._local.exists(f"{self._prefix}/{run_files.IDENTITY}"):
            # The id differs from that of a replaced run, whose schedule may differ, but not its identity.
            contents: dict[str, Any] = {"identity": identity, "id": uuid4().hex}
            contents |= {"parent": asdict(parent)} if parent else {}
            self.write(run_files.IDENTITY, json.dumps(contents, indent=1).encode())
        return self.path

    @contextmanager
    def _local_copy_locked(self) -> Iterator[None]:
        """Keep other processes of this machine from preparing the run, if the store is remote.

        Not all of them hold the run's lock: an evaluation opens a run that another process starts.
        """
        if not self._remote:
            yield
            return
        lock = self._local.path(f"locks/prepare-{self.name}")
        retried(lambda: make_folder(lock.parent))
        with locked(lock, required=False):
            yield

    def _restore(self, remote: ObjectBackend) -> None:
        """Download the run, which the remote store has, if this machine has none or an earlier attempt.

        If both have the same attempt, download what is missing or out of date here.
        """
        # The store before the local folder: a job that runs here writes to this folder first, and must not make it seem outdated.
        stored = attempt_in(remote, self._prefix)
        here = self._local_attempt()
        if here > stored:
            return
        sizes = {file: size for file, size in remote.files(self._prefix).items() if not is_excluded(file)}
        if here < stored:
            # Training does not hold the lock, and may begin an attempt during the download.
            if not self._fetch(remote, "", sizes, is_needed=lambda: self._local_attempt() < stored):
                return
            attempt = attempt_in(self._local, self._prefix)
            self._local.write(f"{self._prefix}/{DOWNLOADED}", str(attempt).encode())
            log.info("run %s: downloaded from %s to resume here", self.name, remote.location(self._prefix))
        else:
            self._update(remote, sizes, here)

    def _local_attempt(self) -> int:
        """Number of the local copy's training attempt; -1 if this machine has no copy."""
        return -1 if self.identity is None else attempt_in(self._local, self._prefix)

    def _update(self, remote: ObjectBackend, sizes: Mapping[str, int], attempt: int) -> None:
        """Download files that are missing or out of date in the local folder, whose attempt is the store's.

        If training ran in this folder, its rows and logs are the latest, and it may still write to them: they are not replaced.
        Otherwise, the longer copy is the later one. Results of jobs in logs/ are removed once they have been used, and an export
        is downloaded only where it is used (`run_artifacts.refresh`).
        """
        here = self._local.files(self._prefix)
        is_copy = self._local.read(f"{self._prefix}/{DOWNLOADED}") == str(attempt).encode()

        def is_outdated(file: str) -> bool:
            if file == run_files.RESUMED:
                name = f"{self._prefix}/{file}"  # may have been removed here so that the request is applied again
                return is_copy and self._local.read(name) != remote.read(name)
            if file in here:
                return is_append_only(file) and (is_copy or file in DIRECT) and sizes[file] > here[file]
            return is_append_only(file) or not file.startswith((f"{run_files.LOGS}/", f"{run_files.EXPORT}/"))

        names = list(filter(is_outdated, sizes))
        if not names:
            return
        with self._staging() as folder:
            self._download(remote, self._prefix, {name: sizes[name] for name in names}, folder)
            if self._local_attempt() != attempt:  # training has begun another one here
                return
            for name in names:
                target = self._local.path(f"{self._prefix}/{name}")
                retried(partial(state_files.make_folder, target.parent))
                retried(partial(os.replace, folder / name, target))
        log.info("run %s: updated from %s", self.name, remote.location(self._prefix))

    @contextmanager
    def _downloaded(
        self, remote: ObjectBackend, part: str, marker: bytes, copy: str, lock: Path
    ) -> Iterator[None]:
        """Hold a checkpoint's local copy, downloaded if needed, so that no other process removes it."""
        while True:
            with locked(lock, shared=True, required=False):
                if self._local.read(f"{copy}/{locations.MARKER}") == marker:
                    yield
                    return
            with locked(lock, required=False):
                if self._local.read(f"{copy}/{locations.MARKER}") != marker:
                    self._local.remove(copy)
                    self._fetch(remote, part, self.files(part), copy)
                if self._local.read(f"{copy}/{locations.MARKER}") != marker:
                    reason = "was replaced while it was downloaded; try again"
                    raise OSError(errno.ESTALE, reason, self.location(part))

    def _fetch(
        self,
        remote: ObjectBackend,
        part: str,
        sizes: Mapping[str, int],
        target: str | None = None,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Download files of a part of the run, which appears here, or as `target`, complete or not at all.

        Returns `is_needed()`, called after the download, which is discarded if that is False.
        """
        name = f"{self._prefix}/{part}".rstrip("/")
        target = target or name
        with self._staging() as folder:
            self._download(remote, name, sizes, folder)
            if not is_needed():
                return False
            # Keep local files that the store lacks, such as those of an interrupted start.
            for file in self._local.files(target).keys() - sizes.keys():
                state_files.make_folder((folder / file).parent)
                _link(self._local.path(f"{target}/{file}"), folder / file)
            self._local.remove(target)
            self._local.move(str(folder), target)
        return True

    def _staging(self) -> AbstractContextManager[Path]:
        return staging_folder(self._local.path("staging"), f"run-{self.name}")

    def _download(self, remote: ObjectBackend, name: str, sizes: Mapping[str, int], folder: Path) -> None:
        """Download files below `name` into a folder. Raises OSError if one is shorter than listed."""

        def check(file: str) -> None:
            if (size := (folder / file).stat().st_size) < sizes[file]:
                reason = f"only {size} of {sizes[file]} bytes were downloaded"
                raise OSError(errno.EIO, reason, remote.location(f"{name}/{file}"))

        remote.download(name, list(sizes), folder, check)

    def _free_name(self) -> str:
        """The first `<name>~N` that neither the store nor this machine has."""
        names = (f"{self.name}~{number}" for number in count(1))
        return next(
            name
            for name in names
            if not self._local.exists(f"runs/{name}")
            and self._primary.read(f"runs/{name}/{run_files.IDENTITY}") is None
        )


def checkpoint_steps(files: Iterable[str]) -> list[int]:
    """Steps of the complete checkpoints among a run's files, in ascending order."""
    return sorted(int(match[1]) for match in map(COMPLETE.fullmatch, files) if match)


def _link(source: Path, target: Path) -> None:
    """Copy a file by a hard link, or by contents across file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
