"""Exit codes of job modules: why a process ended, which decides whether the job is retried."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

log = logging.getLogger(__name__)

REJECTED = 2
"""Invalid profile, data or checkpoint: a retry would fail the same way."""
OUT_OF_MEMORY = 71
ALLOCATION_FAILED = "STATUS_ALLOC_FAILED"
"""In errors of cuBLAS, cuDNN and their siblings, which allocate outside torch: no memory is left for a handle or workspace."""
DIVERGED = 72
"""Bad losses continued, and no rollback is left or there is no earlier checkpoint."""
HUNG = 75
"""Hang timeout: no step finished in time; every rank's stacks are in the run folder."""
HANG_MESSAGE = "no step for"
"""Appears in the log of every hung rank, also of one that was killed and has another exit code."""
CONSEQUENCE = 1.0
"""Seconds that a rank waits after an error before it exits.

If the error is a consequence of another rank's end, torchrun notices that one first and names it as the cause.
"""
INTERRUPTED = 143
"""Stopped by a signal; the last step is saved if `checkpoint.on_stop` is true."""


def code_of(main: Callable[[], int]) -> int:
    """Run a job module's `main`; returns its exit code, or that of an error, which is logged."""
    try:
        return main()
    except ValueError as error:  # invalid profile, data or checkpoint
        if follows_failed_read(error):
            log.exception("failed")
            return 1
        log.exception("rejected")
        return REJECTED
    # Not raised: at its own exit, the interpreter would wait for process groups that other ranks still use.
    except Exception as error:
        torch = sys.modules.get("torch")  # not imported: launchers and tokenization do not need it
        exhausted = isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError))
        if exhausted or ALLOCATION_FAILED in str(error):
            log.exception("out of memory")
            return OUT_OF_MEMORY
        log.exception("failed")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(CONSEQUENCE)
        return 1


def follows_failed_read(error: BaseException | None) -> bool:
    """Whether an error came from an unreadable file or server, so the input may still be valid."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave(code: int) -> NoReturn:
    """Flush output and exit at once, without destructors.

    torch 2.13's teardown of gloo aborts some exits ("terminate called without an active exception"), which would turn a
    finished process into a failed one.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
