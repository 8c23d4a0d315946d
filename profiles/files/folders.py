"""Listings of folders that fail if one cannot be read.

`glob`, `Path.glob` and `os.walk` pass over it.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from profiles.files.state_files import exists, is_dir, retried

OF_A_DISK = "lost+found"  # which its file system makes, and only root can read


def matches(folder: Path, pattern: str) -> list[Path]:
    """Paths in a folder whose names match a pattern, sorted; none if it does not exist.

    Raises OSError if it cannot be listed.
    """
    try:
        names = retried(lambda: os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folder / name for name in fnmatch.filter(names, pattern) if name != OF_A_DISK)


def find(folder: Path, pattern: str) -> Iterator[Path]:
    """Paths below a folder that match a pattern, in which ** is any number of folders.

    As in shells, a leading dot in a name matches only one in the pattern. Raises OSError if a folder cannot be listed.
    """
    first, _, rest = pattern.partition("/")
    if first == "**":
        yield from find(folder, rest or "*")
        inner = (path for path in matches(folder, "[!.]*") if is_dir(path, follow_symlinks=False))
        for path in inner:
            yield from find(path, pattern)
    elif not glob.has_magic(first):
        if exists(path := folder / first):
            yield from find(path, rest) if rest else [path]
    else:
        for path in matches(folder, first):
            if first.startswith(".") or not path.name.startswith("."):
                yield from find(path, rest) if rest else [path]


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
