"""Sources on the Hugging Face hub: which files make up a configuration and split of a data set, at one commit.

`datasets` finds the files; they are read as any others are, over the network or from its cache. No code of a repository is run:
one that is only a loading script is refused with the revision that holds its converted files, where the hub has made one.
"""

from __future__ import annotations

import re
from typing import Any

from profiles.errors import ProfileError
from profiles.schema import Source
from tasks.sources.files import ENDINGS, cut, described, ending
from tasks.sources.shard import HUB, Shard
from tasks.store.digest_cache import DigestCache

CONVERTED = "refs/convert/parquet"  # where the hub keeps a data set's tables


def shards(source: Source, key: str, column: str, digests: DigestCache, token: str | None) -> list[Shard]:
    """All shards of a data set's split.

    Raises:
        ProfileError: no such data set, configuration or split; a loading script; files of no known format.
    """
    commit = _commit(source, key, token)
    if source.revision == CONVERTED:
        paths = _converted(source, key, commit, token)
    else:
        paths = _files(source, key, commit, token)
    for path in paths:
        if not ending(path):
            reason = f"has {path.rpartition('/')[2]}, which is of no known format"
            raise ProfileError(f"{key}.repository", source.repository, reason, tuple(ENDINGS))
    found = cut(described(paths, False, digests, token), source, column, digests, token)
    return [
        Shard(**{**vars(shard), "fetch": not source.streaming, "name": shard.name.removeprefix(HUB)})
        for shard in found
    ]


def _commit(source: Source, key: str, token: str | None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    repository = source.repository
    try:
        return HfApi(token=token).dataset_info(repository, revision=source.revision).sha
    except GatedRepoError:  # a kind of the next
        reason = "is gated: accept its terms on the hub, and set HF_TOKEN to a token of that account"
        raise ProfileError(f"{key}.repository", repository, reason) from None
    except RepositoryNotFoundError:
        reason = "is no data set on the hub, or a private one that needs HF_TOKEN"
        raise ProfileError(f"{key}.repository", repository, reason) from None
    except RevisionNotFoundError:
        reason = f"{repository} has no such revision"
        raise ProfileError(f"{key}.revision", source.revision, reason) from None


def _files(source: Source, key: str, commit: str, token: str | None) -> list[str]:
    """URLs of the split's files, in the data set's own order."""
    from datasets import load_dataset_builder

    repository = source.repository
    try:
        builder = load_dataset_builder(repository, source.config, revision=commit, token=token)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        raise _script(source, key, token) from None
    except ValueError as error:
        names = re.findall(r"'([^']+)'", str(error).partition("Example")[0].partition("vailable")[2])
        reason = "has several configurations" if source.config is None else "has no such configuration"
        if not names:
            raise ProfileError(f"{key}.repository", repository, " ".join(str(error).split())) from None
        raise ProfileError(f"{key}.config", source.config, f"{repository} {reason}", names) from None
    files: dict[Any, list[str]] = builder.config.data_files or {}
    splits = {str(split): list(paths) for split, paths in files.items()}
    if source.split not in splits:
        reason = f"{repository} has no such split"
        raise ProfileError(f"{key}.split", source.split, reason, sorted(splits))
    return splits[source.split]


def _converted(source: Source, key: str, commit: str, token: str | None) -> list[str]:
    """URLs in the hub's own layout: <configuration>/<split>/0000.parquet, or partial-<split> where not all is converted."""
    from huggingface_hub import HfApi

    names = HfApi(token=token).list_repo_files(source.repository, revision=commit, repo_type="dataset")
    tables = sorted(name for name in names if name.endswith(".parquet") and name.count("/") == 2)
    configs = sorted({name.split("/")[0] for name in tables})
    config = source.config or (
        "default" if "default" in configs else configs[0] if len(configs) == 1 else None
    )
    if config not in configs:
        reason = f"{source.repository} has " + ("several configurations" if config is None else "no such one")
        raise ProfileError(f"{key}.config", source.config, reason, configs)
    own = [name for name in tables if name.startswith(f"{config}/")]
    found = [name for name in own if name.split("/")[1] in (source.split, f"partial-{source.split}")]
    if not found:
        splits = sorted({name.split("/")[1] for name in own})
        raise ProfileError(f"{key}.split", source.split, f"{source.repository} has no such split", splits)
    return [f"{HUB}{source.repository}@{commit}/{name}" for name in found]


def _script(source: Source, key: str, token: str | None) -> ProfileError:
    """What to say of a data set that is a program."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    reason = f"{source.repository} is a loading script at this revision, and no code of a repository is run"
    try:
        HfApi(token=token).dataset_info(source.repository, revision=CONVERTED)
    except HfHubHTTPError:
        reason += f"; the hub has no {CONVERTED} of it either: take a data set that has its files as parquet"
        return ProfileError(f"{key}.repository", source.repository, reason)
    return ProfileError(f"{key}.revision", source.revision or "main", reason, [CONVERTED])
