"""Trains with a folder of graphs that ranks cannot change, as root.

    tests.modeling.train_read_only FOLDER ARGUMENTS...

The folder is read-only except for inductor's locks, which it takes to load what is compiled, and its precompiled headers.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from modeling.training import train
from tasks.steps.programs import LOCAL_ONLY

CLONE_NEWNS = 0x20000  # of unshare, which Python has from 3.12 on


def main(arguments: Sequence[str]) -> object:
    folder, *rest = arguments
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    for name in LOCAL_ONLY:
        Path(folder, name).mkdir(exist_ok=True)
    mount("--make-rprivate", "/")
    mount("--bind", folder, folder)
    mount("-o", "remount,bind,ro", folder)
    assert not os.access(folder, os.W_OK)
    for name in LOCAL_ONLY:
        mount("-t", "tmpfs", "tmpfs", os.path.join(folder, name))
    return train.main(rest)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)
