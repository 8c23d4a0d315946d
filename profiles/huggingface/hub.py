"""Hugging Face hub: retried calls that raise ProfileError, config.json files, commits of revisions."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from profiles.errors import ProfileError
from profiles.files import retries, retry_policies

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT = 30.0  # seconds without an answer, after which a request fails and is retried
T = TypeVar("T")
_client_lock = threading.Lock()


def ask(
    call: Callable[[], T],
    key: str,
    repository: str,
    revision: str | None = None,
    delays: Sequence[float] = retry_policies.NETWORK.delays,
) -> T:
    """The result of a hub client call, retried while the hub throttles, fails or is unreachable.

    Raises:
        ProfileError: for the profile key `key`: no such repository or revision, or no access; never retried.
        ConnectionError: the hub did not answer during all `delays`.
    """
    set_timeout()
    with hub_errors(key, repository, revision):
        return retries.call(call, f"{repository}: the hub is unreachable", delays)


def set_timeout() -> None:
    """Apply TIMEOUT to all requests of this process's hub client that have no timeout."""
    with _client_lock:  # another thread may already be using the client, which replacing it closes
        _replace_client()


@cache
def _replace_client() -> None:
    from huggingface_hub import get_session, set_client_factory

    default = get_session()
    make, before = type(default), default.event_hooks
    hooks: dict[str, list[Callable[..., Any]]] = {
        "request": [*before["request"], _limit],
        "response": [*before["response"], _reject_page],
    }
    set_client_factory(lambda: make(event_hooks=hooks, follow_redirects=True, timeout=TIMEOUT))


def _limit(request: Any) -> None:
    """Set a request's missing timeouts: `HfApi` disables the client's own, by default or always."""
    timeouts = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        name: TIMEOUT if seconds is None else seconds for name, seconds in timeouts.items()
    }


def _reject_page(response: Any) -> None:
    """Raise ConnectionError for a web page in place of an answer, as from a captive portal."""
    page = response.is_success and response.headers.get("Content-Type", "").startswith("text/html")
    if page and not response.url.path.endswith((".html", ".htm")):
        reason = "answered with a web page, perhaps a captive portal's or a proxy's; check the network"
        raise ConnectionError(f"{response.url.host}: {reason}")


def config_json(repository: str, key: str) -> Path:
    """Fetch a repository's config.json, unless the hub cache has the current one.

    Raises:
        ProfileError: for the profile key `key`: there is none.
        ConnectionError: the hub is unreachable, and its cache on this machine does not have the file.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    name, _, suffix = repository.partition("@")
    revision = suffix or None

    def download() -> Path:
        return Path(hf_hub_download(name, "config.json", revision=revision))

    try:
        return ask(download, key, repository, revision, delays=())  # a user is waiting, the client retries
    except LocalEntryNotFoundError:  # subclass of EntryNotFoundError; the hub client is offline
        raise ProfileError(
            key, repository, "the hub cache does not have it, and HF_HUB_OFFLINE is set"
        ) from None
    except EntryNotFoundError:
        raise ProfileError(key, repository, "the repository has no config.json") from None
    except ConnectionError:
        raise
    except OSError as error:
        raise ProfileError(key, repository, f"cannot be fetched: {error}") from error


@contextmanager
def hub_errors(key: str, repository: str, revision: str | None) -> Iterator[None]:
    """Translate hub errors to ProfileError for a key, and network failures to ConnectionError."""
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except OfflineModeIsEnabled:
        reason = "cannot query the hub: HF_HUB_OFFLINE is set; unset it, or use local files"
        raise ProfileError(key, repository, reason) from None
    except GatedRepoError:  # subclass of RepositoryNotFoundError
        reason = "is gated: accept its terms on the hub, and set HF_TOKEN to a token of that account"
        raise ProfileError(key, repository, reason) from None
    except RepositoryNotFoundError:
        reason = "is neither a local folder nor a hub repository; set HF_TOKEN if it is private"
        raise ProfileError(key, repository, reason) from None
    except RevisionNotFoundError:
        revision_keys = {"SOURCE": "--revision", "model.config": key}
        revision_key = revision_keys.get(key, f"{key.rpartition('.')[0]}.revision")
        raise ProfileError(revision_key, revision, f"{repository} has no such revision") from None
    except Exception as error:
        # By name: httpx, or whatever the hub client uses instead.
        if not any(kind.__name__ == "TransportError" for kind in type(error).__mro__):
            raise
        raise ConnectionError(f"{repository}: the hub is unreachable: {error}") from error


def resolve_commit(repository: str, revision: str | None, token: str | None, key: str) -> str:
    """Current commit of a model repository's revision; a commit is returned without a request.

    Raises ProfileError for the profile key `key` if there is no such revision or the token (None: HF_TOKEN) has no access.
    """
    if revision and COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    commit = ask(lambda: api.model_info(repository, revision=revision).sha, key, repository, revision)
    if commit is None:
        raise ProfileError(key, repository, "the hub does not tell its commit; set a revision")
    return commit
