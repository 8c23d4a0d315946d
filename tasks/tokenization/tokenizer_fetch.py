"""Fetches a tokenizer's files from a hub repository at a commit, or from a local or fsspec folder.

Reads only tokenizer files and never runs a repository's code.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from profiles.errors import ProfileError
from profiles.hub import hub_errors

NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "chat_template.jinja",
)


def is_folder(source: str) -> bool:
    """Whether a tokenizer.source is a folder or URL rather than a hub repository."""
    return "://" in source or source[:1] in "./~" or source.count("/") > 1 or Path(source).is_dir()


def fetch_hub(repository: str, commit: str, token: str | None, into: Path) -> None:
    """Download only the tokenizer files of a repository."""
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class Silent(tqdm):  # the flow shows its own progress
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    with hub_errors("tokenizer.source", repository, commit):
        options = {"allow_patterns": list(NAMES), "local_dir": into, "tqdm_class": Silent}
        snapshot_download(repository, revision=commit, token=token, **options)


def fetch_folder(source: str, into: Path) -> None:
    """Copy the tokenizer files of a local or fsspec folder. Raises ProfileError if it does not exist."""
    filesystem, paths = _list(source)
    for path in paths:
        filesystem.get_file(path, str(into / path.rpartition("/")[2]))


def folder_digest(source: str) -> str:
    """sha256 of the names and contents of a folder's tokenizer files. Raises ProfileError if it does not exist."""
    filesystem, paths = _list(source)
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.rpartition("/")[2].encode())
        with filesystem.open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _list(source: str) -> tuple[Any, list[str]]:
    from fsspec.core import url_to_fs

    filesystem, folder = url_to_fs(source)
    if not filesystem.isdir(folder):
        raise ProfileError("tokenizer.source", source, "folder does not exist")
    endings = ("vocab.json", "merges.txt")
    paths = sorted(path for path in filesystem.ls(folder, detail=False) if filesystem.isfile(path))
    return filesystem, [path for path in paths if path.rpartition("/")[2] in NAMES or path.endswith(endings)]
