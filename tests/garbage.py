"""Returns a test process's garbage to the system each time that its memory has grown: pytest plugin.

Automatic collections are too rare for that (cheap_torch.py).
"""

import ctypes
import gc
from contextlib import suppress
from unittest import mock

import psutil
import pytest

GROWTH = 48 << 20
"""Bytes after which objects that are new since the last collection are looked through; all others, after four times as many."""


class Collector:
    """Collects garbage between tests once memory has grown."""

    def __init__(self):
        from parallel import device  # imports torch, which xdist's controller does not need

        # Otherwise training in this process makes glibc keep freed memory from then on, in huge pages.
        mock.patch.object(device, "retain_freed_memory").start()
        self._process = psutil.Process()
        self._collected = self._all_collected = (
            0  # bytes in use after the last collection, and after one of all objects
        )

    def pytest_collection_finish(self):
        """Exempt what has been imported from collection.

        Commands that tests call in this process, which do so when they have started, would exempt their garbage, too.
        """
        self._collect(2)
        gc.freeze()
        gc.freeze = lambda: None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        result = yield
        used = self._used()
        if used > self._collected + GROWTH:
            self._collect(2 if used > self._all_collected + 4 * GROWTH else 1)
        return result

    def _collect(self, generation):
        gc.collect(generation)
        with suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        self._collected = self._used()
        if generation == 2:
            self._all_collected = self._collected

    def _used(self):
        return self._process.memory_info().rss
