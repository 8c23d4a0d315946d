"""Hang watchdog: ends a rank whose training makes no progress, and dumps its stacks.

If a rank waits forever for another, only the stacks of both tell which one is at fault. Each rank watches itself: if no step
ends within

    hang timeout = hang_factor · median step time + hang_seconds

(LONG_TIMEOUT at the start, while graphs compile, and during checkpoints and evaluations), it writes the traceback of each thread
to RUN/logs/stacks/rank_<n>.txt and torch's flight recorder, if the backend keeps one, to rank_<n>.collectives (for
`torchfrtrace`), and exits with code HUNG. The launcher then ends the other ranks. A rank that cannot do so, because it is
stopped or blocked in native code that holds the GIL, is handled by the external watchdog (torchrun.py), or without that by
faulthandler's C thread.

Cost: one lock per step, and a new faulthandler thread every few seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from modeling.exit_codes import HANG_MESSAGE, HUNG
from modeling.supervision.heartbeat import Heartbeat
from modeling.supervision.stragglers import node_name

LONG_TIMEOUT = 1800.0  # seconds, for anything but a step
MINIMUM_STEPS = 3  # needed for a median step time
# Seconds between a rank's dump and its exit, so that other hung ranks can dump before they are ended.
EXIT_DELAY = 4.0
FAULTHANDLER_DELAY = 20.0  # seconds that faulthandler waits beyond the deadline


class Watchdog:
    """Context manager around training; call `beat` after each step.

    Args:
        folder: folder of the stacks, shared by all ranks.
        factor: `cluster.hang_factor`, in median step times.
        grace: `cluster.hang_seconds`; None disables the watchdog.
    """

    def __init__(self, folder: Path, rank: int, factor: float, grace: float | None) -> None:
        self._path, self._rank, self._factor, self._grace = folder / f"rank_{rank}.txt", rank, factor, grace
        self._heartbeat = None if grace is None else Heartbeat(self._path)
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._step = 0
        self._timeout, self._deadline = LONG_TIMEOUT, time.monotonic() + LONG_TIMEOUT
        self._faulthandler_deadline = 0.0
        self._changed = threading.Condition()
        self._finished = grace is None
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def beat(self, step: int, seconds: float) -> None:
        """Record a finished step and restart the timeout."""
        self._step = step
        self._step_seconds.append(seconds)
        self._restart(self._step_timeout())

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Allow the block LONG_TIMEOUT seconds: a checkpoint or an evaluation."""
        self._restart(LONG_TIMEOUT)
        try:
            yield
        finally:
            self._restart(self._step_timeout())

    def _step_timeout(self) -> float:
        if len(self._step_seconds) < MINIMUM_STEPS or self._grace is None:
            return LONG_TIMEOUT
        return self._factor * statistics.median(self._step_seconds) + self._grace

    def _restart(self, timeout: float) -> None:
        if self._heartbeat is None:
            return
        with self._changed:
            self._timeout, self._deadline = timeout, time.monotonic() + timeout
            self._changed.notify()
        self._heartbeat.set_deadline(self._deadline)
        deadline = time.monotonic() + timeout + FAULTHANDLER_DELAY
        # Each call starts a thread, so small changes are skipped.
        if abs(deadline - self._faulthandler_deadline) > FAULTHANDLER_DELAY / 2:
            self._faulthandler_deadline = deadline
            faulthandler.dump_traceback_later(timeout + FAULTHANDLER_DELAY, exit=True)

    def _watch(self) -> None:
        with self._changed:
            while not self._finished:
                seconds_left = self._deadline - time.monotonic()
                if seconds_left <= 0:
                    break
                self._changed.wait(seconds_left)
            if self._finished:
                return
        self._dump_and_exit()

    def _dump_and_exit(self) -> None:
        path, timeout, step = self._path, self._timeout, self._step
        message = f"rank {self._rank} on {node_name()}: {HANG_MESSAGE} {timeout:.1f} s after step {step}"
        if self._heartbeat is not None:
            self._heartbeat.set_deadline(time.monotonic() + FAULTHANDLER_DELAY)
        with contextlib.suppress(OSError):  # a full disk must not keep the rank alive
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                print(message, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            collectives = _flight_recorder()
            if collectives:
                path.with_suffix(".collectives").write_bytes(collectives)
            message = f"{message}; its stacks: {path}"
        print(f"WARNING {message}", flush=True)
        time.sleep(EXIT_DELAY)
        os._exit(HUNG)

    def __enter__(self) -> Self:
        if not self._finished:
            self._restart(LONG_TIMEOUT)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify()
        if self._heartbeat is not None:
            self._heartbeat.close()
        faulthandler.cancel_dump_traceback_later()


def _flight_recorder() -> bytes:
    """The latest collectives of this process, pickled by torch; empty if the backend records none."""
    from torch._C import _distributed_c10d as c10d

    for name in ("_dump_nccl_trace", "_dump_fr_trace"):  # NCCL; other backends
        if hasattr(c10d, name):
            with contextlib.suppress(RuntimeError):
                return bytes(getattr(c10d, name)())
    return b""
