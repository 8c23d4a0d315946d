"""Pretrained weights from a local file or folder, an object store (`s3://`), or a hub repository at a commit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from modeling.conversion import formats
from profiles.errors import ProfileError
from profiles.hub import REPOSITORY, hub_errors, resolve_commit
from tasks import keys
from tasks.store.digest_cache import DigestCache

EXTENSIONS = (".safetensors", ".bin", ".json")
PARALLEL_FILES = 4


@contextmanager
def fetch(
    source: str, revision: str | None, target: Path, token: str | None = None, key: str = "SOURCE"
) -> Iterator[Path]:
    """Local path of a checkpoint for the block, downloaded if it is remote.

    A hub repository stays in the hub's cache. Files of an object store are kept in a hidden folder next to `target` until the
    block ends, so that an interrupted download resumes with the missing files.

    Args:
        key: name of the source's setting, for errors.

    Raises:
        ProfileError: there is no such file, folder or repository.
    """
    path = Path(source).expanduser()
    if "://" not in source:
        if path.exists():
            yield path
        elif REPOSITORY.fullmatch(source):
            yield _download_from_hub(source, resolve_commit(source, revision, token, key), token, key)
        else:
            reason = "there is no such file or folder, and it is not a repository's name"
            raise ProfileError(key, source, reason)
        return
    folder = target.with_name(f".{target.name}.source")
    _download_folder(source, folder, key)
    yield folder
    shutil.rmtree(folder)


def pin(
    source: str, revision: str | None, token: str | None, key: str, digests: DigestCache
) -> dict[str, str | None]:
    """`digest` of the weights at a source, from their contents, an object store's ETags or the hub, and the hub's `commit`.

    Raises ProfileError for the setting `key` if there is nothing.
    """
    path = Path(source).expanduser()
    if "://" in source:
        from fsspec.core import url_to_fs

        filesystem, root = url_to_fs(source)
        found = filesystem.find(root, detail=True)
        listed = [[name, info["size"], info.get("ETag")] for name, info in sorted(found.items())]
        return {"digest": keys.digest(listed), "commit": None}
    if not path.exists():
        commit = resolve_commit(source, revision, token, key)
        return {"digest": keys.digest([source, commit]), "commit": commit}
    path = formats.locate(path)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        contents = [*pool.map(digests.sha256, files)]
    names = [file.relative_to(path).as_posix() for file in files]
    return {"digest": keys.digest([*zip(names, contents, strict=True)]), "commit": None}


def _download_from_hub(repository: str, commit: str, token: str | None, key: str) -> Path:
    """Download the configuration and weights of a repository, in one format."""
    from huggingface_hub import HfApi, snapshot_download

    with hub_errors(key, repository, commit):
        siblings = HfApi(token=token).model_info(repository, revision=commit).siblings
        patterns = select_files([file.rfilename for file in siblings], key, repository)
        return Path(snapshot_download(repository, revision=commit, token=token, allow_patterns=patterns))


def _download_folder(source: str, folder: Path, key: str) -> None:
    """Download the files of a remote folder that are missing locally; of a Hugging Face folder only one format."""
    from fsspec.core import url_to_fs

    filesystem, root = url_to_fs(source)
    found = filesystem.find(root, detail=True)
    sizes = {path.removeprefix(root).lstrip("/"): info["size"] for path, info in found.items()}
    if not sizes:
        raise ProfileError(key, source, "there is no such folder, or it is empty")
    if any("/" not in name and name.endswith(EXTENSIONS[:2]) for name in sizes):
        sizes = {name: sizes[name] for name in select_files([*sizes], key, source)}

    def download(name: str) -> None:
        path = folder / name
        if path.is_file() and path.stat().st_size == sizes[name]:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        filesystem.get_file(f"{root}/{name}", str(partial))
        os.replace(partial, path)

    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        list(pool.map(download, sizes))


def select_files(names: list[str], key: str, source: str) -> list[str]:
    """Of a Hugging Face folder, the configuration, index and weights (safetensors if any). Raises ProfileError if none."""
    top = [name for name in names if PurePosixPath(name).name == name and name.endswith(EXTENSIONS)]
    for stem, extension in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        if files := [name for name in top if name.startswith(stem) and name.endswith(extension)]:
            index = f"{stem}{extension}.index.json"
            return [*files, *(name for name in top if name in ("config.json", index))]
    reason = "has neither model.safetensors nor pytorch_model.bin, in one file or sharded"
    raise ProfileError(key, source, reason)
