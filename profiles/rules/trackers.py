"""Rules for the profile's section `tracking`: its trackers are known, and their packages installed."""

from __future__ import annotations

import difflib
from importlib.util import find_spec

from profiles.errors import ProfileError, install_command
from profiles.schema import Profile
from profiles.sections.tracking import TRACKERS


def check(profile: Profile) -> None:
    """Check that trackers are known, and named once. Raises ProfileError."""
    trackers = profile.tracking.trackers
    for number, name in enumerate(trackers):
        key = f"tracking.trackers.{number}"
        if ":" not in name and name not in TRACKERS:
            close = difflib.get_close_matches(name, TRACKERS) or [*TRACKERS, "module:Class"]
            raise ProfileError(key, name, "is not a tracker", close)
        if name in trackers[:number]:
            raise ProfileError(key, name, "is named twice")


def check_installed(profile: Profile) -> None:
    """Check that the packages of the trackers are installed, without importing them. Raises ProfileError."""
    for number, name in enumerate(profile.tracking.trackers):
        if name in TRACKERS and find_spec(name) is None:
            reason = f"is not installed; install it with: {install_command(name)}"
            raise ProfileError(f"tracking.trackers.{number}", name, reason)
