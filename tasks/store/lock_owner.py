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
    """A process on a host; its start tells it from a later one with the same pid."""

    host: str
    pid: int
    started: float  # seconds since 1970
    # Boot id of the kernel and inode of the pid namespace: a container may reuse a host's name, but not these. Empty where the
    # system has none; None in the files of earlier versions.
    system: str | None = None
    # Start in clock ticks since boot, which does not shift when the clock is set; None as above, and where it is unknown.
    ticks: int | None = None

    @classmethod
    def current(cls) -> LockOwner:
        pid, started = os.getpid(), psutil.Process().create_time()
        return cls(socket.gethostname(), pid, started, _system(), _start_ticks(pid))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> LockOwner:
        host, pid, started = str(value["host"]), int(value["pid"]), float(value["started"])
        return cls(host, pid, started, value.get("system"), value.get("ticks"))

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
            ticks = _start_ticks(self.pid)
            if ticks is None or self.ticks is None:
                is_other = abs(process.create_time() - self.started) > START_TOLERANCE
            else:
                is_other = ticks != self.ticks
            return is_other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it is unknown."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # not Linux, or it has ended
        return None
    after_name = status.rpartition(b") ")[2].split()  # fields 3 and later
    return int(after_name[22 - 3])


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux
        return ""
