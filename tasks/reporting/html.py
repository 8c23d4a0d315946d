"""HTML of reports: a page that needs no network, light or dark as the reader's system is, and its parts, all escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

SHORT = 12  # characters


def page(title: str, description: str, sections: Iterable[str]) -> str:
    """The whole file."""
    template = Template(Path(__file__).with_name("report.html").read_text())
    return template.substitute(
        title=escape(title), description=escape(description), sections="\n".join(sections)
    )


def section(heading: str, *contents: str) -> str:
    """A card with a heading (none where it is empty); nothing where there are no contents."""
    if not any(contents):
        return ""
    top = f"<h2>{escape(heading)}</h2>" if heading else ""
    return f"<section>{top}{''.join(contents)}</section>"


def figures(values: Mapping[str, str]) -> str:
    """Large figures, each above its name."""
    shown = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in values.items())
    return f'<div class="figures">{shown}</div>'


def facts(values: Mapping[str, str]) -> str:
    """A table of names and values; nothing where there are none."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in values.items()
    )
    return f'<table class="facts">{rows}</table>' if rows else ""


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a header, which scrolls by itself where the page is narrow; nothing without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table class="grid"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    """Of a table: a figure stays in one line with its unit."""
    return f"<td{' class=short' if len(text) <= SHORT else ''}>{escape(text)}</td>"


def paragraph(text: str, *, quiet: bool = False) -> str:
    return f"<p{' class=quiet' if quiet else ''}>{escape(text)}</p>"


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def unfold(summary: str, *contents: str) -> str:
    """What is shown when it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(contents)}</details>"


def beside(*contents: str) -> str:
    """Side by side, below each other where the page is narrow."""
    return f'<div class="beside">{"".join(f"<div>{content}</div>" for content in contents)}</div>'


def heading(text: str) -> str:
    """Of a part of a section."""
    return f"<h3>{escape(text)}</h3>"
