"""Heat map of the experts' load by layer, as HTML without scripts."""

from __future__ import annotations

from collections.abc import Sequence

CELL = 10  # of the drawing, in SVG units


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
