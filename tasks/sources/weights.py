"""Pretrained weights from a local path, an object store (`s3://`) or a hub repository at a commit."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from modeling.conversion import formats
from modeling.conversion.choices import NEWEST, read_newest
from parallel.checkpoint import locations
from parallel.checkpoint.object_stores import find
from profiles.errors import ProfileError, closest_files
from profiles.files import retries, state_files
from profiles.files.folders import matches, walk
from profiles.huggingface import hub
from profiles.huggingface.config import GENERATION_CONFIG
from profiles.huggingface.hub import REPOSITORY, resolve_commit
from profiles.rules import credentials
from tasks import keys
from tasks.sources import remote
from tasks.sources.changes import unchanged_files
from tasks.sources.digest_cache import DigestCache
from tasks.sources.shard import SourceChanged, SourceError, local_state, remote_state, shown
from tasks.store.backends.backend import checked_path

EXTENSIONS = (".safetensors", ".bin", ".json")
# the marker of a run's complete checkpoint
MARKED = re.compile(rf"checkpoints/{locations.STEP.pattern}/{re.escape(locations.MARKER)}")
CONFIGS = ("config.json", "adapter_config.json")  # that may lie beside NxD shards
PARALLEL_FILES = 4


@contextmanager
def fetch(
    source: str,
    revision: str | None,
    target: Path,
    token: str | None = None,
    key: str = "SOURCE",
    checkpoints: int = 1,
) -> Iterator[Path]:
    """Local path of a checkpoint, downloaded if remote; for a run folder, its latest complete checkpoint.

    Of a run folder in an object store, the path has its latest complete checkpoints only, and `formats.locate` finds the latest.

    A hub repository stays in the hub's cache. Files of an object store are kept in a hidden folder next to `target` until the
    block ends, so that an interrupted download resumes with the missing files.

    Args:
        key: name of the source's setting, for errors.
        checkpoints: number of checkpoints to download from a run folder in an object store.

    Raises:
        ProfileError: there is no such file, folder or repository.
        SourceChanged: a file changed during the block or the download.
    """
    path = Path(source).expanduser()
    if "://" not in source:
        if state_files.exists(path):
            path = formats.locate(path)

            def states() -> dict[str, str]:
                return {str(file): local_state(file) for file in _files(path, key)}

            with unchanged_files(states, states()):
                yield path
        elif REPOSITORY.fullmatch(source):
            yield _download_from_hub(source, resolve_commit(source, revision, token, key), token, key)
        else:
            reason = "there is no such file or folder, and it is not a repository's name"
            raise ProfileError(key, source, reason, closest_files(source))
        return
    filesystem, root, infos = _find_remote(source, key)
    needed = _needed(filesystem, root, infos, checkpoints)
    remote_files = _by_name(source, root, infos, needed, key)
    version = keys.digest(remote_files)[:12]  # keeps partial downloads of different versions apart
    folder = target.with_name(f".{target.name}.source-{version}")
    _download_folder(source, filesystem, root, remote_files, folder, key)
    if _by_name(source, root, _find_remote(source, key)[2], needed, key) != remote_files:
        raise SourceChanged(source)
    yield folder
    for leftover in matches(target.parent, f".{target.name}.source-*"):
        shutil.rmtree(leftover)


def pin(
    source: str, revision: str | None, token: str | None, key: str, digests: DigestCache
) -> dict[str, str | None]:
    """`digest` of a source's weights, from contents, ETags, times or hub commit, and any `commit`.

    Raises ProfileError for the setting `key` if the source does not exist.
    """
    path = Path(source).expanduser()
    if "://" in source:
        filesystem, root, infos = _find_remote(source, key)
        needed = _needed(filesystem, root, infos)
        listed = [
            [path, info["size"], info.get("ETag") or remote_state(path, info)]
            for path, info in sorted(infos.items())
            if _name(root, path).startswith(needed)
        ]
        return {"digest": keys.digest(listed), "commit": None}
    if not state_files.exists(path):
        commit = resolve_commit(source, revision, token, key)
        return {"digest": keys.digest([source, commit]), "commit": commit}
    path = formats.locate(path)
    # The adapter in a LoRA export is not part of the merged weights, and contains the path of its base weights.
    files = [file for file in _files(path, key) if file.parent != path / "adapter"]
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        contents = [*pool.map(digests.sha256, files)]
    names = [file.relative_to(path).as_posix() for file in files]
    return {"digest": keys.digest([*zip(names, contents, strict=True)]), "commit": None}


def _files(path: Path, key: str) -> list[Path]:
    """A file, or all regular files of a folder, sorted. Raises OSError if a folder cannot be read."""
    if not state_files.is_dir(path):
        return [path]

    paths = [path / name for name, _ in walk(path)]
    for file in paths:
        if shown(str(file)) != str(file):
            raise ProfileError(key, shown(str(file)), "has a name that is not UTF-8; rename it")
    return sorted(file for file in paths if state_files.is_file(file))


def _download_from_hub(repository: str, commit: str, token: str | None, key: str) -> Path:
    """Download the configuration and weights of a repository, in one format."""
    from huggingface_hub import HfApi, snapshot_download

    api = HfApi(token=token)
    siblings = hub.ask(lambda: api.model_info(repository, revision=commit).siblings, key, repository, commit)
    patterns = select_files([file.rfilename for file in siblings or ()], key, repository)

    def download() -> Path:
        return Path(snapshot_download(repository, revision=commit, token=token, allow_patterns=patterns))

    return hub.ask(download, key, repository, commit)


def _by_name(
    source: str, root: str, infos: dict[str, dict[str, Any]], needed: tuple[str, ...], key: str
) -> dict[str, tuple[int, str]]:
    """Size and state of each file of a remote folder whose name begins with one of `needed`, by name.

    Raises ProfileError if a name leads out of the folder.
    """
    by_name = {_name(root, path): info for path, info in infos.items()}
    try:
        names = {checked_path(name): info for name, info in by_name.items() if name.startswith(needed)}
    except ValueError as error:
        raise ProfileError(key, source, str(error)) from None
    return {name: (info["size"], remote_state(name, info)) for name, info in names.items()}


def _name(root: str, path: str) -> str:
    """A file's name in its remote folder."""
    return path.removeprefix(root).lstrip("/")


def _needed(
    filesystem: Any, root: str, infos: dict[str, dict[str, Any]], checkpoints: int = 1
) -> tuple[str, ...]:
    """Beginnings of the names of the files that a conversion reads from a remote folder.

    Of a run, those of its latest complete checkpoints; of NxD's training run, those of the model in its newest checkpoint.
    """
    names = {_name(root, path) for path in infos}
    steps = [int(match[1]) for match in map(MARKED.fullmatch, names) if match]
    if steps:
        return tuple(f"checkpoints/step_{step}/" for step in sorted(steps)[-checkpoints:])
    if NEWEST in names and not any(name.startswith("model/") for name in names):
        path = f"{root}/{NEWEST}"
        try:
            tag = read_newest(remote.cat_file(filesystem, path), path)
        except ValueError as error:
            raise SourceError(str(error)) from error
        if any(name.startswith(f"{tag}/model/") for name in names):
            configs = (*CONFIGS, *(f"{tag}/{name}" for name in CONFIGS))
            return (NEWEST, f"{tag}/model/", *configs)
    return ("",)


def _find_remote(source: str, key: str) -> tuple[Any, str, dict[str, dict[str, Any]]]:
    """File system and root of a remote folder, and fsspec's info on each of its files, by path.

    Raises ProfileError if there is no such folder, or the URL has credentials.
    """
    credentials.require_none(key, source)
    filesystem, root = remote.open_filesystem(source)
    infos = remote.call(filesystem, root, lambda: find(filesystem, root))
    if not infos:
        raise ProfileError(key, source, "there is no such folder, or it is empty")
    return filesystem, root, infos


def _download_folder(
    source: str, filesystem: Any, root: str, states: dict[str, tuple[int, str]], folder: Path, key: str
) -> None:
    """Download a remote folder's files that are missing locally; of a Hugging Face folder, one format."""
    names = [*states]
    if any("/" not in name and name.endswith(EXTENSIONS[:2]) for name in names):
        names = select_files(names, key, source)

    def download(name: str) -> None:
        path = folder / name
        if state_files.is_file(path) and path.stat().st_size == states[name][0]:
            return
        state_files.make_folder(path.parent)
        partial = path.with_name(f".{path.name}.partial")
        remote.get_file(filesystem, f"{root}/{name}", partial)
        os.replace(partial, path)

    retries.call_in_threads(download, names, PARALLEL_FILES)


def select_files(names: list[str], key: str, source: str) -> list[str]:
    """Configs, index, weights (safetensors if any) of a Hugging Face folder. Raises ProfileError if none."""
    top = [name for name in names if PurePosixPath(name).name == name and name.endswith(EXTENSIONS)]
    for stem, extension in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        if files := [name for name in top if name.startswith(stem) and name.endswith(extension)]:
            others = ("config.json", GENERATION_CONFIG, f"{stem}{extension}.index.json")
            return [*files, *(name for name in top if name in others)]
    reason = "has neither model.safetensors nor pytorch_model.bin, in one file or sharded"
    raise ProfileError(key, source, reason)
