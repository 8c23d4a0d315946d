"""Runs steps as Prefect tasks, cached by the store.

`runner.py` has the Runner, with which flows run their steps. `step_task.py` turns one step into a Prefect task: start reading
there, at its table of states. `retries.py` decides which failures are retried (of training, `RetryBudget` in
tasks/steps/training.py), `interruption.py` ends the background steps of a flow that ends early, `records.py` writes what the run
folder keeps of steps, `logs.py` sends log lines to Prefect's UI. Imports `flows`, `flows.server`, `flows.ui`, `modeling`,
`profiles` and `tasks`.
"""

from flows.runner.logs import forward_logs, log_result
from flows.runner.retries import REJECTIONS
from flows.runner.runner import THREADS, Runner
from flows.runner.step_task import Background

__all__ = ["REJECTIONS", "THREADS", "Background", "Runner", "forward_logs", "log_result"]
