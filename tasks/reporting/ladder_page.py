"""HTML page of a ladder: forecast, losses by compute with the fitted law, and gains from more compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from modeling.scaling.law import Law
from profiles.experiments import Ladder
from tasks.reporting import html
from tasks.reporting.chart import Series, line_chart
from tasks.reporting.format import format_count, format_flops, format_interval, format_time

POINTS = 40  # of a line
N = "N: multiply-adds per token, including the head and attention; a run on D tokens takes 6·N·D FLOPs."


def render(ladder: Ladder, forecast: Mapping[str, Any]) -> str:
    """The page, from a ladder and the contents of its forecast."""
    target = forecast["target"]
    figures = {
        f"loss of {target['name']}": f"{forecast['loss']:.4f}",
        f"{forecast['share']:.0%} interval": format_interval(forecast["interval"]),
        "times the largest rung's compute": f"{forecast['extrapolation']:.1f}",
        "relative noise of one run": f"{forecast['noise']:.2%}",
    }
    # Forecasts of earlier versions lack warnings.
    warnings = [html.paragraph(f"Warning: {text}") for text in forecast.get("warnings", ())]
    return html.page(
        ladder.name,
        ladder.description or f"Scaling ladder of {target['name']}",
        [
            html.section("", html.key_figures(figures)),
            html.section("Loss by training compute", _chart(forecast)),
            html.section("Rungs", _rungs(forecast), html.paragraph(N, muted=True), *warnings),
            html.section("Backtest: the largest rungs forecast from the others", _backtest(forecast)),
            html.section("Metrics", _metrics(forecast)),
            html.section("Loss by length, each trained to the end of its schedule", _lengths(forecast)),
            html.section("Best size for a budget", *_budgets(forecast)),
            html.section(
                "Registered",
                html.properties(
                    {"written": format_time(forecast["written"]), "law": describe_law(Law(**forecast["law"]))}
                ),
            ),
        ],
    )


def describe_law(law: Law) -> str:
    """The law with its coefficients: L = E + A·N^-α + B·D^-β."""
    size = law.size * law.scale[0] ** law.alpha
    data = law.data * law.scale[1] ** law.beta
    return f"L = {law.irreducible:.3f} + {size:.4g} · N^-{law.alpha:.3f} + {data:.4g} · D^-{law.beta:.3f}"


def _chart(forecast: Mapping[str, Any]) -> str:
    """Losses by training FLOPs: measured, fitted, forecast, and the interval's ends."""
    law, rungs, target = Law(**forecast["law"]), forecast["rungs"], forecast["target"]
    ordered = sorted(rungs, key=lambda rung: rung["flops"])
    lowest, highest = np.log10(ordered[0]["flops"]), np.log10(forecast["flops"])
    compute = np.linspace(lowest, highest, POINTS)
    # Along a straight path of sizes from the smallest rung to the target.
    n = np.geomspace(ordered[0]["n"], target["n"], POINTS)
    path = [(float(c), float(law.loss(m, 10**c / 6 / m))) for c, m in zip(compute, n, strict=True)]
    measured = [(float(np.log10(rung["flops"])), rung["loss"]) for rung in ordered]
    end, (low, high) = float(highest), forecast["interval"]
    lines = [
        Series("fitted law, smallest rung to target", "smooth", path),
        Series("measured", "validation", measured, dots=True, joined=False),
        Series(
            "forecast with its interval", "training", [(end, low), (end, forecast["loss"]), (end, high)], True
        ),
    ]
    return line_chart(lines, x_label="training FLOPs", y_label="held-out loss", x_exponents=True)


def _rungs(forecast: Mapping[str, Any]) -> str:
    law = Law(**forecast["law"])
    rows = []
    for rung in forecast["rungs"]:
        fitted = float(law.loss(rung["n"], rung["d"]))
        error = f"{fitted / rung['loss'] - 1:+z.2%}"
        sizes = (format_count(round(rung["n"])), format_count(round(rung["d"])), format_flops(rung["flops"]))
        rows.append((rung["name"], *sizes, f"{rung['loss']:.4f}", f"{fitted:.4f}", error))
    return html.table(("run", "N", "tokens", "FLOPs", "loss", "fitted", "error"), rows)


def _backtest(forecast: Mapping[str, Any]) -> str:
    rows = [
        (
            format_flops(6 * row["n"] * row["d"]),
            f"{row['loss']:.4f}",
            f"{row['forecast']:.4f}",
            format_interval(row["interval"]),
            "inside" if row["interval"][0] <= row["loss"] <= row["interval"][1] else "outside",
            f"{row['forecast'] / row['loss'] - 1:+z.2%}",
        )
        for row in forecast["backtest"] or ()
    ]
    return html.table(("FLOPs", "loss", "forecast", "interval", "loss is", "error"), rows)


def _metrics(forecast: Mapping[str, Any]) -> str:
    """Forecasts of the metrics that the backtest supports."""
    rows = [
        (name, f"{row['value']:.4f}", format_interval(row["interval"]), f"{row['backtest_error']:.2%}")
        for name, row in forecast["metrics"].items()
    ]
    return html.table(("metric", "forecast", "interval", "error of the backtest"), rows)


def _lengths(forecast: Mapping[str, Any]) -> str:
    rows = [
        (format_count(round(row["tokens"])), f"{row['loss']:.4f}", format_interval(row["interval"]))
        for row in forecast["lengths"]
    ]
    return html.table(("tokens", "loss", "interval"), rows)


def _budgets(forecast: Mapping[str, Any]) -> list[str]:
    rows = []
    for row in forecast["budgets"]:
        best, low, high, tokens = (
            format_count(round(size)) for size in (row["n"], *row["n_interval"], row["tokens"])
        )
        rows.append((format_flops(row["flops"]), best, f"{low} – {high}", tokens, f"{row['loss']:.4f}"))
    parts = [html.table(("FLOPs", "best N", "interval", "tokens", "loss"), rows)]
    if rows and "gain" in (last := forecast["budgets"][-1]):
        gain = f"{last['gain']:.4f} nats per token ({format_interval(last['gain_interval'], word='to')})"
        parts.append(html.paragraph(f"Ten times the compute lowers the loss by {gain}."))
    return parts
