"""A series of continual pretraining in Prefect's UI: its chart, its rounds, and the latest gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flows.ui.overview import escape, markdown_table
from tasks.continual.gates import COLUMNS, Verdict
from tasks.continual.page import picture
from tasks.continual.page import table as table_of
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
        markdown_table(*table_of([*reversed(found.rounds[-MAX_ROUNDS:])])),
        f"Page: `{page}`",
    ]
    return "\n\n".join(part for part in shown if part)
