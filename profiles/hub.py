"""What profiles take from the Hugging Face hub: a model's config.json; and the hub's refusals in a profile's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profiles.errors import ProfileError

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")


def config_json(repository: str, key: str) -> Path:
    """A repository's config.json, fetched unless it is in the hub's own cache and current.

    Raises:
        ProfileError: no such repository or file, or one that may not be read, or no way to the hub.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    name, _, revision = repository.partition("@")
    try:
        with hub_errors(key, repository, revision or None):
            return Path(hf_hub_download(name, "config.json", revision=revision or None))
    except LocalEntryNotFoundError:  # a kind of the next
        reason = "cannot be fetched: the hub does not answer, and its cache here lacks it"
        raise ProfileError(key, repository, reason) from None
    except EntryNotFoundError:
        raise ProfileError(key, repository, "the repository has no config.json") from None
    except OSError as error:
        raise ProfileError(key, repository, f"cannot be fetched: {error}") from error


@contextmanager
def hub_errors(key: str, repository: str, revision: str | None) -> Iterator[None]:
    """Turns the hub's refusals of what a key names into the profile's, and its silence into a ConnectionError."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except GatedRepoError:  # a kind of the next
        reason = "is gated: accept its terms on the hub, and set HF_TOKEN to a token of that account"
        raise ProfileError(key, repository, reason) from None
    except RepositoryNotFoundError:
        reason = "is no folder here and no repository on the hub, or a private one that needs HF_TOKEN"
        raise ProfileError(key, repository, reason) from None
    except RevisionNotFoundError:
        own = {"SOURCE": "--revision", "model.config": key}
        where = own.get(key, f"{key.rpartition('.')[0]}.revision")
        raise ProfileError(where, revision, f"{repository} has no such revision") from None
    except Exception as error:
        if not any(
            kind.__name__ == "TransportError" for kind in type(error).__mro__
        ):  # of httpx, or its heir
            raise
        raise ConnectionError(f"{repository}: the hub does not answer: {error}") from error


def resolve_commit(repository: str, revision: str | None, token: str | None, key: str) -> str:
    """The commit that a revision of a model repository points to now; a commit is returned without a request.

    Args:
        token: for the hub; None takes HF_TOKEN.
        key: profile key named in errors.

    Raises:
        ProfileError: no such repository or revision, or no access with this token.
    """
    if revision and COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    with hub_errors(key, repository, revision):
        return HfApi(token=token).model_info(repository, revision=revision).sha
