"""A series of continual pretraining in Prefect's UI: its chart, its rounds, and the latest gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flows.ui.overview import escape
from tasks.continual.gates import COLUMNS, Verdict
from tasks.continual.page import HEADINGS, cells, picture
from tasks.continual.rounds import Series

KEY, TABLE = "series", "gates"
MAX_ROUNDS = 50  # the latest


def table(verdict: Verdict) -> list[Mapping[str, str]]:
    """Rows of the table artifact of a round."""
    return [dict(zip(COLUMNS, row.cells, strict=True)) for row in verdict.rows]


def markdown(found: Series, page: str) -> str:
    """The chart and a table of the latest rounds; `page`: location of the HTML page."""
    curve = picture(found.rounds)
    shown: Sequence[str] = [
        f"# {escape(found.name)}: {escape(found.promoted.run)} is promoted",
        f"![Loss on old and new text by round]({curve})" if curve else "",
        _rows(found),
        f"Page: `{page}`",
    ]
    return "\n\n".join(part for part in shown if part)


def _rows(found: Series) -> str:
    lines = [HEADINGS, ["---"] * len(HEADINGS)]
    lines += [[*map(escape, cells(each))] for each in reversed(found.rounds[-MAX_ROUNDS:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
