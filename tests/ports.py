"""A free TCP port on loopback."""

import socket


def free_port() -> int:
    """A port that was free a moment ago; another process may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
