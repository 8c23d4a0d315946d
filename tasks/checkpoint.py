"""Checkpoint: makes pretrained weights ready for training. A run from scratch has none, and skips this step."""

from __future__ import annotations

from profiles.errors import ProfileError
from profiles.schema import Profile


def needed(profile: Profile) -> bool:
    """Whether the profile starts from pretrained weights.

    Raises:
        ProfileError: it does; they cannot be read yet.
    """
    if profile.init.from_ is None:
        return False
    raise ProfileError("init.from", profile.init.from_, "pretrained weights cannot be read yet", ["null"])
