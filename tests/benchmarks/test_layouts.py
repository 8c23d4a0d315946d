"""The table of layouts: a profile is planned and traced; the documented one has all startable profiles as they are now."""

from pathlib import Path

from benchmarks import layouts

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_profile_is_planned_and_traced(capsys):
    assert layouts.main(["tiny"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["tiny", "1 × 2 cpu", "TP 2, ZeRO-1 1", "none"]
    assert (
        cells[5] == "5"
    )  # block and loss: two of training each for the block, one for the loss, and two of evaluation


def test_documented_layouts_are_those_of_the_profiles():
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    documented = [tuple(cell.strip() for cell in row[:4]) for row in rows[1:]]
    assert documented == list(map(layouts.describe, layouts.startable()))
