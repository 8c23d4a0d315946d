"""Log lines in Prefect's UI: ours, and of Prefect's own only those that add information."""

from __future__ import annotations

import logging

from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import CancelledRun
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler

from flows.runner.retries import REJECTIONS
from flows.server.outages import shorten_outages
from flows.server.prefect_settings import GATE_MISSED, REJECTED
from flows.ui.console import ProgressFilter
from tasks.launchers import JobFailed
from trainshed import PACKAGES

PROGRESS_SECONDS = 15.0  # between progress lines
PREFECT_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
NOISE = ("Task run failed with %s: %r - Retry", "Running hook ", "Hook ")  # formats of Prefect's records
FAILURES = tuple(f"Finished in state {name}(" for name in ("Failed", REJECTED, GATE_MISSED))

_throttle = ProgressFilter(PROGRESS_SECONDS)  # shared by all packages


def forward_logs() -> None:
    """Send our log records to Prefect's UI, and filter Prefect's own there (`is_news`)."""
    shorten_outages()
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            handler = APILogHandler()
            handler.addFilter(lambda _: bool(TaskRunContext.get() or FlowRunContext.get()))
            handler.addFilter(_throttle)
            logger.addHandler(handler)
    for name in PREFECT_LOGGERS:
        for existing in logging.getLogger(name).handlers:
            if isinstance(existing, APILogHandler):
                existing.addFilter(is_news)


def log_result(text: str) -> None:
    """Log a result for Prefect's UI and the log file; the terminal shows it at the end of the command.

    Call within a flow.
    """
    get_run_logger().info(text)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a Prefect log record adds information to our lines and the final states.

    Prefect's retry line would count up to UNLIMITED, and the message of a rejection or a failed job needs no traceback. Prefect
    logs the end of every flow run as information; that of one that failed is an error.
    """
    if isinstance(record.msg, str) and record.msg.startswith(NOISE):
        return False
    if isinstance(record.msg, str) and record.msg.startswith(FAILURES):
        record.levelno, record.levelname = logging.ERROR, logging.getLevelName(logging.ERROR)
    error = record.exc_info and record.exc_info[1]
    return not isinstance(error, (*REJECTIONS, JobFailed, CancelledRun))
