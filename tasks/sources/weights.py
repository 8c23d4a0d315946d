"""Where pretrained weights come from: a folder here, one that fsspec reaches (`s3://`), or a hub repository at a commit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from modeling.conversion import formats
from modeling.conversion.torch_files import stamp
from profiles.errors import ProfileError
from profiles.hub import REPOSITORY, hub_errors, resolve_commit
from tasks import keys

ENDINGS = (".safetensors", ".bin", ".json")
TRANSFERS = 4  # files at a time


@contextmanager
def fetched(
    source: str, revision: str | None, near: Path, token: str | None = None, key: str = "SOURCE"
) -> Iterator[Path]:
    """The checkpoint's files on this machine, for the block.

    A hub repository lies in the hub's own cache afterwards. What comes from a bucket lies beside `near` until it is used, so
    that an interrupted transfer goes on with the files that are missing.

    Args:
        source: path, URL or repository.
        key: what to call the source where it is refused.

    Raises:
        ProfileError: there is no such thing.
    """
    path = Path(source).expanduser()
    if "://" not in source:
        if path.exists():
            yield path
        elif REPOSITORY.fullmatch(source):
            yield from_hub(source, resolve_commit(source, revision, token, key), token, key)
        else:
            raise ProfileError(
                key, source, "there is no such file or folder, and no hub repository is named so"
            )
        return
    folder = near.with_name(f".{near.name}.source")
    from_bucket(source, folder, key)
    yield folder
    shutil.rmtree(folder)


def identity(source: str, revision: str | None, token: str | None, key: str, memory: Path) -> str:
    """What determines the weights at a source: their files' contents, or the commit of a hub repository.

    Contents of files here are hashed once and remembered until a file's number, size or time changes; of those in a bucket the
    bucket's own tags are taken.

    Args:
        memory: folder of what is remembered.

    Raises:
        ProfileError: there is no such thing.
    """
    path = Path(source).expanduser()
    if "://" in source:
        from fsspec.core import url_to_fs

        filesystem, root = url_to_fs(source)
        found = filesystem.find(root, detail=True)
        return keys.digest([[name, info["size"], info.get("ETag")] for name, info in sorted(found.items())])
    if not path.exists():
        return keys.digest([source, resolve_commit(source, revision, token, key)])
    path = formats.locate(path)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    stats = [[each.relative_to(path).as_posix(), *stamp(each)] for each in files]
    remembered = memory / f"{keys.digest(stats)}.txt"
    if not remembered.exists():
        with ThreadPoolExecutor(TRANSFERS) as pool:
            contents = [*pool.map(keys.file_digest, files)]
        names = [name for name, *_ in stats]
        remembered.write_text(keys.digest([*zip(names, contents, strict=True)]))
    return remembered.read_text()


def from_hub(repository: str, commit: str, token: str | None, key: str) -> Path:
    """Download a repository's configuration and weights, of several forms the first that conversion reads."""
    from huggingface_hub import HfApi, snapshot_download

    with hub_errors(key, repository, commit):
        names = [
            each.rfilename for each in HfApi(token=token).model_info(repository, revision=commit).siblings
        ]
        return Path(
            snapshot_download(
                repository, revision=commit, token=token, allow_patterns=chosen(names, key, repository)
            )
        )


def from_bucket(source: str, folder: Path, key: str) -> None:
    """Copy a folder's files that are not there yet."""
    from fsspec.core import url_to_fs

    filesystem, root = url_to_fs(source)
    found = filesystem.find(root, detail=True)
    names = {path.removeprefix(root).lstrip("/"): info["size"] for path, info in found.items()}
    if not names:
        raise ProfileError(key, source, "there is no such folder, or it is empty")
    if any("/" not in name and name.endswith(ENDINGS[:2]) for name in names):
        names = {name: names[name] for name in chosen([*names], key, source)}

    def copy(name: str) -> None:
        path = folder / name
        if path.is_file() and path.stat().st_size == names[name]:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        filesystem.get_file(f"{root}/{name}", str(partial))
        os.replace(partial, path)

    with ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(copy, names))


def chosen(names: list[str], key: str, source: str) -> list[str]:
    """Of a Hugging Face folder's files those to read: configuration, index and weights, of several forms the first.

    Raises:
        ProfileError: there are no weights.
    """
    top = [name for name in names if PurePosixPath(name).name == name and name.endswith(ENDINGS)]
    for stem, ending in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        files = [name for name in top if name.startswith(stem) and name.endswith(ending)]
        if files:
            index = f"{stem}{ending}.index.json"
            return [*files, *(name for name in top if name in ("config.json", index))]
    raise ProfileError(
        key, source, "has no model.safetensors and no pytorch_model.bin, nor numbered parts of one"
    )
