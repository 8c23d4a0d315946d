"""Terminal output: log lines, one live progress line, and errors in one line.

Trainshed's modules report through `logging`, so that Prefect's UI has every line too. This module decides which records
the terminal shows; Prefect's own records and all tracebacks go to the log file only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.live import Live
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tasks.reporting.format import format_age, format_duration
from tasks.reporting.outcome import Outcome
from trainshed import PACKAGES

PLAIN_PROGRESS_SECONDS = 10.0  # between progress lines where standard output is not a terminal
SHORT_WAIT = 0.3  # seconds until `waiting` shows what it waits for, so that short waits do not flash
QUIET_SECONDS = 3.0  # until an unchanged progress line shows the time since its last change
PIPED_WIDTH = 200  # of a table where standard output is not a terminal
UNFOLDED = re.compile(
    r"^[\[ ]|(?<!`)trainshed \w|pip install|make \w| --\w"
)  # a line with a command or of a job's output
SEPARATOR = "  "  # between the parts of a progress line


class ProgressFilter(logging.Filter):
    """Pass at most one progress record per `seconds`, none of `log_waiting`, and all other records."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._passed_at = seconds, -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "progress", ()):
            if getattr(record, "waiting", False) or time.monotonic() - self._passed_at < self._seconds:
                return False
            self._passed_at = time.monotonic()
        return True


class TerminalHandler(logging.Handler):
    """Print the records of Trainshed's packages.

    A record with `progress`, the parts of its text, replaces the previous one. On a terminal, a record with `indent` is wrapped
    between words at that column; others by `fold`.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console
        self._live: Live | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._parts: Sequence[str] = ()
        self._changed_at = 0.0
        self._plain = ProgressFilter(PLAIN_PROGRESS_SECONDS)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] not in PACKAGES:
            return
        if parts := getattr(record, "progress", ()):
            self._show_progress(record, parts)
            return
        self.end_progress()
        style = "yellow" if record.levelno >= logging.WARNING else ""
        style = "red" if record.levelno >= logging.ERROR else style
        message = record.getMessage()
        if self.console.is_terminal:
            indent = getattr(record, "indent", 0)
            message = (
                wrap(message, self.console.width, indent) if indent else fold(message, self.console.width)
            )
        self.console.print(Text(message, style), soft_wrap=True)

    def _show_progress(self, record: logging.LogRecord, parts: Sequence[str]) -> None:
        if self.console.is_terminal:
            if parts != self._parts:
                self._parts, self._changed_at = parts, time.monotonic()
            if self._live is None:
                self._live = Live(
                    console=self.console,
                    transient=True,
                    refresh_per_second=8,
                    get_renderable=self._render_progress,
                )
                self._live.start()
        elif self._plain.filter(record):
            self.console.print(Text(SEPARATOR.join(parts)), soft_wrap=True)

    def _render_progress(self) -> RenderableType:
        """The parts, the time since the last change if it is long, and a spinner if the fraction is unknown."""
        seconds, spins = time.monotonic() - self._changed_at, len(self._parts) == 1
        width = self.console.width - 2 * spins
        quiet = f"({format_duration(seconds)})" if spins else f"(last update {format_age(seconds)} ago)"
        parts = [*self._parts, quiet] if seconds >= QUIET_SECONDS else self._parts
        text = Text(fit(parts, width), "cyan", no_wrap=True)
        text.truncate(width, overflow="ellipsis")
        if not spins:
            return text
        self._spinner.update(text=text)
        return self._spinner

    def end_progress(self) -> None:
        """Remove the live progress line."""
        if self._live is not None:
            self._live.stop()
            self._live, self._parts = None, ()


def log_progress(log: logging.Logger, *parts: str) -> None:
    """Log a progress line; a narrow terminal drops the last parts."""
    log.info("%s", SEPARATOR.join(parts), extra={"progress": parts})


def log_waiting(log: logging.Logger, text: str) -> None:
    """Show in a terminal only what is waited for, until the next line."""
    log.info("%s", text, extra={"progress": (text,), "waiting": True})


def fit(parts: Sequence[str], width: int) -> str:
    """Join as many of the first parts as fit in `width` columns, and at least one."""
    parts = list(parts)
    while len(parts) > 1 and len(SEPARATOR.join(parts)) > width:
        parts.pop()
    return SEPARATOR.join(parts)


def wrap(line: str, width: int, indent: int) -> str:
    """Wrap a line between words to `width` columns; all but the first line begin at column `indent`."""
    wrapped = textwrap.fill(
        line[indent:],
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return line[:indent] + wrapped[indent:]


def fold(text: str, width: int) -> str:
    """Wrap lines between words, except commands, which can be copied in one piece, and output of jobs."""
    return "\n".join(line if UNFOLDED.search(line) else wrap(line, width, 0) for line in text.split("\n"))


def log_outcome(log: logging.Logger, outcome: Outcome) -> None:
    """Log how a step ended, in columns: step, how, seconds, note."""
    seconds = outcome.seconds if outcome.how in ("done", "failed", "stopped") else None
    took = format_duration(seconds) if seconds else ""
    columns = f"{outcome.step:<10}  {outcome.how:<7}  {took:>7}  "
    log.info("%s", f"{columns}{outcome.note}".rstrip(), extra={"indent": len(columns)})


def configure_logging(terminal: TerminalHandler, log_file: Path) -> None:
    """Send our records to the terminal, and all records (Prefect's and tracebacks too) to the log file."""
    file = logging.FileHandler(log_file)
    file.addFilter(ProgressFilter(PLAIN_PROGRESS_SECONDS))
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    logging.getLogger().handlers = [terminal, file]
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)


class PipeTolerantConsole(Console):
    """A console that goes quiet when its reader closes the pipe; rich's own would exit."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        redirect_to_devnull(self.file)


class TrimmedConsole(Console):
    """A console that prints no trailing blanks.

    rich fills tables, indented and wrapped text with blanks to the full width.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False)
        self.push_render_hook(_Trimming())


class _Trimming(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Trimmed(each) for each in renderables]


@dataclass(frozen=True)
class _Trimmed:
    """A renderable without trailing spaces in its lines."""

    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        blanks: list[Segment] = []  # dropped if the line ends here
        for text, style, control in console.render(self.inner, options):
            for part in [text] if control else text.splitlines(keepends=True):
                shown = part.rstrip()
                if shown or control:
                    yield from blanks
                    blanks.clear()
                    yield Segment(shown or part, style, control)
                if part.endswith("\n"):
                    blanks.clear()
                    yield Segment.line()
                elif not control and (rest := part[len(shown) :]):
                    blanks.append(Segment(rest, style))
        yield from blanks


def table_console() -> Console:
    """A console for tables with long names; without a terminal it is wide, to keep cells whole."""
    console = TrimmedConsole()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def plain_table(rows: Sequence[Sequence[str]], style: str = "") -> Table:
    """A table without titles; all but the texts of the last column are whole, and have the style."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in rows[0][1:]:
        table.add_column(style=style, no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_table(
    console: Console,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int | Collection[int],
    folds: bool = False,
) -> None:
    """Print a table of many rows, of which rich takes a second for every 500.

    In a narrow terminal, columns are closer together; lines that are too long nevertheless are left to it.

    Args:
        left: columns that are aligned to the left, or how many from the first; the rest is to the right.
        folds: whether a terminal that is too narrow shows the last columns, as few as possible, below their rows.
    """
    widths = column_widths(titles, rows)
    lefts = {*(range(left) if isinstance(left, int) else left)}
    narrowest = 1 if folds else len(titles)
    for end, gap in product(range(len(titles), narrowest - 1, -1), (2, 1)):
        if not console.is_terminal or sum(widths[:end]) + gap * (end - 1) <= console.width:
            break

    def line(cells: Sequence[str]) -> str:
        blanks = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=False)]
        padded = [
            cell + blank if index in lefts else blank + cell
            for index, (cell, blank) in enumerate(zip(cells, blanks, strict=True))
        ]
        return (" " * gap).join(padded).rstrip()

    console.print(line(titles[:end]), style="dim", soft_wrap=True, markup=False)
    lines = []
    for row in rows:
        lines.append(line(row[:end]))
        if below := [f"{title} {cell}" for title, cell in zip(titles[end:], row[end:], strict=True) if cell]:
            lines.append(f"  {'  '.join(below)}")
    console.out("\n".join(lines), highlight=False)


def print_parts(
    console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int | Collection[int] = 0
) -> None:
    """Print a table; one too wide for the terminal in parts below each other, each with the first column.

    Args:
        left: as in `print_table`.
    """
    lefts = {*(range(left) if isinstance(left, int) else left)}
    for number, part in enumerate(parts_of(console, column_widths(titles, rows))):
        if number:
            console.print()
        shown = [[row[i] for i in part] for row in rows]
        aligned = [place for place, i in enumerate(part) if i in lefts]
        print_table(console, [titles[i] for i in part], shown, left=aligned)


def column_widths(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column's longest text."""
    return [max(map(cell_len, column)) for column in zip(titles, *rows, strict=True)]


def parts_of(console: Console, widths: Sequence[int]) -> list[list[int]]:
    """The columns of each part of a table that fits in the terminal; each part has the first column."""
    first, *others = widths
    parts, used = [[0]], first
    for column, width in enumerate(others, 1):
        if console.is_terminal and len(parts[-1]) > 1 and used + 2 + width > console.width:
            parts.append([0])
            used = first
        parts[-1].append(column)
        used += 2 + width
    return parts


def redirect_to_devnull(output: IO[str]) -> None:
    """Discard output buffered for a closed pipe, which would raise again at the interpreter's exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, output.fileno())
    os.close(devnull)


def print_json(document: object) -> None:
    """Print one JSON document on standard output; numbers that are not finite, which JSON lacks, are null."""
    print(json.dumps(_finite(document), indent=1, allow_nan=False))


def _finite(document: object) -> object:
    if isinstance(document, Mapping):
        return {key: _finite(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [_finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def print_facts(console: Console, facts: Mapping[str, object]) -> None:
    """Print names and values in two columns."""
    width = max(15, *map(len, facts))
    for name, value in facts.items():
        console.print(f"{name:<{width}}  {value}", soft_wrap=True, markup=False)


def print_stderr(text: str) -> None:
    """Print lines on standard error; a terminal shows messages wrapped between words."""
    with contextlib.suppress(OSError, ValueError):  # standard error is no file, or closed
        if sys.stderr.isatty():
            text = fold(text, os.get_terminal_size(sys.stderr.fileno()).columns)
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def waiting(describe: Callable[[], str]) -> Iterator[None]:
    """Show what the block waits for and the elapsed time, if standard error is a terminal."""
    console, begun = PipeTolerantConsole(stderr=True, highlight=False), time.monotonic()
    if not console.is_terminal:
        yield
        return
    spinner = Spinner("dots", style="cyan")

    def render() -> RenderableType:
        seconds = time.monotonic() - begun
        if seconds < SHORT_WAIT:
            return ""
        spinner.update(text=Text(f"{describe()}  {format_duration(seconds)}", "cyan"))
        return spinner

    with Live(console=console, transient=True, refresh_per_second=8, get_renderable=render):
        yield


def one_line(error: BaseException) -> str:
    """The error's message in one line, prefixed by its type unless the message is written for users."""
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
