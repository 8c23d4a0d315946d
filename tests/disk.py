"""A small disk: a tmpfs that is mounted for one command, as root or in a user namespace."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

MOUNTED = 'mount -t tmpfs -o "size=$0" tmpfs "$1" && shift && exec "$@"'


def can_mount() -> bool:
    """Whether a process of this user can mount file systems that only it sees."""
    tried = ["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /tmp"]
    return os.geteuid() == 0 and subprocess.run(tried, capture_output=True).returncode == 0


def small(folder: Path, size: str) -> list[str]:
    """Command prefix that mounts a tmpfs of this size ("3m") on a new folder; skips if not allowed."""
    folder.mkdir(parents=True)
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    command = [*unshare, "sh", "-c", MOUNTED, size, str(folder)]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine does not allow mounting a tmpfs: {tried.stderr.strip()}")
    return command
