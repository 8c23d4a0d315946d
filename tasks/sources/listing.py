"""Lists a source's files: one file, a glob pattern or a folder, local or on any fsspec file system.

A folder that cannot be read is an error: leaving out its files would silently change the data, and with it the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from parallel.checkpoint.object_stores import find, is_object_store
from profiles.errors import ProfileError
from profiles.schema import Source
from tasks.sources import remote
from tasks.sources.shard import SourceError, resolve_filesystem, shown
from tasks.store.backends.backend import checked_path

METADATA_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")  # of save_to_disk
DATASET_CARD = "readme.md"
HIDDEN_PREFIXES = (".", "_")  # of files that Spark, git and others put beside data


def list_files(source: Source, key: str) -> list[str]:
    """Sorted paths or URLs of a source's files: one file, a glob pattern's matches, or a folder's files.

    A folder's README.md and hidden files are left out; a pattern matches leading dots only if it names them, as in shells.

    Raises:
        ProfileError: for the profile key `key` if no file matches, or one is not a regular file or its name is not UTF-8.
        OSError: a folder cannot be read.
    """
    assert source.path is not None  # sources of files have one
    path = source.path if "://" in source.path else str(Path(source.path).expanduser())
    filesystem, pattern = resolve_filesystem(path, anonymous=source.anonymous)
    found = _Finder(filesystem, key).find(pattern)
    found = sorted({path for path in found if path.rpartition("/")[2] not in METADATA_FILES})
    if not found:
        raise ProfileError(key, source.path, "no file matches")
    for path in found:
        if shown(path) != path:
            raise ProfileError(key, shown(path), "has a name that is not UTF-8; rename it")
    return [_url(filesystem, path) for path in found]


def list_saved_dataset(source: Source, key: str) -> list[str]:
    """Paths or URLs of the data files in a save_to_disk folder of `datasets`, in its own order.

    Raises ProfileError for the profile key `key` if there is none, SourceError for a corrupted state.json.
    """
    assert source.path is not None  # sources of tokens have one
    filesystem, folder = resolve_filesystem(source.path, anonymous=source.anonymous)
    folder = folder.rstrip("/")
    if not remote.info(filesystem, f"{folder}/state.json"):
        if not remote.info(filesystem, f"{folder}/dataset_dict.json"):
            raise ProfileError(key, source.path, "has no state.json of save_to_disk")
        entries = remote.call(filesystem, folder, lambda: filesystem.ls(folder, detail=True))
        splits = [entry["name"] for entry in entries if entry["type"] == "directory"]
        raise ProfileError(key, source.path, "has several splits; name the folder of one", splits)
    text = remote.cat_file(filesystem, f"{folder}/state.json")
    try:
        names = [entry["filename"] for entry in json.loads(text)["_data_files"]]
        names = [checked_path(name) for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{source.path}/state.json: not written by save_to_disk: {error}") from error
    if not names:
        raise ProfileError(key, source.path, "contains no data files")
    return [_url(filesystem, f"{folder}/{name}") for name in names]


def _url(filesystem: Any, path: str) -> str:
    """A path as users write it: without a protocol if it is local."""
    return path if "file" in _protocols(filesystem) else filesystem.unstrip_protocol(path)


def _protocols(filesystem: Any) -> set[str]:
    names = filesystem.protocol
    return {names} if isinstance(names, str) else set(names)


class _Finder:
    """Finds files on one file system."""

    def __init__(self, filesystem: Any, key: str) -> None:
        protocols = _protocols(filesystem)
        self._filesystem, self._key = filesystem, key
        self._is_local = "file" in protocols
        self._lists_prefixes = is_object_store(filesystem)
        self._magic = "*[" if "http" in protocols else "*?["  # ? begins a URL's query

    def find(self, pattern: str) -> Iterable[str]:
        """Files of a path or pattern."""
        parts = pattern.split("/")
        first = next((i for i, part in enumerate(parts) if any(c in part for c in self._magic)), None)
        try:
            info = remote.info(self._filesystem, pattern)  # a file's name may contain brackets
        except PermissionError:
            # Object stores answer so for a missing object if listing is not allowed.
            if first is None:
                raise
            info = None
        if info is not None:
            return self._below(pattern) if info["type"] == "directory" else [self._regular(pattern, info)]
        if first is not None:
            return self._matches("/".join(parts[:first]) or "/", parts[first:])
        return []

    def _matches(self, folder: str, parts: list[str]) -> Iterator[str]:
        """Files below a folder that match the parts of a pattern; lists only folders that may contain some."""
        first, *rest = parts
        if first == "**" and self._lists_prefixes:
            for path, names in self._everything(folder):
                if _is_match(names, [first, *(rest or ["*"])]):
                    yield path
            return
        if first == "**":
            yield from self._matches(folder, rest or ["*"])
        for path, info in self._entries(folder):
            name = path.rpartition("/")[2]
            if first == "**":
                if self._kind(info, follow=False) == "directory" and not name.startswith("."):
                    yield from self._matches(path, parts)
            elif _is_name_match(name, first):
                is_folder = self._kind(info) == "directory"
                if rest and is_folder:
                    yield from self._matches(path, rest)
                elif not rest and not is_folder:
                    yield self._regular(path, info)

    def _below(self, folder: str) -> Iterator[str]:
        """All files below a folder, without dataset cards and hidden ones."""
        folder = folder.rstrip("/")
        if self._lists_prefixes:
            for path, names in self._everything(folder):
                if not any(map(_is_metadata, names)):
                    yield path
            return
        for path, info in self._entries(folder):
            if _is_metadata(path.rpartition("/")[2]):
                continue
            if self._kind(info, follow=False) == "directory":
                yield from self._below(path)
            elif self._kind(info) == "directory":
                reason = "is a link to a folder; add that folder as a separate source"
                raise ProfileError(self._key, shown(path), reason)
            else:
                yield self._regular(path, info)

    def _entries(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        """Path and description of what a folder contains; nothing if it does not exist."""
        try:
            found = remote.call(self._filesystem, folder, lambda: self._filesystem.ls(folder, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [(info["name"].rstrip("/"), info) for info in found if info["name"].rstrip("/") != folder]

    def _everything(self, prefix: str) -> Iterator[tuple[str, list[str]]]:
        """All files below a prefix of an object store, with the parts of their names after it."""
        found = remote.call(self._filesystem, prefix, lambda: find(self._filesystem, prefix))
        for path, info in found.items():
            if info["type"] == "file" and not path.endswith("/"):
                yield path, path[len(prefix) + 1 :].split("/")

    def _kind(self, info: dict[str, Any], follow: bool = True) -> str:
        """ "file", "directory", "other" or "dead link"; without `follow`, "other" for a link."""
        if info["type"] != "other" or not self._is_local or not follow or not info.get("islink"):
            return str(info["type"])
        try:
            return str(self._filesystem.info(info["name"])["type"])
        except FileNotFoundError:
            return "dead link"

    def _regular(self, path: str, info: dict[str, Any]) -> str:
        kind = self._kind(info)
        if kind == "dead link":
            raise ProfileError(self._key, shown(path), "is a link to a file that does not exist; remove it")
        if kind != "file":
            raise ProfileError(self._key, shown(path), "is not a regular file; move it out of the data")
        return path


def _is_match(names: list[str], parts: list[str]) -> bool:
    """Whether the parts of a path match those of a pattern, in which ** is any number of folders."""
    if not parts or not names:
        return not parts and not names
    if parts[0] == "**":
        below = not names[0].startswith(".") and _is_match(names[1:], parts)
        return below or _is_match(names, parts[1:])
    return _is_name_match(names[0], parts[0]) and _is_match(names[1:], parts[1:])


def _is_name_match(name: str, part: str) -> bool:
    """Whether a name matches a part of a pattern.

    A leading dot, as of an unfinished upload, matches only a leading dot in the pattern.
    """
    return fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))


def _is_metadata(name: str) -> bool:
    """Whether a file in a folder, or a folder in it, is a dataset card or hidden."""
    return name.lower() == DATASET_CARD or name.startswith(HIDDEN_PREFIXES)
