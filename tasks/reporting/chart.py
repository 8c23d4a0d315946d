"""Charts without scripts, fonts or requests: HTML that scales with its page, or standalone SVG.

In a page, colours come from CSS variables and labels are HTML, which keeps its size and stays readable on a phone. The image
contains everything, in colours that are readable on light and dark backgrounds.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from tasks.reporting.downsampling import downsample

WIDTH, HEIGHT = 1000.0, 400.0  # of the plot area, in SVG units
MAX_POINTS = 500
TICKS = 5  # of an axis, about
CELL = 10  # of a heat map, in SVG units
LINE_STYLES = 6  # line colours in report.html
MUTED = "#868e96"
COLOURS = {
    "training": "#7f93a8",
    "smooth": "#2f8fe0",
    "validation": "#e8703a",
    "rejected": "#d6453d",
    "line-4": "#9a62bd",
}
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """A line of a chart: `points` are (x, y) ordered by x, `style` is the CSS class that sets the colour.

    With `dots`, points are marked too; if not `joined`, they are all there is.
    """

    label: str
    style: str
    points: Points
    dots: bool = False
    joined: bool = True


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
    x_exponents: bool = False,
    x_integers: bool = False,
) -> str:
    """HTML of a chart of all series that have finite points; "" if none has.

    Args:
        from_zero: start the y axis at 0.
        x_exponents: the x values are base-10 logarithms; ticks are powers of ten.
        x_integers: ticks of the x axis are integers, as they are if all x values are.
    """
    shown = _finite(series)
    if not shown:
        return ""
    frame = Frame.enclosing(shown, from_zero=from_zero, x_integers=x_integers or x_exponents)
    x_ticks = [f"10<sup>{tick:g}</sup>" if x_exponents else f"{tick:,g}" for tick in frame.x_ticks]
    legend = "".join(
        f'<span class="{line.style}{"" if line.joined else " points"}">{escape(line.label)}</span>'
        for line in shown
        if len(shown) > 1 or line.label != y_label
    )
    return (
        f'<figure class="chart">{legend and f"<figcaption>{legend}</figcaption>"}'
        f'<div class="y-label">{escape(y_label)}</div>'
        f'<div class="y">{"".join(f"<span>{tick:,g}</span>" for tick in reversed(frame.y_ticks))}</div>'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(y_label)} by {escape(x_label)}">{frame.svg_paths(shown)}</svg>'
        f'<div class="x">{"".join(f"<span><b>{tick}</b></span>" for tick in x_ticks)}</div>'
        f'<div class="label">{escape(x_label)}</div></figure>'
    )


def sparkline(points: Points, *, label: str) -> str:
    """HTML of a small line without axes; "" without two finite points."""
    shown = [point for point in points if math.isfinite(point[1])]
    if len(shown) < 2:
        return ""
    frame = Frame(*(_ends([point[axis] for point in shown]) for axis in (0, 1)))
    path = f"M{'L'.join(frame.positions(shown, digits=0))}"
    view = f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none"'
    return f'<svg class="spark" {view} role="img" aria-label="{escape(label)}"><path class="smooth" d="{path}"/></svg>'


def stacked_bar(parts: Mapping[str, float]) -> str:
    """Stacked bar in HTML: each share has its name as CSS class and a tooltip; "" if all are 0."""
    total = sum(parts.values())
    if not total:
        return ""
    shares = {name: value / total for name, value in parts.items() if value / total >= 0.001}
    spans = "".join(
        f'<i class="{escape(name)}" style="width:{100 * share:.1f}%" title="{escape(name)} {share:.1%}"></i>'
        for name, share in shares.items()
    )
    return f'<span class="stack">{spans}</span>'


def heat_map(loads: Sequence[Sequence[float]], *, row_label: str, column_label: str) -> str:
    """HTML of a table of loads: a cell's shade is its share of twice its row's mean; "" without rows.

    Args:
        loads: equally long rows.
    """
    if not loads:
        return ""
    cells = []
    for y, row in enumerate(loads):
        mean = sum(row) / len(row) or 1
        for x, load in enumerate(row):
            shade = min(1.0, load / mean / 2)
            text = f"{row_label} {y}, {column_label} {x}: {load / mean:.2f} of the mean"
            cells.append(
                f'<rect x="{x * CELL}" y="{y * CELL}" width="{CELL}" height="{CELL}" '
                f'fill-opacity="{shade:.2f}"><title>{text}</title></rect>'
            )
    width, height = len(loads[0]) * CELL, len(loads) * CELL
    label = f"load of each {column_label} by {row_label}"
    return (
        f'<figure class="heat"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f"{''.join(cells)}</svg><figcaption>{row_label}s from top to bottom, {column_label}s from left to right; "
        f"darkest: twice the {row_label}'s mean or more</figcaption></figure>"
    )


def svg_data_uri(series: Sequence[Series], *, x_label: str, y_label: str, x_integers: bool = False) -> str:
    """Data URI of the chart as SVG (about 10 kB), for viewers that only show images; "" without points."""
    text = svg(series, x_label=x_label, y_label=y_label, x_integers=x_integers)
    return text and f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}"


def svg(series: Sequence[Series], *, x_label: str, y_label: str, x_integers: bool = False) -> str:
    """The chart as an SVG image, as docs/notebook.ipynb shows it; "" without points."""
    shown = _finite(series, MAX_POINTS // 2)
    if not shown:
        return ""
    frame = Frame.enclosing(shown, x_integers=x_integers)
    left, top = 90.0, 46.0
    text = f'font-family="system-ui, sans-serif" font-size="17" fill="{MUTED}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + left + 30:.0f} {HEIGHT + 110:.0f}">',
        "<style>path{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round}"
        f".grid{{stroke:{MUTED};stroke-opacity:.35;stroke-width:1}}.line{{stroke-width:2}}"
        ".dots{stroke-width:9;stroke-linecap:round;vector-effect:none}"  # smaller with the image
        + "".join(f".{name}{{stroke:{colour}}}" for name, colour in COLOURS.items())
        + f'</style><g transform="translate({left:.0f},{top:.0f})">{frame.svg_paths(shown)}</g>',
    ]
    legend_x = left
    for line in shown:
        colour = COLOURS.get(line.style, MUTED)
        parts.append(f'<rect x="{legend_x:.0f}" y="14" width="22" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{legend_x + 30:.0f}" y="22" {text}>{escape(line.label)}</text>')
        legend_x += 62 + 9.5 * len(line.label)
    for index, tick in enumerate(frame.y_ticks):
        y = top + (1 - index / (len(frame.y_ticks) - 1)) * HEIGHT + 6
        parts.append(f'<text x="{left - 12:.0f}" y="{y:.0f}" text-anchor="end" {text}>{tick:,g}</text>')
    for index, tick in enumerate(frame.x_ticks):
        x = left + index / (len(frame.x_ticks) - 1) * WIDTH
        position = f'x="{x:.0f}" y="{top + HEIGHT + 26:.0f}"'
        parts.append(f'<text {position} text-anchor="middle" {text}>{tick:,g}</text>')
    middle = top + HEIGHT / 2
    for caption, position in (
        (x_label, f'x="{left + WIDTH / 2:.0f}" y="{top + HEIGHT + 52:.0f}"'),
        (y_label, f'x="20" y="{middle:.0f}" transform="rotate(-90 20 {middle:.0f})"'),
    ):
        parts.append(f'<text {position} text-anchor="middle" {text}>{escape(caption)}</text>')
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class Frame:
    """Plot area: from the first to the last tick of each axis."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]

    @classmethod
    def enclosing(
        cls, series: Sequence[Series], *, from_zero: bool = False, x_integers: bool = False
    ) -> Frame:
        """The smallest frame with round ticks that contains all points."""
        xs = [x for line in series for x, _ in line.points]
        ys = [y for line in series for _, y in line.points]
        whole = x_integers or all(float(x).is_integer() for x in xs)  # such as steps
        x_ticks = (integer_ticks if whole else ticks)(min(xs), max(xs))
        return cls(x_ticks, ticks(min(0.0, *ys) if from_zero else min(ys), max(ys)))

    def svg_paths(self, series: Sequence[Series]) -> str:
        """Grid and lines as SVG paths of WIDTH × HEIGHT."""
        parts = [
            f'<path class="grid" d="M0,{(1 - index / (len(self.y_ticks) - 1)) * HEIGHT:.1f}H{WIDTH:.0f}"/>'
            for index in range(len(self.y_ticks))
        ]
        for line in series:
            positions = self.positions(line.points)
            if line.joined:
                parts.append(f'<path class="line {line.style}" d="M{"L".join(positions)}"/>')
            if (
                line.dots or len(positions) == 1
            ):  # lines of length 0 with round caps stay round when the plot is stretched
                dots = "".join(f"M{position}h0" for position in positions)
                parts.append(f'<path class="dots {line.style}" d="{dots}"/>')
        return "".join(parts)

    def positions(self, points: Points, digits: int = 1) -> list[str]:
        """`x,y` of each point in SVG units, with this number of decimal places."""
        left, bottom = self.x_ticks[0], self.y_ticks[0]
        width, height = self.x_ticks[-1] - left, self.y_ticks[-1] - bottom
        return [
            f"{(x - left) / width * WIDTH:.{digits}f},{(1 - (y - bottom) / height) * HEIGHT:.{digits}f}"
            for x, y in points
        ]


def _ends(values: Sequence[float]) -> Sequence[float]:
    """The smallest and the largest value, spread a little if they are equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def ticks(low: float, high: float) -> list[float]:
    """Round ticks, 1, 2 or 5 times a power of ten apart, from at most `low` to at least `high`."""
    if high - low <= 1e-12 * max(abs(low), abs(high)) + 1e-300:
        margin = max(0.5, abs(high) / 1000)
        low, high = low - margin, high + margin
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def integer_ticks(low: float, high: float) -> list[float]:
    """Consecutive integers, or every second, fifth ... one, from at most `low` to at least `high`."""
    marks = ticks(low, high)
    step = max(1, round(marks[1] - marks[0]))
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(index * step) for index in range(first, max(last, first + 1) + 1)]


def _finite(series: Sequence[Series], limit: int = MAX_POINTS) -> list[Series]:
    """The series that have finite points, with only those, downsampled."""
    finite = [replace(line, points=[p for p in line.points if math.isfinite(p[1])]) for line in series]
    return [replace(line, points=downsample(line.points, limit)) for line in finite if line.points]
