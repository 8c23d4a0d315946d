"""HTML page of branches: loss of each length, averages of checkpoints, and comparison of all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from profiles.experiments import Branches
from tasks.reporting import comparison_page, html
from tasks.reporting.chart import Series, line_chart
from tasks.reporting.format import format_count
from tasks.store.store import Store


def render(
    spec: Branches, store: Store, runs: Sequence[Mapping[str, Any]], averages: Sequence[Mapping[str, Any]]
) -> str:
    """The page of a trunk, the first of `runs`, its branches and averages."""
    loaded, histories = comparison_page.load_runs(store, [run["run"] for run in runs])
    trunk, *branches = runs
    rows = [
        (run["run"], f"{run['step']:,}", f"{run['steps']:,}", format_count(run["tokens"]), _loss(run))
        for run in branches
    ]
    rows.append((trunk["run"], "", f"{trunk['steps']:,}", format_count(trunk["tokens"]), _loss(trunk)))
    sections = [
        html.section("Loss by length", _chart(trunk, branches)),
        html.section(
            "Lengths", html.table(("run", "decays from step", "steps", "tokens", "validation loss"), rows)
        ),
    ]
    if averages:
        means = [(each["average"], ", ".join(each["members"]), _loss(each)) for each in averages]
        table = html.table(("average", "of", "validation loss"), means)
        sections.append(html.section("Averages of checkpoints", table))
    description = (
        spec.description
        or f"{len(branches)} branch{'es' * (len(branches) != 1)} of one trunk, {trunk['run']}"
    )
    return comparison_page.render(loaded, histories, (spec.name, description), sections)


def _chart(trunk: Mapping[str, Any], branches: Sequence[Mapping[str, Any]]) -> str:
    """Held-out loss at the end of each branch by its steps, and of the trunk at its own."""
    points = sorted((float(run["steps"]), run["validation_loss"]) for run in branches)
    end = [(float(trunk["steps"]), trunk["validation_loss"])]
    lines = [
        Series("branches, rate decayed to zero", "line-1", points, dots=True),
        Series("trunk, constant rate", "line-2", end, dots=True, joined=False),
    ]
    return line_chart(lines, x_label="steps", y_label="validation loss")


def _loss(row: Mapping[str, Any]) -> str:
    return f"{row['validation_loss']:.4f}"
