"""Terminal output: log lines, one live progress line, and errors in one line.

Trainshed's modules report through `logging`, so that Prefect's UI has every line too. This module decides which records
the terminal shows; Prefect's own records and all tracebacks go to the log file only.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

PACKAGES = ("flows", "tasks", "profiles", "modeling")  # whose records are shown
PLAIN_PROGRESS_SECONDS = 10.0  # between progress lines where standard output is not a terminal
SEPARATOR = "  "  # between the parts of a progress line


class TerminalHandler(logging.Handler):
    """Print the records of PACKAGES; a record with `progress`, the parts of its text, replaces the previous one."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console
        self._live: Live | None = None
        self._printed_at = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] not in PACKAGES:
            return
        if parts := getattr(record, "progress", ()):
            self._show_progress(parts)
            return
        self.end_progress()
        style = "yellow" if record.levelno >= logging.WARNING else ""
        style = "red" if record.levelno >= logging.ERROR else style
        self.console.print(Text(record.getMessage(), style), soft_wrap=True)

    def _show_progress(self, parts: Sequence[str]) -> None:
        if self.console.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, transient=True, refresh_per_second=4)
                self._live.start()
            text = fit(parts, self.console.width)
            self._live.update(Text(text, "cyan", no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self._printed_at >= PLAIN_PROGRESS_SECONDS:
            self._printed_at = time.monotonic()
            self.console.print(Text(SEPARATOR.join(parts)), soft_wrap=True)

    def end_progress(self) -> None:
        """Remove the live progress line."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def log_progress(log: logging.Logger, *parts: str) -> None:
    """Log a progress line; a narrow terminal drops the last parts."""
    log.info("%s", SEPARATOR.join(parts), extra={"progress": parts})


def fit(parts: Sequence[str], width: int) -> str:
    """Join as many of the first parts as fit in `width` columns, and at least one."""
    parts = list(parts)
    while len(parts) > 1 and len(SEPARATOR.join(parts)) > width:
        parts.pop()
    return SEPARATOR.join(parts)


def configure_logging(terminal: TerminalHandler, log_file: Path) -> None:
    """Send our records to the terminal, and all records (Prefect's and tracebacks too) to the log file."""
    file = logging.FileHandler(log_file)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    logging.getLogger().handlers = [terminal, file]
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)


class PipeTolerantConsole(Console):
    """A console that goes quiet when its reader closes the pipe; rich's own would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        redirect_to_devnull(self.file)


def redirect_to_devnull(output: IO[str]) -> None:
    """Discard what is buffered for a closed pipe, which would raise again at the interpreter's exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, output.fileno())
    os.close(devnull)


def print_stderr(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def one_line(error: Exception) -> str:
    """The error's message in one line, with its type unless the message is written for users."""
    text = " ".join(str(error).split())
    for_users = isinstance(error, RuntimeError | OSError | ValueError) and text
    return text if for_users else f"{type(error).__name__}: {text}"


def save_traceback() -> Path:
    """Write the traceback of the exception being handled to a new temporary file."""
    with tempfile.NamedTemporaryFile("w", prefix="trainshed-", suffix=".log", delete=False) as file:
        traceback.print_exc(file=file)
    return Path(file.name)


def relative(path: str) -> str:
    """The path relative to the working folder if it is below it, else unchanged."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
