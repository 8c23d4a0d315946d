"""Where checkpoints are stored: a local folder or a prefix that fsspec supports (`s3://`).

    <location>/step_<n>/*.distcp            boxes, one file per rank
    <location>/step_<n>/*.distcp.checksums  of the file's blocks (checksums.py)
    <location>/step_<n>/.metadata           DCP's index: which box of which tensor is at which bytes of which file
    <location>/step_<n>/complete.json       the marker, written last: everything but tensors; size and checksum of each file
    <location>/owner                        the writer that claimed the location last
    <location>/quarantine/step_<n>/         a corrupted checkpoint; its marker is corrupted.json, with a reason.txt

A checkpoint without its marker is incomplete: never loaded, and safe to remove at any time. Folders with other names, such as
`step_1.bak`, are ignored. File names begin with the id of the save that wrote them, so an abandoned writer cannot overwrite files
of its successor.

Only FileNotFoundError and NotADirectoryError mean absence. A read that fails for another reason is retried, then raised.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from parallel.checkpoint.object_stores import (
    PAGE,
    delete,
    explained,
    find,
    guard_answers,
    make_folder,
    renew_credentials,
)

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MARKER = "complete.json"
QUARANTINE = "quarantine"
OWNER = "owner"  # file below a location: who may write there
CORRUPTED_MARKER = "corrupted.json"  # of a checkpoint in quarantine
STEP = re.compile(r"step_(0|[1-9][0-9]*)")
ABSENT = (FileNotFoundError, NotADirectoryError)
READ_PAUSES = (1.0, 4.0, 15.0)  # seconds before a failed read is repeated
Location = Path | str
T = TypeVar("T")

log = logging.getLogger(__name__)


class CorruptCheckpoint(ValueError):
    """A checkpoint file has wrong contents or is missing from a listing; the message names it."""


def join(location: Location, name: str) -> Location:
    """`name` inside a folder or below a prefix."""
    return location / name if isinstance(location, Path) else f"{location.rstrip('/')}/{name}"


def name_of(location: Location) -> str:
    """The last component of a path or URI."""
    return str(location).rstrip("/").rpartition("/")[2]


@overload
def complete_checkpoints(location: Path) -> Iterator[tuple[int, Path]]: ...


@overload
def complete_checkpoints(location: Location) -> Iterator[tuple[int, Location]]: ...


def complete_checkpoints(location: Location) -> Iterator[tuple[int, Location]]:
    """(step, checkpoint) of every complete step_<n> at a location, in order of steps."""
    for step, marked in sorted(_steps(location).items()):
        if marked:
            yield step, join(location, f"step_{step}")


def read_marker(checkpoint: Location) -> dict[str, Any]:
    """The marker of a complete checkpoint.

    Raises:
        ValueError: there is no marker: no checkpoint, or its save did not finish.
        CorruptCheckpoint: the marker is not a JSON object, or does not describe files.
    """
    files, root = filesystem(checkpoint)
    try:
        data = read_file(files, f"{root}/{MARKER}")
    except ABSENT:
        raise ValueError(f"{checkpoint}: not a complete checkpoint; {MARKER} is missing") from None
    try:
        marker = json.loads(data)
    except ValueError:
        marker = None
    if not isinstance(marker, dict):
        raise CorruptCheckpoint(f"{checkpoint}: {MARKER} is corrupted: not a JSON object")
    described = marker.get("files", {})
    if not isinstance(described, dict) or not all(map(_is_description, described.values())):
        raise CorruptCheckpoint(f"{checkpoint}: {MARKER} is corrupted: invalid files")
    return marker


def _is_description(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("size"), int)


@explained()
def write_marker(checkpoint: Location, marker: dict[str, Any]) -> None:
    """Mark a checkpoint as complete, atomically and durably."""
    files, root = filesystem(checkpoint)
    data = json.dumps(marker, indent=1).encode()
    if not is_local(files):
        files.pipe_file(f"{root}/{MARKER}", data)
        return
    partial = Path(root, f".{MARKER}")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(Path(root, MARKER))
    for folder in (root, Path(root).parent):
        _sync_folder(folder)


@explained()
def claim(location: Location, owner: str) -> None:
    """Record who may write below a location, until another writer claims it."""
    files, root = filesystem(location)
    make_folder(files, root)
    files.pipe_file(f"{root}/{OWNER}", owner.encode())


def claimed_by(location: Location) -> str:
    """The latest writer that claimed a location; empty if there is none."""
    files, root = filesystem(location)
    try:
        return read_file(files, f"{root}/{OWNER}").decode(errors="replace")
    except ABSENT:
        return ""


def reject_page(path: str, data: bytes) -> None:
    """Raise ConnectionError for a web page in place of a file, which is an outage rather than corruption.

    A captive portal or a proxy answers with one, and with status 200.
    """
    if not path.endswith((".html", ".htm")) and PAGE.match(data[:200]):
        reason = "a web page was answered in place of this file, perhaps by a captive portal or a proxy; check the network"
        raise ConnectionError(f"{path}: {reason}")


def reject_page_file(path: str, copy: Path) -> None:
    """As `reject_page`, for a downloaded file."""
    with copy.open("rb") as file:
        reject_page(path, file.read(200))


def retry_reads(path: str, read: Callable[[], T]) -> T:
    """Call `read`, retrying after each of READ_PAUSES; absence and corruption are raised at once."""

    def checked() -> T:
        with explained():
            data = read()
        if isinstance(data, bytes):
            reject_page(path, data)
        return data

    for pause in READ_PAUSES:
        try:
            return checked()
        except (*ABSENT, CorruptCheckpoint):
            raise
        except Exception as error:  # of any storage
            log.warning(f"{path} could not be read: {error!r}; retrying in {pause:.0f} s")
            time.sleep(pause)
    return checked()


def read_file(files: AbstractFileSystem, path: str) -> bytes:
    """Contents of a file, retried as `retry_reads`; raises CorruptCheckpoint as `require_file`."""
    require_file(files, path)
    return retry_reads(path, lambda: read_completely(files, path))


def read_completely(files: AbstractFileSystem, path: str) -> bytes:
    """Contents of a file. Raises OSError if a read of a local file is cut short."""
    data: bytes = files.cat_file(path)
    if is_local(files) and len(data) < (size := os.stat(path).st_size):
        raise OSError(errno.EIO, f"only {len(data)} of {size} bytes could be read", path)
    return data


def require_file(files: AbstractFileSystem, path: str) -> None:
    """Raise CorruptCheckpoint if a local path is a folder, a pipe, or a link to nothing or to itself.

    Reading a pipe might never end.
    """

    def mode() -> int:
        try:
            return os.stat(path).st_mode
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):  # where a link points to
                return 0
            raise

    if not is_local(files):
        return
    try:  # not with os.path.isfile, for which a file whose status cannot be read is none
        regular = stat.S_ISREG(retry_reads(path, mode))
    except ABSENT:
        regular = not _is_link(files, path)
    if not regular:
        raise CorruptCheckpoint(f"{path}: corrupted: not a regular file")


def sizes(checkpoint: Location) -> dict[str, int]:
    """Sizes in bytes of a checkpoint's files by name; raises FileNotFoundError if its folder is missing."""
    files, root = filesystem(checkpoint)
    return {name_of(entry["name"]): entry["size"] for entry in files.ls(root, detail=True)}


@explained()
def discard(checkpoint: Location) -> None:
    """Remove a checkpoint if it exists, its marker first: an interrupted removal leaves it incomplete.

    Of a link, only the link: the checkpoint that it points to is another run's.
    """
    files, root = filesystem(checkpoint)
    if _is_link(files, root):
        Path(root).unlink()
        return
    if _exists(files, marker := f"{root}/{MARKER}"):
        files.rm_file(marker)  # by a request of its own, whose refusal is an error
    if _exists(files, root):
        delete(files, root)
        _require_removed(files, root)


def discard_incomplete(location: Location) -> list[str]:
    """Remove the checkpoints without a marker; returns their names."""
    names = [f"step_{step}" for step, marked in sorted(_steps(location).items()) if not marked]
    for name in names:
        discard(join(location, name))
    return names


def free_aside(location: Location) -> Location:
    """The first of `<location>~1`, `<location>~2`, ... that does not exist."""
    aside = f"{str(location).rstrip('/')}{_free_suffix(*filesystem(location))}"
    return Path(aside) if isinstance(location, Path) else aside


@explained()
def move_aside(location: Location, steps: list[int], aside: Location) -> None:
    """Move these steps' checkpoints to another location; complete a move that was interrupted."""
    files, root = filesystem(location)
    target = filesystem(aside)[1]
    make_folder(files, target)
    for step in steps:
        _move(files, f"{root}/step_{step}", f"{target}/step_{step}")


@explained()
def quarantine(location: Location, step: int, reason: str) -> Location:
    """Move a corrupted checkpoint to `<location>/quarantine`, never to count as complete; returns where.

    Args:
        reason: written to its reason.txt, unless the checkpoint is a link.
    """
    files, root = filesystem(location)
    name = f"{QUARANTINE}/step_{step}"
    # In an object store, one without its marker is the copy of an interrupted move, which continues.
    marker = "" if is_local(files) else f"/{CORRUPTED_MARKER}"
    name += _free_suffix(files, f"{root}/{name}", marker) if _exists(files, f"{root}/{name}{marker}") else ""
    make_folder(files, f"{root}/{QUARANTINE}")
    _move(files, f"{root}/step_{step}", f"{root}/{name}", marker=CORRUPTED_MARKER)
    if not _is_link(files, f"{root}/{name}"):
        files.pipe_file(f"{root}/{name}/reason.txt", f"{reason}\n".encode())
    return join(location, name)


def quarantined(location: Location) -> list[str]:
    """Names of the checkpoints in quarantine."""
    files, root = filesystem(location)
    return sorted(name for name in _names(files, f"{root}/{QUARANTINE}") if name.startswith("step_"))


def _move(files: AbstractFileSystem, source: str, target: str, marker: str = MARKER) -> None:
    """Move a checkpoint and rename its marker; of a link, move only the link.

    Completes a move that was interrupted.
    """
    if _is_link(files, source):
        Path(target).unlink(missing_ok=True)
        # absolute, because a relative link would point elsewhere from another folder
        Path(target).symlink_to(Path(source).parent.absolute() / os.readlink(source))
        Path(source).unlink()
        return
    if is_local(files):
        try:
            Path(source).rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy_checkpoint(Path(source), Path(target))
            discard(Path(source))
        if marker != MARKER:
            with contextlib.suppress(*ABSENT):
                Path(target, MARKER).rename(Path(target, marker))
        return
    found = _object_sizes(files, source)
    copied = _object_sizes(files, target)  # by an interrupted move: objects appear whole
    rest = [name for name, size in found.items() if name != f"/{MARKER}" and copied.get(name) != size]
    # In one call, which copies concurrently: a checkpoint may have a thousand objects of gigabytes.
    files.copy([source + name for name in rest], [target + name for name in rest])
    if f"/{MARKER}" in found:
        files.copy(f"{source}/{MARKER}", f"{target}/{marker}")
    delete(files, [source + name for name in found])
    _require_removed(files, source)


def _require_removed(files: AbstractFileSystem, root: str) -> None:
    """Raise PermissionError if an object store kept objects.

    It reports each refused deletion in an answer with status 200.
    """
    if not is_local(files) and (left := find(files, root)):
        objects = f"{len(left):,} object{'s' * (len(left) != 1)}"
        reason = f"the object store refused to delete {objects} (permission, or an object lock)"
        raise PermissionError(errno.EACCES, reason, root)


def _object_sizes(files: AbstractFileSystem, root: str) -> dict[str, int]:
    """Sizes in bytes of the objects below a prefix, by the rest of their names; empty if there are none."""
    return {path.removeprefix(root): entry["size"] for path, entry in find(files, root).items()}


def _copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a local checkpoint durably, its marker last, over what an interrupted copy left."""
    others = shutil.ignore_patterns(MARKER)
    shutil.copytree(source, target, ignore=others, copy_function=_copy_file, dirs_exist_ok=True)
    with contextlib.suppress(*ABSENT):
        _copy_file(source / MARKER, target / MARKER)
    for folder in (target, target.parent):
        _sync_folder(folder)


def _copy_file(source: str | Path, target: str | Path) -> None:
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
        if (copied := os.fstat(file.fileno()).st_size) != (size := os.stat(source).st_size):
            raise OSError(errno.EIO, f"only {copied} of {size} bytes could be copied", str(source))


def _free_suffix(files: AbstractFileSystem, path: str, marker: str = "") -> str:
    """The first of ~1, ~2, ... with which no such path exists, or none that contains `marker`."""
    number = 1
    while _exists(files, f"{path}~{number}{marker}"):
        number += 1
    return f"~{number}"


def open_filesystem(location: str, **options: Any) -> tuple[AbstractFileSystem, str]:
    """The fsspec filesystem of a path or URL, and the path in it; `::` in a local name separates nothing."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    if "://" not in location or location.startswith("file://"):
        return LocalFileSystem(), LocalFileSystem._strip_protocol(location)
    return url_to_fs(location, **options)


def filesystem(location: Location) -> tuple[AbstractFileSystem, str]:
    """The fsspec filesystem of a location, and the location's path in it."""
    # A cached listing would hide what other processes write.
    files, root = open_filesystem(str(location), use_listings_cache=False)
    renew_credentials(files)
    guard_answers(files)
    return files, root.rstrip("/")


def is_local(files: AbstractFileSystem) -> bool:
    """Whether a filesystem is this machine's."""
    return "file" in files.protocol


def _is_link(files: AbstractFileSystem, path: str) -> bool:
    """Whether a path is a symbolic link on this machine."""
    if not is_local(files):
        return False
    try:  # not with os.path.islink, for which a link whose status cannot be read is none
        return stat.S_ISLNK(retry_reads(path, lambda: os.lstat(path)).st_mode)
    except ABSENT:
        return False


def _steps(location: Location) -> dict[int, bool]:
    """The step of every checkpoint at a location, and whether it is complete."""
    files, root = filesystem(location)
    steps = [int(found[1]) for found in map(STEP.fullmatch, _names(files, root)) if found]
    return {step: _exists(files, f"{root}/step_{step}/{MARKER}") for step in steps}


def _names(files: AbstractFileSystem, folder: str) -> list[str]:
    """Names of the entries of a folder; empty if it does not exist."""
    try:
        return [name_of(path) for path in retry_reads(folder, lambda: files.ls(folder, detail=False))]
    except ABSENT:
        return []


def _exists(files: AbstractFileSystem, path: str) -> bool:
    """Whether a path exists; unlike fsspec's `exists`, raises errors other than absence."""
    try:
        retry_reads(path, lambda: files.info(path))
    except ABSENT:
        return False
    return True


def _sync_folder(folder: str | Path) -> None:
    """Make the entries of a local folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
