"""Memory of processes that train on a CPU, in a process of its own."""

import os
import subprocess
import sys

import pytest

from parallel import host_memory

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


# As glibc before 2.35, which maps larger blocks anew.
BLOCKS = """
import ctypes
from parallel.host_memory import request_huge_pages
lines = lambda: len(open("/proc/self/maps").readlines())
before = lines()
libc = ctypes.CDLL(None)
libc.mallopt(-3, 32 << 20)
request_huge_pages(libc, 16 << 20)
print(lines() - before)
"""


def output(program, **environment):
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    ).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux and glibc")
def test_memory_of_a_step_stays_for_the_next_and_huge_pages_are_requested_for_it():
    faults, requested = output(STEPS).split()
    assert int(faults) < 100  # of 24,576 pages
    assert requested == str(host_memory.can_request_huge_pages())
    assert int(output(BLOCKS)) < 10  # mappings
    _, requested = output(STEPS, MALLOC_MMAP_THRESHOLD_="131072").split()
    assert requested == "False"
