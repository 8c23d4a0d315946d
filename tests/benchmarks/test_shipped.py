"""Table of the shipped profiles: they are planned and traced; the docs match.

That all its other rows are those of the current profiles and plans is tested in tests/profiles/test_shipped.py.
"""

from pathlib import Path

import pytest

from benchmarks import shipped
from tests.profiles.pair import PAIR

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs/devices/shipped.md"


def cells_of(lines: list[str]) -> dict[str, list[str]]:
    """Cells of the rows of all tables, by the first."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in rows if row != list(shipped.COLUMNS)}


DOCUMENTED = cells_of(PAGE.read_text().splitlines())
TRACED = ("llama3-8b", "glm4-9b-h100")  # at full size; with and without recomputation


def test_profiles_are_planned_and_traced(capsys):
    """No plan needs less memory than its trace, or much more."""
    assert shipped.main([PAIR, *TRACED]) == 0
    found = cells_of(capsys.readouterr().out.splitlines())
    cells = found["pair"]
    assert cells[:4] == ["pair", "1 × 2 cpu", "TP 2", "none"]
    # Training: two of the block, one of the loss; evaluation: one of each.
    assert cells[6] == "5"
    for name in TRACED:
        planned, traced = (float(cell.split()[0]) for cell in found[name][4:6])
        assert traced <= planned < 1.35 * traced
        assert found[name] == DOCUMENTED[name]
