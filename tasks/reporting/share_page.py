"""HTML page of a proposed replay share: the proxies' old and new losses by share, and the fitted ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiles.experiments import Share
from tasks.reporting import html
from tasks.reporting.chart import Series, line_chart
from tasks.reporting.format import format_interval, format_time


def render(
    described: Share, proposal: Mapping[str, Any], lines: Mapping[str, list[tuple[float, float]]]
) -> str:
    """The page, from a share file, the contents of its proposal, and the fitted losses (share, loss)."""
    best = format_interval(proposal["interval"], ".1%")
    figures = {"share": f"{proposal['share']:.1%}", f"{proposal['probability']:.0%} interval": best}
    for row in proposal["losses"]:
        figures[f"{row['set']} loss, before the round {row['before']:.4f}"] = f"{row['loss']:.4f}"
    settings = "\n".join(f"--set {override}" for override in proposal["overrides"])
    chart = []
    for number, (name, line) in enumerate(lines.items()):
        style = f"line-{number + 1}"
        points = [(proxy["share"], proxy["losses"][name]) for proxy in proposal["proxies"]]
        chart.append(Series(name, style, line))
        chart.append(Series(f"{name}, measured", style, points, dots=True, joined=False))
    rows = [
        (proxy["name"], f"{proxy['share']:.1%}", *(f"{loss:.4f}" for loss in proxy["losses"].values()))
        for proxy in proposal["proxies"]
    ]
    return html.page(
        described.name,
        described.description or f"Replay share of the next round of {proposal['target']['name']}",
        [
            html.section("", html.key_figures(figures), html.code_block(settings)),
            html.section(
                "Held-out loss by share",
                line_chart(chart, x_label="share of replayed tokens", y_label="held-out loss"),
            ),
            html.section("Proxies", html.table(("run", "share", "old loss", "new loss"), rows)),
            html.section("Registered", html.properties({"written": format_time(proposal["written"])})),
        ],
    )
