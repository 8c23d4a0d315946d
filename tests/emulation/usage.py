"""Use of the emulated device, counted by kind and call site; threads must choose a device first."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
OURS = tuple(f"{ROOT}{os.sep}{folder}{os.sep}" for folder in ("parallel", "modeling"))
EMULATION = f"{ROOT}{os.sep}tests{os.sep}emulation{os.sep}"

HOST_READ = "host waits for the device"  # a value read, a blocking copy to the host, a synchronize
BLOCKING_UPLOAD = "copy that blocks"  # to the device: the call waits, or the memory is not page-locked
UPLOAD = "copy to the device"
DOWNLOAD = "copy to the host"  # that the host does not wait for
DYNAMIC = "shape depends on data"
EAGER = "operator outside compiled programs"
PROGRAM = "compiled program"
THREAD = "thread that chose its device"
counts: dict[str, Counter[str]] = defaultdict(Counter)
order: list[str] = []  # of "queue", a step's forward and backward, and "wait", for an event
settings: dict[str, str | None] = {}  # those of the environment that the device read at its first use
present = True  # whether this machine has the device, or only its software
_compiled = False  # whether a compiled program is running
_threads = threading.local()  # whether this thread chose its device
SETTINGS = ("TORCH_NEURONX_NEFF_CACHE_DIR",)


class Rejected(RuntimeError):
    """What accelerators reject, or leave undefined."""


def record(kind: str, what: str = "") -> None:
    """Count an event at the innermost line of this project that caused it."""
    counts[kind][f"{call_site()} {what}".strip()] += 1


def record_use() -> None:
    """Read the settings at first use; reject a thread that chose no device, as it would get the first."""
    if not present:
        raise Rejected("this machine has no device")
    if not settings:
        settings.update({name: os.environ.get(name) for name in SETTINGS})
    thread = threading.current_thread()
    # Threads that Python did not start are autograd's, which chooses their devices.
    own = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
    if not (own or getattr(_threads, "chose", False)):
        raise Rejected(f"thread {thread.name} uses the device without having chosen it")


def record_choice() -> None:
    """This thread chooses its device."""
    _threads.chose = True
    counts[THREAD][threading.current_thread().name.partition("_")[0]] += 1
    record_use()


def record_operator(name: str) -> None:
    """Count an operator that runs outside compiled programs."""
    record_use()
    if not _compiled:
        record(EAGER, name)


def take() -> dict[str, Counter[str]]:
    """The counts since the last call."""
    taken = {kind: Counter(found) for kind, found in counts.items()}
    counts.clear()
    return taken


def call_site() -> str:
    """`folder/file.py:Class.function` of the innermost frame in parallel/ or modeling/, or "elsewhere"."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(OURS):
            return f"{code.co_filename.removeprefix(ROOT + os.sep)}:{code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def inside_compiled_program(inside: bool = True) -> Iterator[None]:
    """Operators in the block belong to a compiled program."""
    global _compiled
    before, _compiled = _compiled, inside
    try:
        yield
    finally:
        _compiled = before


def outside_compiled_programs() -> AbstractContextManager[None]:
    """Operators in the block run one by one, also those of an operator that a compiled program calls."""
    return inside_compiled_program(False)
