"""Rules for `tokenizer` and `init`: the size of the vocabulary, and where files are read from."""

from __future__ import annotations

from pathlib import Path

from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.local_paths import REPOSITORY, RUN, searched
from profiles.schema import Profile


def check_vocabulary(profile: Profile) -> None:
    """Raise ProfileError if the tokenizer's vocabulary is missing or larger than the model's."""
    size, embeddings = profile.tokenizer.vocabulary_size, profile.model.vocab_size
    if profile.tokenizer.source == "train" and size is None:
        reason = "is missing; training a tokenizer needs its size"
        raise ProfileError("tokenizer.vocabulary_size", None, reason, [embeddings])
    if size is not None and size > embeddings:
        reason = f"is larger than model.vocab_size {embeddings}"
        raise ProfileError("tokenizer.vocabulary_size", size, reason, [embeddings])


def check_tokenizer(profile: Profile) -> None:
    """Raise ProfileError unless the tokenizer is trained, or a folder, hub repository, URL or run."""
    if profile.tokenizer.source != "train":
        _folder_or_repository("tokenizer.source", profile.tokenizer.source)


def check_initial_weights(profile: Profile) -> None:
    """Raise ProfileError unless the initial weights are a folder, hub repository, URL or run."""
    if profile.init.from_ is not None:
        _folder_or_repository("init.from", profile.init.from_)


def _folder_or_repository(key: str, source: str) -> None:
    """Check that a source is a folder or a possible hub repository; remote ones are checked when fetched."""
    if "://" in source or source.startswith(RUN) or state_files.is_dir(Path(source).expanduser()):
        return
    if source.startswith((".", "~")) or not REPOSITORY.fullmatch(source):
        reason = f"there is no such folder{searched(source)}; a hub repository has the form org/name"
        raise ProfileError(key, source, reason)
