"""Tables of documentation pages, and the columns of metrics.jsonl on docs/training/metrics.md."""

import json
import re
from pathlib import Path

METRICS = Path(__file__).parents[2] / "docs/training/metrics.md"
TABLE = re.compile(r"(?:^\|.*\n)+", re.M)


def rows_of(page: Path, heading: str, number: int = 0) -> list[list[str]]:
    """Cells of the rows of a section's table, without its header; `number` counts the section's tables."""
    section = page.read_text().partition(f"{heading}\n")[2]
    return _cells(TABLE.findall(section)[number])


def _cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def documented_columns() -> dict[str, str]:
    """Columns of metrics.jsonl on the page, and their names in TensorBoard ("": none)."""
    found = {}
    for table in TABLE.findall(METRICS.read_text()):
        if table.startswith("| column |"):
            for columns, shown, *_ in _cells(table):
                names, tags = (re.findall(r"`([^`]+)`", cell) for cell in (columns, shown))
                found |= dict(zip(names, tags or [""] * len(names), strict=True))
    return found


def undocumented_columns(runs: Path) -> set[str]:
    """Columns in the metrics.jsonl files of these run folders that the page does not describe."""
    files = runs.glob("*/metrics.jsonl")
    rows = (json.loads(line) for file in files for line in file.read_text().splitlines())
    return {column.partition("/")[0] for row in rows for column in row} - documented_columns().keys()
