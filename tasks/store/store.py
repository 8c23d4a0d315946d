"""The store: immutable artifacts by kind and key, and the folders of runs.

    <store>/artifacts/<kind>/<key>/    the files, and manifest.json, which is written last
    <store>/runs/<run>/                what is mutable
    <store>/locks/, staging/, work/    work under way

An artifact is made in a staging folder and moved into place whole, so half of one is never seen; what a killed process
left is removed by the next one that publishes. It is verified whenever it is found: names and sizes of all files, and the
contents of as many as VERIFIED allows. With a store on S3 the work goes on in a local folder of the same layout:
artifacts are published there and then uploaded, manifest last, and fetched when a path to them is asked for.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tasks.store import locks
from tasks.store.backends import Folder, Objects, Storage
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.manifest import Damaged, Manifest
from tasks.store.staging import staging
from tasks.store.sync import LEFT_OUT, Mirror

log = logging.getLogger(__name__)

VERIFIED = 4 << 30  # bytes that one `find` hashes at most, about 2 s; the rest is verified by size
AT_ONCE = 16  # requests to a remote store that wait for their answers
MANY = 100  # artifacts of one kind
T = TypeVar("T")
R = TypeVar("R")
PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Artifact:
    """A reference to something in the store: what steps hand to each other.

    Attributes:
        kind: which step made it.
        key: hash of what determines it.
        location: path or URI of its folder.
        summary: small facts about it, JSON.
        seconds: that it took to make; None where that is not known.
    """

    kind: str
    key: str
    location: str
    summary: dict[str, Any]
    seconds: float | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Artifact:
        return cls(**value)


class Store:
    """A store in a folder, or under an `s3://` prefix (or any that fsspec knows).

    Args:
        uri: path or URI.
        work_dir: with a URI, the local folder that artifacts pass through and that runs lie in.
    """

    def __init__(self, uri: str, work_dir: str | Path = "store") -> None:
        self.uri = uri
        remote = "://" in uri and not uri.startswith("file://")
        path = Path(work_dir if remote else uri.removeprefix("file://"))
        self._local = Folder(path.expanduser().absolute())
        self._remote = Objects(uri) if remote else None
        self._storage: Storage = self._remote or self._local
        self._begun: dict[tuple[str, str], float] = {}  # when work on an artifact began, by its kind and key
        self.storage = self._storage  # for small files that are no artifacts
        self.work_dir = self._local.path("")
        self.notes = self._local.path("notes")  # what may be forgotten

    def find(self, kind: str, key: str, limit: int = VERIFIED) -> Artifact | None:
        """The artifact, if it is there and whole, and all that it requires too.

        What is damaged is removed, with one warning that names the file.

        Args:
            limit: bytes whose contents are looked at; what is beyond them is verified by size.
        """
        return self._found(kind, key, limit)

    def find_each(self, kind: str, keys: Sequence[str], limit: int = VERIFIED) -> list[Artifact | None]:
        """`find` for many of a kind; the limit is of each."""
        listed = self._listed([(kind, key) for key in keys])
        return self._each(lambda key: self._found(kind, key, limit, listed.get((kind, key))), keys)

    def expect(self, kind: str, key: str) -> Artifact:
        """The artifact, which was published just now, so that its contents need no other look.

        Raises:
            RuntimeError: it is not there.
        """
        artifact = self._found(kind, key, 0)
        if artifact is None:
            raise RuntimeError(f"{kind} {key} was published and is not in the store any more: {self.uri}")
        return artifact

    def remove(self, kind: str, key: str) -> None:
        """Remove an artifact, if it is there: where what it speaks of, outside of the store, is gone."""
        for storage in {self._storage, self._local}:
            storage.remove(_name(kind, key))

    @contextmanager
    def publish(
        self,
        kind: str,
        key: str,
        summary: Mapping[str, Any] | None = None,
        requires: Sequence[Mapping[str, str]] = (),
    ) -> Iterator[Path]:
        """A new folder to write an artifact's files into, published when the block ends.

        Where the block raises nothing is published. Where another process has published the same one in the meantime,
        its files stay, and these are dropped.

        Args:
            summary: read when the block ends, so it may be filled in within.
            requires: {kind, key} of each artifact that this one points to.

        Raises:
            ValueError: something other than plain files in the folder.
        """
        _name(kind, key)  # refused before the work, not after it
        begun = self._begun.get((kind, key), time.monotonic())
        with self._staging(kind, key) as folder:
            yield folder
            seconds = round(time.monotonic() - begun, 3)
            manifest = Manifest.of(folder, kind, key, summary or {}, requires, seconds)
            (folder / MANIFEST).write_bytes(manifest.to_bytes())
            self._place(folder, kind, key)
        if self._remote:
            with locks.held(self._remote, f"locks/{kind}-{key}-upload"):
                self._upload(self._remote, kind, key)

    @contextmanager
    def lock(self, kind: str, key: str, expiry: float = locks.EXPIRY) -> Iterator[None]:
        """Wait until nobody else works on this artifact, and keep others waiting for the block; not reentrant.

        Whoever has waited looks with `find` whether there is anything left to do. What is published within counts as having
        taken the time since the lock was had.

        Args:
            expiry: seconds after which the lock of a process that gives no sign of life is taken over. One that ended on
                this host is known to have ended at once.
        """
        with locks.held(self._storage, f"locks/{kind}-{key}", expiry):
            self._begun[kind, key] = time.monotonic()
            try:
                yield
            finally:
                del self._begun[kind, key]

    @property
    def artifacts(self) -> str:
        """URI of the artifacts' folder where the store is remote, empty where it is not."""
        return self._remote.location("artifacts") if self._remote else ""

    def release(self, artifact: Artifact) -> None:
        """Remove the copy of an artifact on this machine, where the store is remote and has it."""
        if self._remote:
            self._local.remove(_name(artifact.kind, artifact.key))

    def path(self, artifact: Artifact, *, whole: bool = True) -> Path:
        """The artifact's folder on this machine; fetched where the store is remote.

        Args:
            whole: whether what it requires is fetched too.

        Raises:
            FileNotFoundError: it is not in the store.
            Damaged: what was fetched is not what was published.
        """
        folder = self._local.path(_name(artifact.kind, artifact.key))
        if self._remote:
            self._fetch(self._remote, artifact.kind, artifact.key, whole)
        elif not folder.is_dir():
            raise FileNotFoundError(f"{artifact.kind} {artifact.key} is not in the store: {folder}")
        return folder

    def run_directory(self, name: str) -> Path:
        """Where a run's folder is, or will be."""
        return self._local.path(f"runs/{_part(name)}")

    def scratch(self, name: str) -> Path:
        """A folder on this machine for work that goes on where it stopped, made where there is none."""
        folder = self._local.path(f"work/{_part(name)}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def forget(self, name: str) -> None:
        """Remove such a folder."""
        self._local.remove(f"work/{_part(name)}")

    def run(self, name: str, identity: str) -> Path:
        """The folder of the run of this name and identity, made where there is none.

        The folder of another identity is moved to `<name>~N`, which one line says; nothing is ever overwritten.
        """
        folder = self.run_directory(name)
        note = folder / "run.json"
        if folder.exists() and any(folder.iterdir()) and identity_of(folder) != identity:
            aside = _move_aside(folder)
            log.warning(
                "run %s differs from the one of that name (model, data or training): moved to %s", name, aside
            )
        if self._remote:
            self._restore(self._remote, name, identity)
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            text = json.dumps({"identity": identity}, indent=1).encode()
            for storage in filter(None, (self._local, self._remote)):
                storage.write(f"runs/{name}/run.json", text)
        return folder

    def run_files(self, name: str, part: str) -> dict[str, int]:
        """Files and their sizes in a part of a run that the store itself holds (its checkpoints), by their paths from there."""
        return self._storage.files(f"runs/{_part(name)}/{part}")

    def fetch_run_part(self, name: str, part: str) -> Path:
        """The folder of such a part on this machine, fetched where the store is remote and has not been asked before."""
        folder = self.run_directory(name) / part
        if self._remote and not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            self._remote.download(f"runs/{_part(name)}/{part}", list(self.run_files(name, part)), partial)
            partial.rename(folder)
        return folder

    def remove_run_file(self, name: str, file: str) -> None:
        """Remove such a file, if it is there."""
        self._storage.remove(f"runs/{_part(name)}/{file}")

    def checkpoints(self, name: str) -> Path | str:
        """Where a run's checkpoints lie: in its folder, or under a URI where the store is remote."""
        if self._remote:
            return self._remote.location(f"runs/{_part(name)}/checkpoints")
        return self.run_directory(name) / "checkpoints"

    def mirror(self, name: str) -> Mirror:
        """What copies a run's folder to the store where that is remote, and does nothing where it is not."""
        return Mirror(self.run_directory(name), self._remote, f"runs/{name}")

    def is_remote(self) -> bool:
        return self._remote is not None

    def _restore(self, remote: Objects, name: str, identity: str) -> None:
        """Bring a run's folder back from its mirror where this machine has none; another identity's is moved aside there."""
        run = f"runs/{_part(name)}"
        data = remote.read(f"{run}/run.json")
        if data is None:
            return
        if json.loads(data).get("identity") != identity:
            number = 1
            while remote.read(f"{run}~{number}/run.json") is not None:
                number += 1
            remote.move(run, f"{run}~{number}")
        elif not self.run_directory(name).exists():
            names = [file for file in remote.files(run) if not file.startswith(LEFT_OUT)]
            remote.download(run, names, self.run_directory(name))
            log.info("run %s goes on here from its mirror in %s", name, remote.location(run))

    def _staging(self, kind: str, key: str) -> AbstractContextManager[Path]:
        return staging(self._local.path("staging"), f"{kind}-{key[:12]}")

    def _found(
        self, kind: str, key: str, limit: int, listed: Mapping[str, int] | None = None
    ) -> Artifact | None:
        manifest = self._verify_all(kind, key, [limit], listed)
        if manifest is None:
            return None
        location = self._storage.location(_name(kind, key))
        return Artifact(kind, key, location, manifest.summary, manifest.seconds)

    def _verify_all(
        self, kind: str, key: str, limit: list[int], listed: Mapping[str, int] | None = None
    ) -> Manifest | None:
        """`_verify` for an artifact and everything that it requires; `limit` is of bytes to hash, counted down."""
        manifest = self._verify(self._storage, kind, key, limit, listed) or self._uploaded_again(kind, key)
        required = manifest.requires if manifest else ()
        listed_each = self._listed(required)
        whole = self._each(
            lambda other: self._verify_all(*other, limit, listed_each.get(other)) is not None, required
        )
        for other in (other for other, is_whole in zip(required, whole, strict=True) if not is_whole):
            log.warning("%s %s needs %s %s, which is gone", kind, key, *other)
            return None
        return manifest

    def _listed(self, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], dict[str, int]]:
        """Files of these artifacts, of kinds of which so many are wanted that listing all of the kind is less to ask for."""
        listed: dict[tuple[str, str], dict[str, int]] = {}
        for kind, count in Counter(kind for kind, _ in wanted).items():
            if self._remote and count >= MANY:
                listed |= {(kind, key): {} for other, key in wanted if other == kind}
                for path, size in self._remote.files(f"artifacts/{_part(kind)}").items():
                    key, _, file = path.partition("/")
                    if (kind, key) in listed:
                        listed[kind, key][file] = size
        return listed

    def _each(self, call: Callable[[T], R], given: Sequence[T]) -> list[R]:
        """The call's results in their order; where the store is remote several wait for their answers at a time."""
        if self._remote is None or len(given) < 2:
            return [call(each) for each in given]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(call, given))

    def _verify(
        self,
        storage: Storage,
        kind: str,
        key: str,
        limit: list[int],
        listed: Mapping[str, int] | None = None,
    ) -> Manifest | None:
        """The manifest of an artifact that is whole; of a damaged one None, and it is removed and that is said."""
        name = _name(kind, key)
        data = storage.read(f"{name}/{MANIFEST}")
        found = storage.files(name) if listed is None else listed
        if data is None and (not found or storage is self._remote):
            return None  # not there, or being uploaded
        try:
            if data is None:
                raise Damaged(f"{MANIFEST} is gone")
            manifest = Manifest.from_bytes(data, kind, key)
            manifest.verify_sizes(found)
            if isinstance(storage, Folder):
                limit[0] = manifest.verify_contents(storage.path(name), limit[0])
            return manifest
        except Damaged as damage:
            # Unless another process has put a whole one there in the meantime.
            if storage.read(f"{name}/{MANIFEST}") == data:
                log.warning("%s %s: %s; it is removed, to be made again", kind, key, damage)
                storage.remove(name)
            return None

    def _place(self, folder: Path, kind: str, key: str) -> None:
        """Move a finished folder to where it belongs, unless a whole one is there."""
        name = _name(kind, key)
        target = self._local.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.rename(target)
                return
            except OSError:
                if not target.exists():
                    raise
            if self._verify(self._local, kind, key, [VERIFIED]):
                log.info("%s %s was published by another process first; its files stay", kind, key)
                return
            self._local.remove(name)

    def _upload(self, remote: Objects, kind: str, key: str) -> None:
        """Copy a local artifact to the remote store, manifest last, unless a whole one is there."""
        if self._verify(remote, kind, key, [0]):
            return
        name = _name(kind, key)
        folder = self._local.path(name)
        data = (folder / MANIFEST).read_bytes()
        remote.upload(folder, [file.name for file in Manifest.from_bytes(data, kind, key).files], name)
        remote.write(f"{name}/{MANIFEST}", data)

    def _uploaded_again(self, kind: str, key: str) -> Manifest | None:
        """Of an artifact that a remote store lacks, while a whole copy is on this machine: its upload was cut off, or lost."""
        manifest = self._verify(self._local, kind, key, [VERIFIED]) if self._remote else None
        if self._remote and manifest:
            log.info("%s %s is whole on this machine, and is copied to the store again", kind, key)
            with locks.held(self._remote, f"locks/{kind}-{key}-upload"):
                self._upload(self._remote, kind, key)
        return manifest

    def _fetch(self, remote: Objects, kind: str, key: str, whole: bool = True) -> None:
        """Copy an artifact, and where it is to be whole what it requires, from the remote store, unless it is here already."""
        name = _name(kind, key)
        data = remote.read(f"{name}/{MANIFEST}")
        if data is None:
            raise FileNotFoundError(f"{kind} {key} is not in the store: {remote.location(name)}")
        manifest = Manifest.from_bytes(data, kind, key)
        if self._verify(self._local, kind, key, [VERIFIED]) != manifest:
            self._local.remove(name)
            with self._staging(kind, key) as folder:
                files = {file.name: file for file in manifest.files}
                remote.download(name, list(files), folder, lambda file: files[file].verify(folder))
                (folder / MANIFEST).write_bytes(data)
                self._place(folder, kind, key)
        self._each(lambda other: self._fetch(remote, *other), manifest.requires if whole else ())


def _name(kind: str, key: str) -> str:
    return f"artifacts/{_part(kind)}/{_part(key)}"


def _part(name: str) -> str:
    if not PART.fullmatch(name):
        raise ValueError(f"{name!r} cannot name anything in a store: letters, digits, '.', '_' and '-' can")
    return name


def identity_of(folder: Path) -> str | None:
    """What tells the run in this folder from others of its name; None where nothing does."""
    try:
        return json.loads((folder / "run.json").read_text())["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _move_aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}~{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside
