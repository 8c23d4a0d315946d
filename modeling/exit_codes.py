"""Exit codes of the programs on the devices, by which whoever watches tells why one ended and what helps."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

REJECTED = 2
"""The profile and the data do not go together: another attempt would end alike."""
OUT_OF_MEMORY = 71
DIVERGED = 72
"""Bad losses went on after a rollback."""
HUNG = 75
"""No step for too long; every rank's stacks are in the run's folder."""
HANG_MESSAGE = "no step for"
"""What is said of such a rank, also of one that was killed for it and has no code of its own."""
INTERRUPTED = 143
"""A signal asked for the end; the last step is saved, if the profile says so."""


def leave(code: int) -> NoReturn:
    """End this process now, everything written.

    torch 2.13's tidying up after gloo aborts some exits ("terminate called without an active exception"), which would
    make a failure of a program that is done.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
