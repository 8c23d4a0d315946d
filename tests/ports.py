"""Free ports for tests."""

import contextlib
import random
import socket

# Below those that the kernel chooses for clients and for port 0, so that no other process gets one before it is used, and above
# those of jobs on the tests' Slurm clusters (20000 + 14 · job, tests/slurm/cluster.py).
PORTS = range(26000, 32000)


def free_port() -> int:
    """Return a port of the loopback interface that nothing uses."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
