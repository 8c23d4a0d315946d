"""Interruption: raises an exception in other threads, as Ctrl-C does in the main thread.

A step ends its processes on any BaseException, as on Ctrl-C, so it need not ask whether it was interrupted. No other module
raises exceptions in threads. Prefect ends tasks that exceed their timeout in the same way.
"""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

POLL = 0.2  # seconds of a wait between which a thread notices that it was interrupted


class Interruption:
    """Raises an exception in all threads that are in its block, and in those that enter it later.

    A thread that waits in a system call raises it when the call returns.

    Args:
        kind: class of the exception.
    """

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind, self._begun = kind, False
        self._threads: set[int] = set()  # ids of those in the block
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._begun:
                raise self._kind
            self._threads.add(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        with self._lock:  # waits for `interrupt`, so that nothing is raised in what the thread does next
            self._threads.discard(threading.get_ident())

    def interrupt(self) -> None:
        """Raise the exception, once; returns before the threads have ended."""
        with self._lock:
            threads, self._begun = () if self._begun else self._threads, True
            for thread in threads:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(self._kind)
                )


def pause(seconds: float) -> None:
    """Sleep; an interruption of this thread ends the sleep."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, POLL))


def await_end(future: Future[Any]) -> None:
    """Wait until a future is done; an interruption of this thread ends the wait, unlike an untimed one."""
    while not wait([future], POLL).done:
        pass
