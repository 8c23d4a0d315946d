"""Start a measured module: `python -m benchmarks.gpu_lease.start [--one-device] MODULE ARGUMENTS`.

It ends with the process that started it. On torch 2.11 to 2.12, which a rented machine may have, it first replaces what these
versions lack; nothing of it is used in training. Without tensorboard, training writes no files for it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

ONE_DEVICE = "--one-device"  # all ranks use device 0
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
COLLECTIVES = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
FIRST = (2, 13)  # the first version that Trainshed supports


def is_older() -> bool:
    """Whether torch is older than Trainshed supports."""
    return tuple(map(int, torch.__version__.split(".")[:2])) < FIRST


def adapt() -> None:
    """Replace what torch 2.11 and 2.12 lack: names of collectives, a compile option, pipelines."""
    for name, older in COLLECTIVES.items():
        if not hasattr(dist, name):
            setattr(dist, name, getattr(dist, older))
    from modeling.check_device import checks
    from modeling.compilation import graph_cache

    graph_cache.OPTIONS.pop("recompile_limit", None)
    checks.WAYS = tuple(way for way in checks.WAYS if way != "pipeline")


def main() -> None:
    arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if arguments[0] == ONE_DEVICE:
        os.environ["LOCAL_RANK"] = "0"
        del arguments[0]
    if is_older():
        adapt()
    if find_spec("tensorboard") is None:
        sys.modules["torch.utils.tensorboard"] = MagicMock()
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
