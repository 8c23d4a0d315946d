"""Fetches a tokenizer's files from a hub repository at a commit, or from a local or fsspec folder.

Reads only tokenizer files and never runs a repository's code.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.huggingface import hub
from tasks.sources import remote
from tasks.tokenization.tokenizer_files import TEMPLATE, TEMPLATES

NAMES = (
    "tokenizer.json",
    "tekken.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    TEMPLATE,
)


def is_folder(source: str) -> bool:
    """Whether a tokenizer.source is a folder or URL rather than a hub repository."""
    return "://" in source or source[:1] in "./~" or source.count("/") > 1 or state_files.is_dir(Path(source))


def fetch_hub(repository: str, commit: str, token: str | None, into: Path) -> None:
    """Download only the tokenizer files of a repository."""
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class Silent(tqdm):  # the flow shows its own progress
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    def download() -> str:
        return snapshot_download(
            repository,
            revision=commit,
            token=token,
            allow_patterns=[*NAMES, f"{TEMPLATES}/*.jinja"],
            local_dir=into,
            tqdm_class=Silent,
        )

    hub.ask(download, "tokenizer.source", repository, commit)


def fetch_folder(source: str, into: Path) -> None:
    """Copy the tokenizer files of a local or fsspec folder. Raises ProfileError if it does not exist."""
    filesystem, paths = _list(source)
    for name, path in paths.items():
        target = into / name
        state_files.make_folder(target.parent)
        target.write_bytes(remote.cat_file(filesystem, path))


def folder_digest(source: str) -> str:
    """sha256 of a folder's tokenizer files, names and contents. Raises ProfileError if it does not exist."""
    filesystem, paths = _list(source)
    digest = hashlib.sha256()
    for name, path in paths.items():
        digest.update(name.encode())
        digest.update(hashlib.sha256(remote.cat_file(filesystem, path)).digest())
    return digest.hexdigest()


def _list(source: str) -> tuple[Any, dict[str, str]]:
    """The file system of a folder, and the paths of its tokenizer files by name."""
    filesystem, folder = remote.open_filesystem(source)
    info = remote.info(filesystem, folder)
    if info is None or info["type"] != "directory":
        raise ProfileError("tokenizer.source", source, "folder does not exist")
    endings = ("vocab.json", "merges.txt")
    found: dict[str, str] = {}
    for path in sorted(remote.call(filesystem, folder, lambda: filesystem.ls(folder, detail=False))):
        name = path.rstrip("/").rpartition("/")[2]
        if name == TEMPLATES:
            templates = remote.call(filesystem, path, partial(filesystem.ls, path, detail=False))
            found |= {
                f"{name}/{each.rpartition('/')[2]}": each
                for each in sorted(templates)
                if each.endswith(".jinja")
            }
        elif name in NAMES or path.endswith(endings):
            found[name] = path
    is_file = {path: (remote.info(filesystem, path) or {}).get("type") == "file" for path in found.values()}
    return filesystem, {name: path for name, path in found.items() if is_file[path]}
