"""Which failed attempts of a task are retried, and when: the options for retries of Prefect's tasks.

After a failed attempt, Prefect asks `retry_condition_fn`, waits for the next of `retry_delay_seconds`, and calls the task's
function again. A step's `may_retry` may ask for a longer wait, with which the next attempt begins; that of training
is `RetryBudget` (tasks/steps/training.py). `tasks/failures.py` says which failures are fatal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from flows.runner.interruption import pause
from flows.ui.console import one_line
from profiles.errors import ProfileError
from profiles.files import retry_policies, state_files
from tasks.failures import RESTARTING, FatalError
from tasks.sources.shard import SOURCE_ERRORS
from tasks.step import Context, Step
from tasks.tokenization.worker_pool import PoolClosed

log = logging.getLogger(__name__)

REJECTIONS = (ProfileError, *SOURCE_ERRORS)  # errors of the input
RETRIES = len(retry_policies.STEP.delays)
UNLIMITED = 1_000_000  # Prefect needs a number
# Seconds before each retry; the last applies to all further ones. Jitter keeps runs that were stopped by a common cause from
# restarting all at once.
DELAYS: dict[str, Any] = {"retry_delay_seconds": [*retry_policies.RESTART.delays], "retry_jitter_factor": 0.3}


def worth_retrying(made: Task[..., Any], run: TaskRun, state: State) -> bool:
    """Whether a retry could succeed.

    Not if the input was rejected, a state file is corrupted, or a job's failure was fatal.
    """
    try:
        state.result()
    except (*REJECTIONS, PoolClosed, FatalError, state_files.CorruptedState):
        return False
    except Exception:
        return True
    return False


def retry_options(retries: int = RETRIES) -> dict[str, Any]:
    """Prefect's options for a task with so many retries."""
    return {**DELAYS, "retries": retries, "retry_condition_fn": worth_retrying}


class StepRetries:
    """Retries of one step: two, or as many as its `may_retry` allows.

    Args:
        record: called with the state of each attempt that is retried.

    Attributes:
        options: Prefect's options for the step's task.
    """

    def __init__(self, step: Step, context: Context, record: Callable[[State], None]) -> None:
        decide, number, self._earliest = step.may_retry(context), 1, 0.0

        def condition(made: Task[..., Any], run: TaskRun, state: State) -> bool:  # Prefect calls no methods
            nonlocal number
            if not worth_retrying(made, run, state):
                return False
            seconds = 0.0 if decide is None else decide(state.result(raise_on_failure=False))
            if seconds is None:
                return False
            self._earliest, number = time.monotonic() + seconds, number + 1
            record(state)
            if decide is None:  # `may_retry` logs its own decisions
                log.warning("%s failed: %s", step.name, reason(state))
                log.warning(RESTARTING, step.name, number, RETRIES + 1)
            return True

        self.options = retry_options(RETRIES if decide is None else UNLIMITED)
        self.options["retry_condition_fn"] = condition

    def wait(self) -> None:
        """Wait as long as `may_retry` asked for; an interruption of this thread ends the wait."""
        pause(self._earliest - time.monotonic())


def reason(state: State) -> str | None:
    """The error that made a task fail, in one line."""
    failure = state.result(raise_on_failure=False)
    return one_line(failure) if isinstance(failure, Exception) else state.message
