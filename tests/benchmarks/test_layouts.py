"""Layout table: profiles are planned and traced; the docs match the current profiles and plans."""

from pathlib import Path

import pytest

from benchmarks import layouts
from modeling.planning.planner import plan

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def cells_of(lines: list[str]) -> dict[str, list[str]]:
    """Cells of the rows of all tables, by the first."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in rows if row != list(layouts.COLUMNS)}


DOCUMENTED = cells_of(PAGE.read_text().splitlines())
TRACED = ("llama3-8b", "llama3-70b-h200")  # at full size


def test_profiles_are_planned_and_traced(capsys):
    """No plan needs less memory than its trace, or much more."""
    assert layouts.main(["tiny", *TRACED]) == 0
    found = cells_of(capsys.readouterr().out.splitlines())
    cells = found["tiny"]
    assert cells[:4] == ["tiny", "1 × 2 cpu", "TP 2, ZeRO-1 1", "none"]
    # Training: two of the block, one of the loss; evaluation: one of each.
    assert cells[6] == "5"
    for name in TRACED:
        planned, traced = (float(cell.split()[0]) for cell in found[name][4:6])
        assert traced <= planned < 1.35 * traced
        assert found[name] == DOCUMENTED[name]


def test_documented_layouts_are_those_of_the_profiles():
    """Plans are compared too, except on a CPU, whose memory is that of this machine."""
    profiles = layouts.startable()
    headings = [line.removeprefix("## ") for line in PAGE.read_text().splitlines() if line.startswith("## ")]
    assert headings == list(dict.fromkeys(map(layouts.model_of, profiles)))
    assert [tuple(row[:4]) for row in DOCUMENTED.values()] == list(map(layouts.describe, profiles))
    cache: dict = {}
    for profile in profiles:
        if profile.cluster.device != "cpu":
            row = DOCUMENTED[profile.name]
            assert (row[4], row[7]) == layouts.describe_plan(plan(profile, cache)), profile.name
