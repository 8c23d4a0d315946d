"""HTML page of a mixture: proposed weights, proxies, and losses by source from natural to proposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from profiles.experiments import Mixture
from tasks.reporting import html
from tasks.reporting.chart import LINE_STYLES, Series, line_chart
from tasks.reporting.format import format_interval, format_time, without_empty_columns

POINTS = 25  # of a line
LEFT_OUT = "Error of proxies left out: that of forecasting each proxy's loss from the other proxies."


def render(mixture: Mixture, proposal: Mapping[str, Any]) -> str:
    """The page, from a mixture and the contents of its proposal."""
    mean = proposal["losses"][-1]
    interval = format_interval(mean["change_interval"], "+z.4f", "to")
    figures = {
        "mean loss, proposed": f"{mean['loss']:.4f}",
        "mean loss, natural": f"{mean['natural']:.4f}",
        f"change, {proposal['share']:.0%} interval {interval}": f"{mean['change']:+z.4f}",
    }
    settings = "\n".join(f"--set {override}" for override in proposal["overrides"])
    return html.page(
        mixture.name,
        mixture.description or f"Mixture of the sources of {proposal['target']['name']}",
        [
            html.section("", html.key_figures(figures)),
            html.section("Weights", _weights(proposal), html.code_block(settings)),
            html.section("Held-out loss by source", *_losses(proposal)),
            html.section("From the natural to the proposed mixture", _chart(proposal)),
            html.section("Outcome of a proxy with the proposed weights", _outcome(proposal)),
            html.section("Proxies", _proxies(proposal)),
            html.section("Registered", html.properties({"written": format_time(proposal["written"])})),
        ],
    )


def source_label(source: str | None) -> str:
    """A source in a table of losses; None is the mean."""
    return "mean" if source is None else source


def _weights(proposal: Mapping[str, Any]) -> str:
    rows = []
    for name, weight in proposal["weights"].items():
        interval = format_interval(proposal["weight_intervals"][name], ".1%")
        weights = f"{proposal['natural'][name]:.1%}", f"{weight:.1%}", interval
        rows.append((name, *weights, f"{proposal['passes'][name]:.2g}"))
    return html.table(("source", "natural", "proposed", "interval", "times read"), rows)


def _losses(proposal: Mapping[str, Any]) -> list[str]:
    """The table, and what its last column is."""
    errors, rows = proposal["left_out_error"] or {}, []
    for row in proposal["losses"]:
        error = errors.get(row["source"])
        rows.append(
            (
                source_label(row["source"]),
                f"{row['natural']:.4f}",
                f"{row['loss']:.4f}",
                format_interval(row["interval"]),
                f"{row['change']:+z.4f}",
                format_interval(row["change_interval"], "+z.4f", "to"),
                "" if error is None else f"{error:.2%}",
            )
        )
    columns = ("source", "natural", "proposed", "interval", "change", "interval", "error of proxies left out")
    table = html.table(*without_empty_columns(columns, rows))
    return [table, html.paragraph(LEFT_OUT, muted=True)] if errors else [table]


def _chart(proposal: Mapping[str, Any]) -> str:
    """Fitted losses on the line between both mixtures, and the losses of a run with the proposed one."""
    floor, effects = (np.array(proposal["laws"][name]) for name in ("floor", "effects"))
    natural, best = (np.array(list(proposal[name].values())) for name in ("natural", "weights"))
    names = [row["source"] for row in proposal["losses"]]
    aim = np.array([proposal["objective"].get(name, 0.0) for name in names[:-1]])
    shares = np.linspace(0, 1, POINTS)
    losses = np.array([floor + np.exp(effects @ (natural + share * (best - natural))) for share in shares])
    losses = np.column_stack([losses, losses @ aim / aim.sum()])
    measured = {row["source"]: row["outcome"] for row in proposal.get("outcome", ())}
    lines = []
    for number, (name, column) in enumerate(zip(names, losses.T, strict=True)):
        style = f"line-{number % LINE_STYLES + 1}"
        lines.append(
            Series(source_label(name), style, list(zip(shares.tolist(), column.tolist(), strict=True)))
        )
        if name in measured:
            point = [(1.0, measured[name])]
            lines.append(Series(f"{source_label(name)}, measured", style, point, dots=True, joined=False))
    return line_chart(
        lines, x_label="from the natural (0) to the proposed mixture (1)", y_label="held-out loss"
    )


def _outcome(proposal: Mapping[str, Any]) -> str:
    rows = []
    for row in proposal.get("outcome", ()):
        inside = "inside" if row["within"] else "outside"
        values = (f"{row['loss']:.4f}", f"{row['outcome']:.4f}", f"{row['error']:+z.2%}", inside)
        rows.append((source_label(row["source"]), *values))
    return html.table(("source", "forecast", "outcome", "error of the forecast", "outcome is"), rows)


def _proxies(proposal: Mapping[str, Any]) -> str:
    sources, held_out = list(proposal["weights"]), [row["source"] for row in proposal["losses"][:-1]]
    rows = []
    for proxy in proposal["proxies"]:
        weights = [f"{proxy['weights'].get(name, 0):.1%}" for name in sources]
        rows.append((proxy["name"], *weights, *(f"{proxy['losses'][name]:.4f}" for name in held_out)))
    return html.table(("run", *sources, *(f"loss of {name}" for name in held_out)), rows)
