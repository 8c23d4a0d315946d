"""A line chart as inline SVG and HTML: no script, no font, no request; colours come from the page's CSS variables.

The drawing stretches with the page while its labels, which are HTML, keep their size: readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1000.0, 400.0  # of the drawing's own coordinates
MAX_POINTS = 500


@dataclass(frozen=True)
class Series:
    """One line: `points` are (x, y) in order of x; `style` is a CSS class of the page (its colour)."""

    label: str
    style: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """HTML of a chart of all series that have finite points; a sentence where there are none."""
    shown = [
        Series(
            line.label,
            line.style,
            thinned([point for point in line.points if math.isfinite(point[1])]),
            line.dots,
        )
        for line in series
    ]
    shown = [line for line in shown if line.points]
    if not shown:
        return "<p>No points to draw.</p>"
    xs = [x for line in shown for x, _ in line.points]
    ys = [y for line in shown for _, y in line.points]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))

    def place(x: float, y: float) -> str:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return f"{across * WIDTH:.1f},{(1 - up) * HEIGHT:.1f}"

    drawing = [
        f'<path class="grid" d="M0,{(1 - index / (len(y_ticks) - 1)) * HEIGHT:.1f}H{WIDTH:.0f}"/>'
        for index in range(len(y_ticks))
    ]
    for line in shown:
        places = [place(x, y) for x, y in line.points]
        drawing.append(f'<path class="line {line.style}" d="M{"L".join(places)}"/>')
        if (
            line.dots
        ):  # a dot is a line without length and with round ends: round however the drawing is stretched
            drawing.append(f'<path class="dots {line.style}" d="{"".join(f"M{at}h0" for at in places)}"/>')
    legend = "".join(f'<span class="{line.style}">{escape(line.label)}</span>' for line in shown)
    return (
        f'<figure class="chart"><figcaption>{legend}</figcaption>'
        f'<div class="y">{"".join(f"<span>{tick:g}</span>" for tick in reversed(y_ticks))}</div>'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(y_label)} by {escape(x_label)}">{"".join(drawing)}</svg>'
        f'<div class="x">{"".join(f"<span>{tick:,g}</span>" for tick in x_ticks)}</div>'
        f'<div class="label">{escape(x_label)}</div></figure>'
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (steps of 1, 2 or 5 times a power of ten) whose first and last enclose low and high."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS points: means of neighbours, so that no spike is made up or moved."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups
    ]
