"""HTML page of a series: old and new loss by round, what was promoted, and every held-out set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.continual.gates import COLUMNS, NEW, OLD
from tasks.continual.rounds import NOT_PROMOTED, PROMOTED, Round, Series, short_name
from tasks.fleet.page import format_cost
from tasks.reporting import html
from tasks.reporting.chart import Series as Line
from tasks.reporting.chart import line_chart, svg_data_uri
from tasks.reporting.format import format_count, format_duration, format_share, without_empty_columns
from tasks.store.store import Store

HEADINGS = (
    *("round", "outcome", "from", "new tokens", "replay", "loss on old text", "loss on new text"),
    *("time", "cost"),
)
REPLACED_OFFSET = 0.2  # in the chart, in rounds
AXES: Any = {"x_label": "round", "y_label": "loss", "x_integers": True}


def location(name: str) -> str:
    """Name of the page in the store."""
    return f"series/{name}.html"


def write(store: Store, found: Series) -> str:
    """Write the page into the store; returns its location."""
    store.backend.write(location(found.name), render(found).encode())
    return store.backend.location(location(found.name))


def render(found: Series) -> str:
    rounds = found.rounds
    latest = next((each for each in rounds if each.current and each.rows), None)  # None of the first run
    counts = {
        outcome: sum(each.outcome == outcome for each in rounds) for outcome in (PROMOTED, NOT_PROMOTED)
    }
    figures = {"promoted model": found.promoted.run}
    if latest is not None and (old := latest.row(OLD)) and old.after is not None:
        figures["loss on old text"] = f"{old.after:.4f}"
    if latest is not None and (new := latest.row(NEW)) and new.after is not None:
        figures["loss on its new text"] = f"{new.after:.4f}"
    figures["rounds promoted"] = f"{counts[PROMOTED]}"
    figures["not promoted"] = f"{counts[NOT_PROMOTED]}"
    if costs := [each.cost for each in rounds if each.cost is not None]:
        figures["cost"] = format_cost(sum(costs))
    chart = line_chart(lines(rounds), **AXES) or html.paragraph("No round was evaluated yet.", muted=True)
    sections = [
        html.section("", html.key_figures(figures)),
        html.section("Loss by round", chart),
        html.section("Rounds", html.table(*table(rounds))),
        html.section(
            "Held-out sets", *(_sets(each) for each in reversed(rounds) if each.rows or each.reason)
        ),
    ]
    return html.page(found.name, "Series of continual pretraining", sections, wide=True)


def picture(rounds: Sequence[Round]) -> str:
    """Data URI of the chart as an image; "" before the first round was judged."""
    return svg_data_uri(lines(rounds), **AXES)


def lines(rounds: Sequence[Round]) -> list[Line]:
    """Loss on old and new text by round: a line through the promoted rounds, and points of the others."""
    judged = [each for each in rounds if each.rows]
    promoted = [each for each in judged if each.outcome == PROMOTED]
    others = [each for each in judged if each.outcome != PROMOTED]
    start = [(0.0, row.before) for each in judged[:1] if (row := each.row(OLD)) and row.before is not None]
    return [
        Line("old text", "smooth", start + _points(promoted, OLD), dots=True),
        Line("new text", "validation", _points(promoted, NEW), dots=True),
        Line("new text before", "training", _points(judged, NEW, after=False), dots=True, joined=False),
        Line("old text, not promoted", "rejected", _points(others, OLD), dots=True, joined=False),
        Line("new text, not promoted", "line-4", _points(others, NEW), dots=True, joined=False),
    ]


def _points(rounds: Sequence[Round], name: str, *, after: bool = True) -> list[tuple[float, float]]:
    """(round, loss) of each; an attempt that another one replaced is a little to the left of it."""
    found = []
    for each in rounds:
        if (row := each.row(name)) is None:
            continue
        if (value := row.after if after else row.before) is not None:
            found.append((each.number - REPLACED_OFFSET * ("~" in each.run), value))
    return found


def table(rounds: Sequence[Round], headings: Sequence[str] = HEADINGS) -> tuple[list[str], list[list[str]]]:
    """Those of the headings that any round has a value for, and the lines of the rounds."""
    shown = [HEADINGS.index(heading) for heading in headings]
    return without_empty_columns(headings, [[line[i] for i in shown] for line in map(_cells, rounds)])


def _cells(each: Round) -> tuple[str, ...]:
    """Texts of a round's line, by HEADINGS."""
    return (
        each.name,
        each.outcome + (", current" if each.current else ", rolled back" if each.rolled_back else ""),
        short_name(each.base) if each.base else "",
        "" if each.tokens is None else format_count(each.tokens),
        "" if each.replay is None else format_share(each.replay),
        _change(each, OLD),
        _change(each, NEW),
        "" if each.seconds is None else format_duration(each.seconds),
        "" if each.cost is None else format_cost(each.cost),
    )


def _change(each: Round, name: str) -> str:
    row = each.row(name)
    if row is None or row.before is None or row.after is None:
        return ""
    return f"{row.before:.4f} → {row.after:.4f}"


def _sets(each: Round) -> str:
    """A round's table, with the reason if it was not promoted."""
    reason = [html.paragraph(each.reason, muted=True)] if each.reason else []
    table = html.table(COLUMNS, [row.cells for row in each.rows])
    return html.details(f"{each.run}: {each.outcome}", *reason, table)
