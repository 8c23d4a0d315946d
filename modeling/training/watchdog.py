"""Ends a process whose training stands still, and leaves behind where it stood.

A rank that waits for ever for another cannot be told from outside which of the two is at fault; their stacks can. Each rank
watches itself: where no step ends within

    factor · median step + grace

(or PATIENCE at the start, while graphs compile, and during a checkpoint or an evaluation) it writes RUN/logs/stacks/rank_<n>.txt,
the traceback of each of its threads, and rank_<n>.collectives, torch's flight recorder (read by `torchfrtrace`, where the
backend keeps one), and ends with the exit code HUNG. The launcher then ends the others. A rank that cannot do so, since it is
stopped, or stuck in compiled code that never gives Python's lock back, is looked at and ended from outside (torchrun.py);
where nobody looks, by faulthandler's own thread.

Costs a lock a step, and a thread every few seconds.
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
from modeling.training.heartbeat import Heartbeat
from modeling.training.stragglers import node_name

PATIENCE = 1800.0  # seconds that what is no step may take
KNOWN = 3  # steps whose times make a median
SETTLE = 4.0  # seconds from a rank's dump to its end, which may take along others that were not dumped yet
LATER = 20.0  # seconds that faulthandler waits longer


class Watchdog:
    """Use as a context manager; call `beat` after each step.

    Args:
        folder: for the stacks, shared by all ranks.
        factor: how many median steps a step may take.
        grace: seconds on top; None: nothing is watched.
    """

    def __init__(self, folder: Path, rank: int, factor: float, grace: float | None) -> None:
        self._path, self._rank, self._factor, self._grace = folder / f"rank_{rank}.txt", rank, factor, grace
        self._heartbeat = None if grace is None else Heartbeat(self._path)
        self._seconds: deque[float] = deque(maxlen=50)
        self._step = 0
        self._limit, self._deadline = PATIENCE, time.monotonic() + PATIENCE
        self._last = 0.0  # when faulthandler would end the process
        self._changed = threading.Condition()
        self._ended = grace is None
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def beat(self, step: int, seconds: float) -> None:
        """This step took so long; the next one may begin."""
        self._step = step
        self._seconds.append(seconds)
        self._allow(self._step_limit())

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """For the block, what takes longer than steps: a checkpoint, an evaluation."""
        self._allow(PATIENCE)
        try:
            yield
        finally:
            self._allow(self._step_limit())

    def _step_limit(self) -> float:
        if len(self._seconds) < KNOWN or self._grace is None:
            return PATIENCE
        return self._factor * statistics.median(self._seconds) + self._grace

    def _allow(self, seconds: float) -> None:
        if self._heartbeat is None:
            return
        with self._changed:
            self._limit, self._deadline = seconds, time.monotonic() + seconds
            self._changed.notify()
        self._heartbeat.due(self._deadline)
        last = time.monotonic() + seconds + LATER
        if abs(last - self._last) > LATER / 2:  # a thread is started each time
            self._last = last
            faulthandler.dump_traceback_later(seconds + LATER, exit=True)

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if self._ended:
                return
        self._leave()

    def _leave(self) -> None:
        path = self._path
        about = (
            f"rank {self._rank} on {node_name()}: {HANG_MESSAGE} {self._limit:.1f} s after step {self._step}"
        )
        if self._heartbeat is not None:
            self._heartbeat.due(time.monotonic() + LATER)
        with contextlib.suppress(OSError):  # a full disk must not keep it from ending
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                print(about, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            recorded = _flight_recorder()
            if recorded:
                path.with_suffix(".collectives").write_bytes(recorded)
            about = f"{about}; its stacks: {path}"
        print(f"WARNING {about}", flush=True)
        time.sleep(SETTLE)
        os._exit(HUNG)

    def __enter__(self) -> Self:
        if not self._ended:
            self._allow(PATIENCE)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._heartbeat is not None:
            self._heartbeat.end()
        faulthandler.cancel_dump_traceback_later()


def _flight_recorder() -> bytes:
    """The last collectives of this process, pickled by torch; empty where it keeps none."""
    from torch._C import _distributed_c10d as c10d

    for name in ("_dump_nccl_trace", "_dump_fr_trace"):  # of NCCL, and of the other backends
        if hasattr(c10d, name):
            with contextlib.suppress(RuntimeError):
                return bytes(getattr(c10d, name)())
    return b""
