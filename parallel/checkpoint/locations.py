"""Where checkpoints are stored: a local folder or a prefix that fsspec reaches (`s3://`).

    <location>/step_<n>/*.distcp         boxes, one file per rank
    <location>/step_<n>/.metadata        DCP's index: which box of which tensor is at which bytes of which file
    <location>/step_<n>/complete.json    the marker, written last: everything that is not a tensor

A checkpoint without its marker is incomplete: never loaded, and safe to remove at any time. File names begin with the id of the
save that wrote them, so an abandoned writer cannot overwrite files of its successor.

The only modules of `parallel` that use more than torch are this one and `reader.py`: fsspec, which torch requires, imported when
needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MARKER = "complete.json"
Location = Path | str


def join(location: Location, name: str) -> Location:
    """`name` inside a folder or below a prefix."""
    return location / name if isinstance(location, Path) else f"{location.rstrip('/')}/{name}"


def name_of(location: Location) -> str:
    """The last component of a path or URI."""
    return str(location).rstrip("/").rpartition("/")[2]


def complete_checkpoints(location: Location) -> Iterator[tuple[int, Location]]:
    """(step, checkpoint) of every complete step_<n> at a location, in order of steps."""
    for step, marked in sorted(_steps(location).items()):
        if marked:
            yield step, join(location, f"step_{step}")


def read_marker(checkpoint: Location) -> dict[str, Any]:
    """The marker of a complete checkpoint. Raises ValueError: there is no marker: no checkpoint, or its save did not finish."""
    files, root = filesystem(checkpoint)
    try:
        return json.loads(files.cat_file(f"{root}/{MARKER}"))
    except FileNotFoundError:
        raise ValueError(f"{checkpoint}: not a complete checkpoint; {MARKER} is missing") from None


def write_marker(checkpoint: Location, about: dict[str, Any]) -> None:
    """Mark a checkpoint as complete, atomically."""
    files, root = filesystem(checkpoint)
    data = json.dumps(about, indent=1).encode()
    if is_local(files):
        files.pipe_file(f"{root}/.{MARKER}", data)
        files.mv(f"{root}/.{MARKER}", f"{root}/{MARKER}")
    else:
        files.pipe_file(f"{root}/{MARKER}", data)


def discard(checkpoint: Location) -> None:
    """Remove a checkpoint if it exists, its marker first: an interrupted removal leaves it incomplete."""
    files, root = filesystem(checkpoint)
    for path, recursive in ((f"{root}/{MARKER}", False), (root, True)):
        if files.exists(path):
            files.rm(path, recursive=recursive)


def discard_incomplete(location: Location) -> list[str]:
    """Remove the checkpoints without a marker; returns their names."""
    names = [f"step_{step}" for step, marked in sorted(_steps(location).items()) if not marked]
    for name in names:
        discard(join(location, name))
    return names


def move_aside(location: Location, steps: list[int]) -> Location:
    """Move the checkpoints of these steps to the first free of `<location>~1`, `<location>~2`, ...; returns which."""
    files, root = filesystem(location)
    number = 1
    while files.exists(f"{root}~{number}"):
        number += 1
    aside = f"{str(location).rstrip('/')}~{number}"
    files.makedirs(f"{root}~{number}", exist_ok=True)
    for step in steps:
        source, target = f"{root}/step_{step}", f"{root}~{number}/step_{step}"
        if is_local(files):
            files.mv(source, target)
        else:
            found = sorted(files.find(source), key=lambda path: path.endswith(MARKER))  # the marker last
            for path in found:
                files.copy(path, target + path.removeprefix(source))
            files.rm(found)
    return Path(aside) if isinstance(location, Path) else aside


def filesystem(location: Location) -> tuple[AbstractFileSystem, str]:
    """The fsspec filesystem of a location, and the location's path in it."""
    from fsspec.core import url_to_fs

    # A cached listing would hide what other processes write.
    files, root = url_to_fs(str(location), use_listings_cache=False)
    return files, root.rstrip("/")


def is_local(files: AbstractFileSystem) -> bool:
    """Whether a filesystem is this machine's."""
    return "file" in files.protocol


def _steps(location: Location) -> dict[int, bool]:
    """The step of every checkpoint at a location, and whether it is complete."""
    files, root = filesystem(location)
    try:
        names = [path.rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)]
    except FileNotFoundError:
        return {}
    steps = [name.removeprefix("step_") for name in names if name.startswith("step_")]
    return {int(step): files.exists(f"{root}/step_{step}/{MARKER}") for step in steps if step.isdecimal()}
