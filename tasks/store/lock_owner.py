"""Owner of a lock or a staging folder: a process that others can check for liveness."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

START_TOLERANCE = 5.0  # seconds; start times shift when the clock is set


@dataclass(frozen=True)
class LockOwner:
    """A process on a host; `started` (seconds since 1970) tells it from a later one with the same pid."""

    host: str
    pid: int
    started: float
    # Boot id of the kernel and inode of the pid namespace: a container may reuse a host's name, but not these. Empty where the
    # system has none; None in the files of earlier versions.
    system: str | None = None

    @classmethod
    def current(cls) -> LockOwner:
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time(), _system())

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> LockOwner:
        return cls(str(value["host"]), int(value["pid"]), float(value["started"]), value.get("system"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_local(self) -> bool:
        """Whether the owner runs in this host's pid namespace, so that its pid can be checked."""
        return (self.host, self.system) == (socket.gethostname(), _system())

    @property
    def is_gone(self) -> bool:
        """Whether the process has certainly ended; always False for a process of another host or container."""
        if not self.is_local:
            return False
        try:
            process = psutil.Process(self.pid)
            is_other = abs(process.create_time() - self.started) > START_TOLERANCE
            return is_other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux
        return ""
