"""Rule for all keys: URLs contain no credentials, because profiles, reports and parameters are stored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from profiles.errors import ProfileError

if TYPE_CHECKING:
    from profiles.schema import Profile

# A user alone is none, except over HTTP, where it may be a token: abfs://container@account has no credentials.
CREDENTIALS = re.compile(r"https?://[^/?#]*@|://[^/?#]*:[^/?#]*@")
# In messages of other programs, whose passwords may contain any character but a space.
USER_INFO = re.compile(r"://\S*@")
REASON = (
    "has credentials in a URL, which would be stored with the run; remove them and set, for s3://, AWS_PROFILE, or "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for the hub, HF_TOKEN; for https://, a .netrc file and "
    """FSSPEC_HTTPS_CLIENT_KWARGS='{"trust_env": true}'"""
)


def check(profile: Profile) -> None:
    """Check all strings of a profile. Raises ProfileError, without the value, for the first that has any."""
    for key, text in _strings("", profile.model_dump()):
        require_none(key, text)


def require_none(key: str, text: str) -> None:
    """Raise ProfileError, without the value, if a setting has a URL with credentials."""
    if CREDENTIALS.search(text):
        raise ProfileError(key, None, REASON)


def redacted(message: str) -> str:
    """A message without the users and passwords of its URLs."""
    return USER_INFO.sub("://…@", message)


def _strings(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each string in a value of a profile, with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list | tuple):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _strings(f"{key}.{name}".lstrip("."), part)
