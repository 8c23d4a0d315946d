"""Memory of processes that train on a CPU, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STEPS = """
import ctypes
from resource import RUSAGE_SELF, getrusage

from parallel.host_memory import retain_freed_memory

retain_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
faults = []
for _ in range(2):
    before = getrusage(RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(24 << 20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 24 << 20)
    for block in blocks:
        libc.free(block)
    faults.append(getrusage(RUSAGE_SELF).ru_minflt - before)
heap = open("/proc/self/smaps").read().split("[heap]")[1:]
print(faults[1], any(" hg" in mapping.split("VmFlags:")[1].split("\\n")[0] for mapping in heap))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux and glibc")
def test_memory_of_a_step_stays_for_the_next_and_huge_pages_are_requested_for_it():
    found = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    faults, requested = found.stdout.split()
    assert int(faults) < 100  # of 24,576 pages
    assert requested == str(HUGE_PAGES.exists())
