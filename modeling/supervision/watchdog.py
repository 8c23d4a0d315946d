"""Hang watchdog: ends a rank whose training makes no progress, and dumps its stacks.

If a rank waits forever for another, only the stacks of both show which one is at fault. Each rank watches itself: if it exceeds
the timeout of its phase, it writes the traceback of each thread to RUN/logs/stacks/rank_<n>.txt and torch's flight
recorder, if the backend keeps one, to rank_<n>.collectives (for `torchfrtrace`), and exits with code HUNG. The launcher then ends
the other ranks. A rank that cannot do so, because it is stopped or blocked in native code that holds the GIL, is handled by the
external watchdog (torchrun.py), or without one by faulthandler's C thread.

While one rank waits for data, or for its metrics to be written, the others wait for it in a collective of their step. So each
rank that is in another phase than a step advances a counter in the process group's store every few seconds, and while it advances
no step times out. A second counter is advanced by the ranks whose compilers are running (`CompilerProcesses`); while it
advances, no phase times out before MAX_EXTENSION. Ranks that die advance none, so they delay nothing.

Timeouts, all extended up to MAX_EXTENSION while the compiler of a rank is running:

    step         hang_factor · median step time + hang_seconds, at most the longest of all
    compile      from the start until a median of steps is known
    load, save, evaluate, data, report    PHASES

The process group's timeout, `MARGIN` longer than the longest of these, ends a process without dumping stacks. It is longer if a
rank may wait for the compiler of another one for hours.

Cost: one lock per step, a new faulthandler thread every few seconds, and store traffic only in phases that take longer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

from modeling.supervision.heartbeat import Heartbeat
from modeling.supervision.stragglers import node_name
from profiles.files.exit_codes import HANG_MESSAGE, HUNG

if TYPE_CHECKING:
    from torch.distributed import Store

import psutil

from profiles.files import state_files

MIN_STEPS = 3  # needed for a median step time
STEP = "step"
COMPILE = "compile"
REPORT = "report"
PHASES = {  # seconds
    COMPILE: 1800.0,
    "load": 3600.0,
    "save": 3600.0,
    "evaluate": 3600.0,  # without a finished pass
    "data": 1800.0,  # a batch that was not prefetched in time
    REPORT: 1800.0,  # metrics, events and log lines: the shared file system may stall
}
MARGIN = 600.0  # seconds by which the process group's timeout exceeds the longest
# after which a phase ends although a counter advances: a slow compiler compiles all graphs of a rank in less
MAX_EXTENSION = 6 * 3600.0
# keys of counters in the store
BUSY = "trainshed/busy"
COMPILING = "trainshed/compiling"
POLL = 10.0  # maximum seconds between advances of the counters, and between polls of a rank's compilers
RECENT = 120.0  # seconds after its compiler ran in which a rank counts as compiling: it traces the next graph
BUSY_AFTER = 1.0  # maximum seconds in another phase than a step before a rank counts as busy
# Seconds between a rank's dump and its exit, so that other hung ranks can dump before they are ended.
EXIT_DELAY = 4.0
SHARE = 0.1  # of a core; idle compilers use less
OTHERS = frozenset({"neuron-monitor"})  # names of children that are no compilers (telemetry.py)
FAULTHANDLER_DELAY = 20.0  # seconds that faulthandler waits beyond the deadline


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a run, in seconds.

    Args:
        factor: `cluster.hang_factor`, in median step times.
        grace: `cluster.hang_seconds`; None: no watchdog, only the process group's timeout.
        slow_compiler: whether compiling the graphs of a rank may take hours.
    """

    factor: float
    grace: float | None
    slow_compiler: bool = False

    def of(self, phase: str, step_seconds: Sequence[float] = ()) -> float:
        """The timeout of a phase; `step_seconds`: durations of the latest steps, needed for the phase STEP."""
        if phase != STEP:
            return PHASES[phase]
        return min(self.factor * statistics.median(step_seconds) + (self.grace or 0.0), self._longest)

    @property
    def process_group(self) -> timedelta:
        return timedelta(seconds=self._longest + MARGIN + self.slow_compiler * MAX_EXTENSION)

    @property
    def _longest(self) -> float:
        return max(PHASES.values()) + (self.grace or 0.0)


class Activity:
    """Counter that ranks advance while they do something which others wait for.

    Args:
        store: shared by the ranks; None: this rank is the only one.
    """

    def __init__(self, store: Store | None, key: str) -> None:
        self._store, self._key = store, key
        self._total = 0  # without a store
        self._seen: int | None = None

    def advance(self) -> None:
        """Show that this rank is active."""
        self._add(1)

    def restart(self) -> None:
        """Observe anew: the next call of `observe` sets the baseline."""
        self._seen = None

    def observe(self, *, renew: bool = False) -> bool:
        """Whether any rank has advanced the counter since the baseline; `renew`: this is the next one."""
        total = self._add(0)
        if self._seen is None:
            self._seen = total
        advanced = total > self._seen
        if renew:
            self._seen = total
        return advanced

    def _add(self, change: int) -> int:
        if self._store is None:
            self._total += change
            return self._total
        with contextlib.suppress(RuntimeError):  # the store's process has ended
            return self._store.add(self._key, change)
        return 0


class CompilerProcesses:
    """The compilers of this rank: descendants of this process, besides OTHERS, that use the CPU.

    Others count as compilers too if they compute, such as those that a user's loss starts.
    """

    def __init__(self) -> None:
        self._polled, self._seconds = time.monotonic(), _cpu_seconds()

    def poll(self) -> bool:
        """Whether they have used more than SHARE of a core since the last call."""
        before = self._polled, self._seconds
        self._polled, self._seconds = time.monotonic(), _cpu_seconds()
        return self._seconds - before[1] > SHARE * (self._polled - before[0])


def _cpu_seconds() -> float:
    """CPU time of the descendants of this process, including those that have ended."""
    process = psutil.Process()
    seconds = 0.0
    with contextlib.suppress(psutil.Error, OSError):
        times = process.cpu_times()
        seconds += times.children_user + times.children_system
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() not in OTHERS:
                    seconds += sum(child.cpu_times()[:4])  # with those of its children that have ended
    return seconds


class Watchdog:
    """Context manager around training; call `beat` after each step, and `progress` within long phases.

    Args:
        folder: folder of the stacks, shared by all ranks.
        store: connection to the ranks' shared store, used by this object only; None: there are no other ranks.
    """

    def __init__(self, folder: Path, rank: int, timeouts: Timeouts, store: Store | None = None) -> None:
        self._path = folder / f"rank_{rank}.txt"
        self._rank, self._timeouts, self._store = rank, timeouts, store
        enabled = timeouts.grace is not None
        self._heartbeat = Heartbeat(self._path) if enabled else None
        self._busy_after = min(BUSY_AFTER, (timeouts.grace or 0.0) / 2)
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._step = 0
        self._phase = STEP
        self._begun = self._deadline = time.monotonic()  # begin and deadline of the phase
        self._faulthandler_deadline = 0.0
        self._changed = threading.Condition()
        self._finished = not enabled
        self._hung = False  # whether the thread is dumping the stacks, to end the process afterwards
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def beat(self, step: int, seconds: float) -> None:
        """Record a finished step and restart the timeout."""
        self._step = step
        with self._changed:
            self._step_seconds.append(seconds)
        self._begin(STEP)

    def progress(self) -> None:
        """Restart the timeout of the current phase, which limits the time without progress."""
        self._begin(self._phase)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Apply the timeout of a phase to the block, then that of the phase around it, from its beginning."""
        outer = self._phase
        self._begin(name)
        try:
            yield
        finally:
            self._begin(outer)

    @property
    def _timed_phase(self) -> str:
        compiling = self._phase == STEP and len(self._step_seconds) < MIN_STEPS
        return COMPILE if compiling else self._phase

    @property
    def _timeout(self) -> float:
        return self._timeouts.of(self._timed_phase, self._step_seconds)

    def _begin(self, phase: str) -> None:
        if self._heartbeat is None:
            return
        with self._changed:
            self._phase, self._begun = phase, time.monotonic()
            self._extend()
            if phase != REPORT:  # too short and frequent: `_watch` does it if this one takes longer
                self._arm_faulthandler()
            self._changed.notify()

    def _extend(self) -> None:
        """Set the deadline to one timeout from now; the caller holds the lock."""
        self._deadline = time.monotonic() + self._timeout
        if self._heartbeat is not None:
            self._heartbeat.set_deadline(self._deadline)

    def _arm_faulthandler(self) -> None:
        """Let faulthandler end the process some time after the deadline; the caller holds the lock."""
        deadline = self._deadline + FAULTHANDLER_DELAY
        # Each call starts a thread, so small changes are skipped.
        changed = abs(deadline - self._faulthandler_deadline) > FAULTHANDLER_DELAY / 2
        if changed and not self._finished:
            self._faulthandler_deadline = deadline
            faulthandler.dump_traceback_later(deadline - time.monotonic(), exit=True)

    def _watch(self) -> None:
        busy, compiling = Activity(self._store, BUSY), Activity(self._store, COMPILING)
        compilers = CompilerProcesses()
        begun = float("-inf")  # when the phase began
        compiled = float("-inf")  # when compilers last ran in it
        polled: float | None = None  # when it was last polled
        while True:
            with self._changed:
                if self._finished:
                    break
                now, phase, timeout = time.monotonic(), self._phase, self._timeout
                if self._begun != begun:
                    begun, compiled, polled = self._begun, float("-inf"), None
                    busy.restart()
                    compiling.restart()
                # The first poll sets baselines, and another one follows before the deadline.
                interval = min(POLL, timeout / 3, (self._timeouts.grace or POLL) / 2)
                first = interval if phase == STEP else min(self._busy_after, interval)
                poll_from = begun + first if polled is None else polled + interval
                expired = now >= self._deadline
                if now < poll_from and not expired:
                    self._changed.wait(min(poll_from, self._deadline) - now)
                    continue
            if compilers.poll() and polled is not None:
                compiled = now
            polled = now
            if phase != STEP:
                busy.advance()
            if compiled > now - RECENT:
                compiling.advance()
            others = compiling.observe(renew=expired), busy.observe(renew=expired) and phase == STEP
            with self._changed:
                if self._begun != begun:
                    continue  # the phase has just ended
                if expired:
                    if not any(others) or now > begun + MAX_EXTENSION:
                        break
                    self._extend()
                self._arm_faulthandler()
        if not self._finished:
            self._hung = True
            self._dump_and_exit()

    def _dump_and_exit(self) -> None:
        path = self._path
        waited = f"{HANG_MESSAGE} {time.monotonic() - self._begun:.1f} s after step {self._step}"
        limit = f"the timeout of the phase {self._timed_phase!r} is {self._timeout:.1f} s"
        message = f"rank {self._rank} on {node_name()}: {waited}; {limit}"
        if self._heartbeat is not None:
            self._heartbeat.set_deadline(time.monotonic() + FAULTHANDLER_DELAY)
        with contextlib.suppress(OSError):  # a full disk must not keep the rank alive
            state_files.make_folder(path.parent)
            with path.open("w") as file:
                print(message, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            collectives = _flight_recorder()
            if collectives:
                path.with_suffix(".collectives").write_bytes(collectives)
            message = f"{message}; its stacks: {path}"
        print(f"warning: {message}", flush=True)
        time.sleep(EXIT_DELAY)
        os._exit(HUNG)

    def __enter__(self) -> Self:
        if not self._finished:
            self._begin(STEP)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._hung:
            self._thread.join()  # another hung rank ended first; this one still exits with the code of a hang
        with self._changed:
            self._finished = True
            self._changed.notify()
        if self._heartbeat is not None:
            self._heartbeat.close()
        faulthandler.cancel_dump_traceback_later()


def _flight_recorder() -> bytes:
    """The latest collectives of this process, pickled by torch; empty if the backend does not record them."""
    from parallel.torch_internals import distributed_c10d as c10d

    for name in ("_dump_nccl_trace", "_dump_fr_trace"):  # NCCL; other backends
        if hasattr(c10d, name):
            with contextlib.suppress(RuntimeError):
                return bytes(getattr(c10d, name)())
    return b""
