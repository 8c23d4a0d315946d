"""What the person at the terminal reads: plain lines, and on a terminal one live line for what is going on now.

Everything that Trainshed has to say goes through `logging` (so that it reaches Prefect's UI too); this file decides
what of it the terminal shows. Prefect's own lines, and tracebacks, go to the log file only.
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
from rich.table import Table
from rich.text import Text

OURS = ("flows", "tasks", "profiles", "modeling")
PLAIN_PROGRESS_SECONDS = 10.0
BETWEEN = "  "  # the parts of a line of progress


class Terminal(logging.Handler):
    """Shows our own records; those with `progress=True` replace each other on a terminal, and are sparse elsewhere."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console
        self._live: Live | None = None
        self._shown = time.monotonic()  # a step that is soon done needs no progress

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] not in OURS:
            return
        text = record.getMessage()
        if getattr(record, "progress", False):
            self._progress(text)
            return
        self.end_progress()
        style = (
            "red"
            if record.levelno >= logging.ERROR
            else "yellow"
            if record.levelno >= logging.WARNING
            else ""
        )
        self.console.print(Text(text, style), soft_wrap=True)

    def _progress(self, text: str) -> None:
        if self.console.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, transient=True, refresh_per_second=4)
                self._live.start()
            shown = fitting(text, self.console.width)
            self._live.update(Text(shown, "cyan", no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self._shown >= PLAIN_PROGRESS_SECONDS:
            self._shown = time.monotonic()
            self.console.print(Text(text), soft_wrap=True)

    def end_progress(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def fitting(text: str, width: int) -> str:
    """As many of a line's parts as fit; of the first as much as fits is shown, if that is not all of it."""
    while len(text) > width and BETWEEN in text:
        text = text.rpartition(BETWEEN)[0]
    return text


def take_over_logging(terminal: Terminal, log_file: Path) -> None:
    """From now on our lines go to the terminal, and everything (Prefect's lines, tracebacks) to the log file."""
    file = logging.FileHandler(log_file)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    logging.getLogger().handlers = [terminal, file]
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)


class Unread(Console):
    """A console of work that goes on though the reader of its output has left; rich's own ends the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        drop(self.file)


def drop(output: IO[str]) -> None:
    """What is on its way there, and would fail once more at the interpreter's end, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output.fileno())
    os.close(nowhere)


def say(text: str) -> None:
    """One line for a person, on standard error."""
    print(text, file=sys.stderr, flush=True)


def in_one_line(error: Exception) -> str:
    """What went wrong; with the error's type, unless it was raised to be read by people."""
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, RuntimeError | OSError | ValueError) and text
        else f"{type(error).__name__}: {text}"
    )


def keep_traceback() -> Path:
    """Write the traceback of what is being handled to a file of its own, for whoever is to mend it."""
    with tempfile.NamedTemporaryFile("w", prefix="trainshed-", suffix=".log", delete=False) as file:
        traceback.print_exc(file=file)
    return Path(file.name)


def from_here(path: str) -> str:
    """A path as short as it can be typed here."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> Table:
    """A table without frames; the columns named in `numbers` are aligned right."""
    result = Table(box=None, pad_edge=False, header_style="dim", show_header=any(columns))
    for column in columns:
        result.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell) for cell in row))
    return result
