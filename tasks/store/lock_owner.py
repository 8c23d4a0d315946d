"""Who holds a lock or a staging folder: a process, which others can often tell is gone."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

import psutil

SAME_START = 5.0  # seconds; the clock that start times are counted by may be set while a process runs


@dataclass(frozen=True)
class Owner:
    """One process on one host; `started` (seconds since 1970) tells it from a later one of the same number."""

    host: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> Owner:
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Owner:
        return cls(str(value["host"]), int(value["pid"]), float(value["started"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def local(self) -> bool:
        """Whether it ran on this host, so that `gone` is known."""
        return self.host == socket.gethostname()

    @property
    def gone(self) -> bool:
        """Whether the process certainly runs no more. Of another host nothing is certain."""
        if not self.local:
            return False
        try:
            process = psutil.Process(self.pid)
            return (
                process.status() == psutil.STATUS_ZOMBIE
                or abs(process.create_time() - self.started) > SAME_START
            )
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"
