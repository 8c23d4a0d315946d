"""Line charts without a script, a font or a request: as HTML that stretches with its page, or as one SVG picture.

In a page colours come from its CSS variables, and labels are HTML, which keeps its size: readable on a phone. A picture has
all of it inside, in colours that can be read on light and on dark.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 1000.0, 400.0  # of the drawing's own coordinates
MAX_POINTS = 500
QUIET, COLOURS = "#868e96", {"training": "#7f93a8", "smooth": "#2f8fe0", "validation": "#e8703a"}


@dataclass(frozen=True)
class Series:
    """One line: `points` are (x, y) in order of x; `style` is a CSS class of the page (its colour)."""

    label: str
    style: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, from_zero: bool = False) -> str:
    """HTML of a chart of all series that have finite points; a sentence where there are none.

    Args:
        from_zero: whether the y axis begins at 0, as it should where lengths are compared.
    """
    shown = _finite(series)
    if not shown:
        return "<p>No points to draw.</p>"
    frame = Frame.around(shown, from_zero=from_zero)
    legend = "".join(f'<span class="{line.style}">{escape(line.label)}</span>' for line in shown)
    return (
        f'<figure class="chart"><figcaption>{legend}</figcaption>'
        f'<div class="y">{"".join(f"<span>{tick:,g}</span>" for tick in reversed(frame.y_ticks))}</div>'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(y_label)} by {escape(x_label)}">{frame.drawing(shown)}</svg>'
        f'<div class="x">{"".join(f"<span>{tick:,g}</span>" for tick in frame.x_ticks)}</div>'
        f'<div class="label">{escape(x_label)}</div></figure>'
    )


def picture(series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """The chart as the data URI of an SVG of about 10 kB, for where only a picture can be shown; "" without points."""
    shown = _finite(series, MAX_POINTS // 2)
    if not shown:
        return ""
    frame = Frame.around(shown)
    left, top = 70.0, 46.0
    text = f'font-family="system-ui, sans-serif" font-size="17" fill="{QUIET}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 100:.0f} {HEIGHT + 110:.0f}">',
        "<style>path{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round}"
        f".grid{{stroke:{QUIET};stroke-opacity:.35;stroke-width:1}}.line{{stroke-width:2}}"
        ".dots{stroke-width:9;stroke-linecap:round}"
        + "".join(f".{name}{{stroke:{colour}}}" for name, colour in COLOURS.items())
        + f'</style><g transform="translate({left:.0f},{top:.0f})">{frame.drawing(shown)}</g>',
    ]
    across = left
    for line in shown:
        colour = COLOURS.get(line.style, QUIET)
        parts.append(f'<rect x="{across:.0f}" y="14" width="22" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{across + 30:.0f}" y="22" {text}>{escape(line.label)}</text>')
        across += 62 + 9.5 * len(line.label)
    for index, tick in enumerate(frame.y_ticks):
        y = top + (1 - index / (len(frame.y_ticks) - 1)) * HEIGHT + 6
        parts.append(f'<text x="{left - 12:.0f}" y="{y:.0f}" text-anchor="end" {text}>{tick:,g}</text>')
    for index, tick in enumerate(frame.x_ticks):
        x = left + index / (len(frame.x_ticks) - 1) * WIDTH
        parts.append(
            f'<text x="{x:.0f}" y="{top + HEIGHT + 26:.0f}" text-anchor="middle" {text}>{tick:,g}</text>'
        )
    label = f'<text x="{left + WIDTH / 2:.0f}" y="{top + HEIGHT + 52:.0f}" text-anchor="middle" {text}>'
    svg = "".join([*parts, f"{label}{escape(x_label)}</text></svg>"])
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


@dataclass(frozen=True)
class Frame:
    """What of the plane is shown: from the first to the last tick of each axis."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]

    @classmethod
    def around(cls, series: Sequence[Series], *, from_zero: bool = False) -> Frame:
        """The frame that all points lie in."""
        xs = [x for line in series for x, _ in line.points]
        ys = [y for line in series for _, y in line.points]
        return cls(ticks(min(xs), max(xs)), ticks(min(0.0, *ys) if from_zero else min(ys), max(ys)))

    def drawing(self, series: Sequence[Series]) -> str:
        """Grid and lines as SVG paths in a box of WIDTH × HEIGHT."""
        parts = [
            f'<path class="grid" d="M0,{(1 - index / (len(self.y_ticks) - 1)) * HEIGHT:.1f}H{WIDTH:.0f}"/>'
            for index in range(len(self.y_ticks))
        ]
        for line in series:
            places = [self._place(x, y) for x, y in line.points]
            parts.append(f'<path class="line {line.style}" d="M{"L".join(places)}"/>')
            if (
                line.dots
            ):  # lines without length and with round ends, which stay round when the drawing is stretched
                parts.append(f'<path class="dots {line.style}" d="{"".join(f"M{at}h0" for at in places)}"/>')
        return "".join(parts)

    def _place(self, x: float, y: float) -> str:
        across = (x - self.x_ticks[0]) / (self.x_ticks[-1] - self.x_ticks[0])
        up = (y - self.y_ticks[0]) / (self.y_ticks[-1] - self.y_ticks[0])
        return f"{across * WIDTH:.1f},{(1 - up) * HEIGHT:.1f}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (steps of 1, 2 or 5 times a power of ten) whose first and last enclose low and high."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most so many points: means of neighbours, so that no spike is made up or moved."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups
    ]


def _finite(series: Sequence[Series], most: int = MAX_POINTS) -> list[Series]:
    """The series with their finite points, those that have any."""
    shown = [
        replace(line, points=thinned([p for p in line.points if math.isfinite(p[1])], most))
        for line in series
    ]
    return [line for line in shown if line.points]
