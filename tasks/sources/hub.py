"""Sources on the Hugging Face hub: the files of a dataset's configuration and split, at one commit.

`datasets` finds the files; they are read like any others, over the network or from the hub's cache. A repository's code never
runs: a dataset with a loading script is rejected, naming the revision with its parquet files if the hub has converted it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from profiles.errors import FEW, ProfileError, closest
from profiles.huggingface import hub as huggingface
from profiles.schema import Source
from profiles.sections.base import required
from tasks.sources.digest_cache import DigestCache
from tasks.sources.file_shards import split_files
from tasks.sources.files import describe_files, require_known_formats
from tasks.sources.shard import HUB_PREFIX, Shard

CONVERTED = "refs/convert/parquet"  # revision with the hub's parquet conversion of a dataset


def shards(source: Source, key: str, column: str, digests: DigestCache, token: str | None) -> list[Shard]:
    """Shards of a dataset's split. Raises ProfileError for an unknown name or format or a loading script."""
    from huggingface_hub import HfApi

    repository, revision = required(source.repository), source.revision
    where = f"{key}.repository", repository
    api = HfApi(token=token)
    commit = huggingface.ask(lambda: api.dataset_info(repository, revision=revision).sha, *where, revision)
    if commit is None:  # the hub's answers have one, a mirror's may not
        raise ProfileError(*where, "the hub does not name the dataset's commit")
    find = _converted_files if revision == CONVERTED else _split_files
    paths = find(source, key, commit, token)
    require_known_formats(paths, *where)
    files = describe_files(paths, False, digests, token)
    return [
        replace(shard, fetch=not source.streaming, name=shard.name.removeprefix(HUB_PREFIX))
        for shard in split_files(files, source, column, digests, token)
    ]


def _split_files(source: Source, key: str, commit: str, token: str | None) -> list[str]:
    """URLs of the split's files, in the dataset's order."""
    from datasets import load_dataset_builder

    repository = required(source.repository)
    try:
        builder = huggingface.ask(
            lambda: load_dataset_builder(repository, source.config, revision=commit, token=token),
            *(f"{key}.repository", repository, commit),
        )
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        raise _loading_script_error(source, key, token) from None
    except ValueError as error:
        names = re.findall(r"'([^']+)'", str(error).partition("Example")[0].partition("vailable")[2])
        reason = "has several configurations" if source.config is None else "has no such configuration"
        if not names:
            raise ProfileError(f"{key}.repository", repository, " ".join(str(error).split())) from None
        reason += "; its page on the hub lists all" if len(names) > FEW else ""
        close = closest(source.config or "", names)
        raise ProfileError(f"{key}.config", source.config, f"{repository} {reason}", close) from None
    files: dict[Any, list[str]] = builder.config.data_files or {}
    if not files:  # if the hub does not answer, `datasets` uses a cached module without files
        raise ConnectionError(f"{repository}: the hub is unreachable: the list of its files cannot be read")
    splits = {str(split): list(paths) for split, paths in files.items()}
    if source.split not in splits:
        reason = f"{repository} has no such split"
        raise ProfileError(f"{key}.split", source.split, reason, sorted(splits))
    return splits[source.split]


def _converted_files(source: Source, key: str, commit: str, token: str | None) -> list[str]:
    """URLs in the hub's conversion: <configuration>/<split>/0000.parquet, partial-<split> if incomplete."""
    from huggingface_hub import HfApi

    repository = required(source.repository)
    names = huggingface.ask(
        lambda: HfApi(token=token).list_repo_files(repository, revision=commit, repo_type="dataset"),
        *(f"{key}.repository", repository, commit),
    )
    tables = sorted(name for name in names if name.endswith(".parquet") and name.count("/") == 2)
    configs = sorted({name.split("/")[0] for name in tables})
    only = configs[0] if len(configs) == 1 else None
    config = source.config or ("default" if "default" in configs else only)
    if config not in configs:
        reason = "has several configurations" if config is None else "has no such configuration"
        raise ProfileError(f"{key}.config", source.config, f"{repository} {reason}", configs)
    tables = [name for name in tables if name.startswith(f"{config}/")]
    found = [name for name in tables if name.split("/")[1] in (source.split, f"partial-{source.split}")]
    if not found:
        splits = sorted({name.split("/")[1] for name in tables})
        raise ProfileError(f"{key}.split", source.split, f"{repository} has no such split", splits)
    return [f"{HUB_PREFIX}{repository}@{commit}/{name}" for name in found]


def _loading_script_error(source: Source, key: str, token: str | None) -> ProfileError:
    from huggingface_hub import HfApi

    repository, api = required(source.repository), HfApi(token=token)
    where = f"{key}.repository", repository
    reason = f"{repository} has a loading script at this revision, and its code is never run"
    try:
        huggingface.ask(lambda: api.dataset_info(repository, revision=CONVERTED), *where, CONVERTED)
    except ProfileError:
        reason += f", and the hub has no {CONVERTED} of it; choose a dataset with parquet files"
        return ProfileError(*where, reason)
    return ProfileError(f"{key}.revision", source.revision or "main", reason, [CONVERTED])
