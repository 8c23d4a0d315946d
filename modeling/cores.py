"""Number of CPU cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores in this process's affinity mask, which Slurm and containers restrict; all cores where there is no mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
