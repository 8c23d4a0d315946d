"""URLs with credentials in profiles."""

import pytest

from profiles import resolve
from profiles.errors import ProfileError


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.sources.0.path", "s3://key:secret@bucket/texts"),  # a source that also has no use for a path
        ("data.sources.0.path", "simplecache::https://secret@host/texts"),
        ("init.from", "s3://key:secret@bucket/weights"),
        ("tokenizer.source", "https://me:secret@host/tokenizer"),
    ],
)
def test_credentials_in_a_url_are_rejected_without_repeating_them(key, value):
    with pytest.raises(ProfileError) as caught:
        resolve.check(resolve.load("tiny", [f"{key}={value}"]))
    assert caught.value.key == key
    assert "has credentials in a URL" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_user_in_a_url_that_is_no_credential_is_accepted():
    resolve.check(resolve.load("tiny", ["init.from=abfs://container@account.dfs.core.windows.net/weights@2"]))
