"""Listings of folders that fail if one cannot be read.

`Path.glob` and `os.walk` pass over it.
"""

from __future__ import annotations

import errno
import fnmatch
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from profiles.files.state_files import retried

OF_A_DISK = "lost+found"  # which its file system makes, and only root can read


def matches(folder: Path, pattern: str) -> list[Path]:
    """Paths in a folder whose names match a pattern, sorted; none if it does not exist.

    Raises OSError if it cannot be listed.
    """
    try:
        names = retried(lambda: os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folder / name for name in fnmatch.filter(names, pattern))


def walk(
    folder: Path | str, prefix: str = "", *, follow: bool = False
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything but folders below a folder, by relative path.

    Args:
        follow: whether to follow links to folders, but not to one that contains the link.

    Raises:
        OSError: a folder cannot be listed.
    """
    # Stores have many files: no recursion, and no `Path` for each, which would take most of the time.
    folders = [(str(folder), prefix)]
    while folders:
        path, prefix = folders.pop()
        try:
            files, inner = retried(partial(_divided, path, follow))
        except (FileNotFoundError, NotADirectoryError):  # removed since it was listed, or never there
            continue
        for entry in files:
            yield prefix + entry.name, entry
        for entry in inner:
            if not (entry.is_symlink() and Path(path).resolve().is_relative_to(Path(entry.path).resolve())):
                folders.append((entry.path, f"{prefix}{entry.name}/"))


def _divided(folder: str, follow: bool) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """What is directly in a folder: everything but folders, and folders."""
    found: tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]] = [], []
    for entry in scan(folder):
        try:
            # Of files that are no links, the listing says so.
            is_folder = entry.is_dir(follow_symlinks=follow)
        except OSError as error:
            if not is_gone(error):
                raise
            is_folder = False
        found[is_folder].append(entry)
    return found


def is_gone(error: OSError) -> bool:
    """Whether a listed entry was removed since, or is a link to nothing or to itself."""
    return isinstance(error, FileNotFoundError) or error.errno == errno.ELOOP


def scan(folder: Path | str) -> list[os.DirEntry[str]]:
    """What is directly in a folder. Raises OSError; retry it with `retried`."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if entry.name != OF_A_DISK]
