"""Markdown pages in Prefect's UI beside a run's overview: all runs of a store, and a continual series."""

from __future__ import annotations

from collections.abc import Sequence

from flows.ui.overview import escape, markdown_table
from tasks.continual.page import picture
from tasks.continual.page import table as table_of
from tasks.continual.rounds import Series
from tasks.fleet.fleet import Fleet, RunView
from tasks.fleet.page import format_cost, key_figures, warning_texts
from tasks.reporting.format import format_duration, without_empty_columns

FLEET, SERIES, GATES = "fleet", "series", "gates"  # keys of artifacts
MAX_RUNS = 50  # active ones first, then the latest
MAX_ROUNDS = 50  # the latest
HEADINGS = ("run", "state", "step", "loss", "of planned speed", "goodput", "left", "cost")


def fleet_markdown(fleet: Fleet, page: str) -> str:
    """Totals, warnings and a table of runs; `page`: location of the HTML page."""
    figures = ", ".join(f"{name} **{value}**" for name, value in key_figures(fleet).items())
    warnings = "\n".join(f"- {escape(text)}" for text in warning_texts(fleet))
    table = markdown_table(*without_empty_columns(HEADINGS, [*map(_cells, fleet.runs[:MAX_RUNS])]))
    more = (
        f"{len(fleet.runs) - MAX_RUNS:,} earlier runs are on the page." if len(fleet.runs) > MAX_RUNS else ""
    )
    parts = [figures, f"## Warnings\n\n{warnings}" if warnings else "", table, more, f"Page: `{page}`"]
    return "\n\n".join(part for part in parts if part)


def _cells(run: RunView) -> list[str]:
    summary, speed, goodput = run.summary, run.speed_of_plan, run.use.goodput
    left = run.seconds_left if run.state in ("running", "queued") else None
    loss = summary.last["loss"] if summary.last else None
    return [
        run.name,
        run.shown_state,
        f"{run.step:,} of {summary.steps:,}" if summary.steps else f"{run.step:,}",
        f"{loss:.4f}" if loss is not None else "",
        f"{speed:.0%}" if speed else "",
        f"{goodput:.0%}" if goodput else "",
        format_duration(left) if left else "",
        format_cost(run.cost) if run.cost is not None else "",
    ]


def series_markdown(found: Series, page: str) -> str:
    """The chart and a table of the latest rounds; `page`: location of the HTML page."""
    curve = picture(found.rounds)
    shown: Sequence[str] = [
        f"# {escape(found.name)}: {escape(found.promoted.run)} is promoted",
        f"![Loss on old and new text by round]({curve})" if curve else "",
        markdown_table(*table_of([*reversed(found.rounds[-MAX_ROUNDS:])])),
        f"Page: `{page}`",
    ]
    return "\n\n".join(part for part in shown if part)
