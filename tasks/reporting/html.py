"""Building blocks of self-contained HTML pages (no network, light and dark mode); all text is escaped.

Pages are calls of functions, not Jinja2 templates, although these would escape by themselves: most of a page is computed, such as
charts, and a type checker reads the functions and their callers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from profiles.files import state_files

NOWRAP_LENGTH = 12  # characters of a table cell that is not wrapped, and of a word that is not broken
FIGURE_LENGTH = 20  # characters of a key figure that has no row of its own
INTERVAL = re.compile(r"[-+]?\d\S*( \w+illion)? (–|to|→|±) .{,20}")  # wrapped only on a phone


def page(title: str, description: str, sections: Iterable[str], *, wide: bool = False) -> str:
    """A complete HTML file from the template report.html; `wide`: for tables of many columns."""
    template = Template(Path(__file__).with_name("report.html").read_text())
    return template.substitute(
        title=escape(title),
        description=escape(description),
        sections="\n".join(sections),
        main='<main class="wide">' if wide else "<main>",
    )


def write(path: Path, page: str) -> Path:
    """Write a page atomically; returns its path."""
    state_files.write(path, page.encode())
    return path


def section(heading: str, *contents: str) -> str:
    """A card with a heading; "" without contents."""
    if not any(contents):
        return ""
    top = f"<h2>{escape(heading)}</h2>" if heading else ""
    return f"<section>{top}{''.join(contents)}</section>"


def key_figures(values: Mapping[str, str]) -> str:
    """Values in large type, each above its name; a long one, such as a run's name, has a row of its own."""
    shown = "".join(
        f"<div{' class=row' * (len(v) > FIGURE_LENGTH)}><b>{escape(v)}</b><span>{escape(k)}</span></div>"
        for k, v in values.items()
    )
    return f'<div class="figures">{shown}</div>'


def properties(values: Mapping[str, str]) -> str:
    """A table of names and values; "" without values."""
    rows = "".join(f"<tr><th>{_breakable(k)}</th><td>{escape(v)}</td></tr>" for k, v in values.items())
    return f'<table class="facts">{rows}</table>' if rows else ""


def _breakable(text: str) -> str:
    """A name, which may be wrapped after each slash."""
    return escape(text).replace("/", "/<wbr>")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a header row, which scrolls on narrow pages; "" without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{_breakable(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table class="grid"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    longest = max(map(len, text.split()), default=0)
    name = "short" if len(text) <= NOWRAP_LENGTH else "long" if longest > NOWRAP_LENGTH else ""
    name = name or "interval" * bool(INTERVAL.fullmatch(text))
    return f"<td{name and f' class={name}'}>{escape(text)}</td>"


def paragraph(text: str, *, muted: bool = False) -> str:
    return f"<p{' class=quiet' if muted else ''}>{escape(text)}</p>"


def code_block(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def details(summary: str, *contents: str) -> str:
    """A collapsed section that the reader can open."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(contents)}</details>"


def columns(*contents: str, only_wide: bool = False) -> str:
    """Contents side by side, stacked on narrow pages or, with `only_wide`, left out; "" without contents."""
    shown = "".join(f"<div>{content}</div>" for content in contents)
    return f'<div class="beside{" only-wide" * only_wide}">{shown}</div>' if any(contents) else ""
