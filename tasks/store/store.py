"""The store: immutable artifacts, mutable run folders, and the locks and folders of work in progress.

    <store>/artifacts/<kind>/<key>/        artifacts.py
    <store>/runs/<run>/                    run_folder.py
    <store>/ledger/                        ledger.py: the data that each run was trained on
    <store>/locks/, staging/, work/        work in progress
    <store>/uploads/                       mirrored_artifacts.py: records of unfinished uploads
    <store>/quarantine/                    artifacts.py: what was corrupted, with the reason
    <store>/local-cache/, cache/           local caches, safe to delete
    <store>/ladders/, mixtures/, branches/ pages of experiments
    <store>/logs/, prefect-home/           of commands, and of the local Prefect server
    <store>/belongs-to                     the store whose files these are: this folder, or a remote one

A remote store has a local folder of the same layout, `work_dir`: artifacts are made and cached there, and runs write to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from profiles.errors import ProfileError, closest, names_in
from profiles.files import state_files
from profiles.rules import credentials
from tasks.store import locks
from tasks.store.artifacts import ArtifactStore, LocalArtifacts
from tasks.store.backends.backend import Backend, FileInfo, checked_name
from tasks.store.backends.folder import FolderBackend
from tasks.store.backends.objects import ObjectBackend
from tasks.store.mirrored_artifacts import MirroredArtifacts
from tasks.store.run_folder import RunFolder

BELONGS_TO = "belongs-to"
# What commands write into a store's folder. A folder with other files only is none.
PARTS = {BELONGS_TO, "runs", "artifacts", "locks", "logs", "prefect-home"}
LOCAL = "."  # content of BELONGS_TO in a store that is a folder
READERS = 16  # threads that read a slow store
SAMPLE, SAMPLE_SECONDS = 16, 0.1  # at most so many items, and so long, show whether a folder is slow
T = TypeVar("T")
R = TypeVar("R")


def open_store(uri: str, work_dir: str | Path = "store", *, existing: bool = False) -> Store:
    """A store to write to; its local folder is recorded as this store's.

    Args:
        existing: reject a location without a store (`Store.existing`) instead of making one.

    Raises:
        ProfileError: as `Store`, and if the local folder is another store's: two stores' runs would mix there.
    """
    store = Store(uri, work_dir)
    if existing:
        store.existing()
    folder, key = store.work_dir, "cluster.work_dir" if store.is_remote else "store"
    owner = store.work_dir_owner
    if owner == store.owner:
        return store
    if owner is not None and any(state_files.exists(folder / name) for name in ("artifacts", "runs")):
        whose = "a store itself" if owner == LOCAL else f"the local folder of {owner}"
        name = uri.rstrip("/").rpartition("/")[2] or "remote"
        other = f"{work_dir}-{name}" if store.is_remote else owner
        reason = f"is {whose}, as its file {BELONGS_TO} says, so it cannot be the local folder of {uri}"
        raise ProfileError(key, str(folder), reason, [other])
    try:
        state_files.write(folder / BELONGS_TO, f"{store.owner}\n".encode())
    except OSError as error:
        raise ProfileError(key, str(folder), f"cannot be written: {error.strerror}") from error
    return store


class Store:
    """A store in a folder or at an `s3://` (or other fsspec) prefix, with local folder `work_dir`.

    Raises ProfileError for a location that cannot be a store.
    """

    def __init__(self, uri: str, work_dir: str | Path = "store") -> None:
        credentials.require_none("store", uri)
        if not uri.strip():
            raise ProfileError("store", uri, "is empty; give a folder or an s3:// prefix", ["./store"])
        if "://" in uri and "::" in uri:
            reason = "chained fsspec locations (`::`) cannot be a store; give a folder or one prefix, such as s3://bucket/store"
            raise ProfileError("store", uri, reason)
        self.uri = uri
        self.is_remote = "://" in uri and not uri.startswith("file://")
        path = Path(work_dir if self.is_remote else uri.removeprefix("file://"))
        self._local = FolderBackend(path.expanduser().absolute())
        self._remote = ObjectBackend(uri) if self.is_remote else None
        self.backend: Backend = self._remote or self._local  # for small files that are not artifacts
        self.work_dir = self._local.root  # a folder on this machine
        self.local_cache = self._local.path("local-cache")  # safe to delete
        self.owner = uri.rstrip("/") if self.is_remote else LOCAL
        local = LocalArtifacts(self._local)
        self.artifacts: ArtifactStore = MirroredArtifacts(self._remote, local) if self._remote else local

    def run_folder(self, name: str) -> RunFolder:
        """The folder of the run of this name, whether or not it exists. Raises ValueError for an invalid name."""
        return RunFolder(name, self._local, self._remote)

    def lock(self, name: str, watch: Callable[[], None] = lambda: None) -> AbstractContextManager[locks.Lock]:
        """Hold a lock that is not an artifact's, for a block; see `locks.acquire`."""
        return locks.acquire(self.backend, f"locks/{name}", watch=watch)

    @property
    def location(self) -> str:
        """Its absolute path, or its URI."""
        return self.owner if self.is_remote else str(self.work_dir)

    def existing(self) -> Store:
        """This store. Raises ProfileError if there is none: commands that only read it would show it as empty."""
        entries = self.backend.entries("")
        if entries.keys() & PARTS:
            return self
        if not self.is_remote and state_files.is_dir(self.work_dir) and not entries:  # made for the first run
            return self
        if not self.is_remote and not state_files.exists(self.work_dir):
            reason = f"there is no such folder: {self.work_dir}; the first run makes it"
        elif not self.is_remote and not state_files.is_dir(self.work_dir):
            reason = f"is not a folder: {self.work_dir}"
        elif not entries:
            reason = "there is nothing at this prefix; the first run makes the store"
            if self._remote and self._remote.lacks_bucket():
                reason = "there is no such bucket, or not at this endpoint (AWS_ENDPOINT_URL)"
        else:
            reason = f"is not a store: {self.location} has neither runs nor artifacts"
        raise ProfileError("store", self.uri, reason, self._similar(entries))

    def _similar(self, entries: Mapping[str, FileInfo]) -> list[str]:
        """A store in this folder, or those beside a folder that does not exist with a similar name."""
        if self.is_remote:
            return []
        given = Path(self.uri.removeprefix("file://"))
        if entries:
            return [
                str(given / name) for name in entries if state_files.is_dir(self.work_dir / name / "runs")
            ]
        beside = names_in(self.work_dir.parent, "*/runs")
        return [str(given.with_name(name)) for name in closest(given.name, beside, 0)]

    @property
    def work_dir_owner(self) -> str | None:
        """The store whose files the local folder has, by its `owner`; None if nothing was recorded."""
        recorded = state_files.read(self.work_dir / BELONGS_TO)
        return recorded.decode(errors="replace").strip() if recorded else None

    @property
    def has_work_dir(self) -> bool:
        """Whether the local folder has files of this store, rather than another's or none."""
        return not self.is_remote or self.work_dir_owner == self.owner

    @property
    def backends(self) -> list[Backend]:
        """Where files of this store are: the store, and the local folder of a remote one."""
        return [self.backend, self._local] if self.is_remote and self.has_work_dir else [self.backend]

    def files(self, name: str) -> dict[str, int]:
        """Sizes in bytes of all files below a folder, also in the local copy, by relative path."""
        found: dict[str, int] = {}
        for backend in reversed(self.backends):
            found |= backend.files(name)
        return found

    def remove(self, name: str) -> None:
        """Remove a file or folder by its path in the store, also from the local copy, if it exists."""
        for backend in self.backends:
            backend.remove(name)

    def set_aside(self, name: str) -> list[Path]:
        """As `remove`, but only renames local folders; returns what is left to delete, which takes longer."""
        folders = [self._local.set_aside(name)] if self._local in self.backends else []
        if self._remote:
            self._remote.remove(name)
        return [folder for folder in folders if folder]

    def scratch_folder(self, name: str) -> Path:
        """Local folder for work that resumes after an interruption, created if needed."""
        folder = self._local.path(f"work/{checked_name(name)}")
        state_files.make_folder(folder)
        return folder

    def remove_scratch_folder(self, name: str) -> None:
        self._local.remove(f"work/{checked_name(name)}")


def read_each(store: Store, items: Sequence[T], read: Callable[[T], R]) -> list[R]:
    """Read each item: in threads from an object store or a slow file system.

    On a fast disk, threads cost more time than they save.
    """
    begun, used, found = time.perf_counter(), time.thread_time(), list[R]()
    for item in items[: 0 if store.is_remote else SAMPLE]:
        found.append(read(item))
        if time.perf_counter() - begun > SAMPLE_SECONDS:
            break
    wall, cpu = time.perf_counter() - begun, time.thread_time() - used
    if not store.is_remote and wall < 5 * cpu:
        return [*found, *map(read, items[len(found) :])]
    with ThreadPoolExecutor(READERS) as pool:
        return [*found, *pool.map(read, items[len(found) :])]
