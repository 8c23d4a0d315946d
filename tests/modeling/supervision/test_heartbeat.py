"""Heartbeat file, as the external watchdog reads it."""

import math
import os
import time
from pathlib import Path

from modeling.supervision import heartbeat
from tests.forkserver import forkserver


def set_deadlines(folder: Path) -> None:
    os.environ[heartbeat.FOLDER] = str(folder)
    ours = heartbeat.Heartbeat(folder / "stacks")
    while not (folder / "done").exists():
        for i in range(10_000):
            ours.set_deadline(1e6 + i)
    ours.close()


def test_deadline_is_never_read_half_written(tmp_path):
    """Otherwise a rank that works would now and then count as hung."""
    process = forkserver().Process(target=set_deadlines, args=(tmp_path,))
    process.start()
    read: set[float] = set()
    end = time.monotonic() + 30
    while len(read) < 200 and time.monotonic() < end:
        read |= {found.deadline for found in heartbeat.WatchedProcess.read_all(tmp_path)}
    (tmp_path / "done").touch()
    process.join()
    assert len(read) >= 200
    assert [each for each in read if not 1e6 <= each < 1e6 + 10_000 and each != math.inf] == []
    assert [*heartbeat.WatchedProcess.read_all(tmp_path)] == []
