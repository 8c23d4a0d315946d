"""The table of layouts: a profile is planned and traced; the documented one has all startable profiles as they are now."""

from pathlib import Path

from benchmarks import layouts

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_profiles_are_planned_and_traced(capsys):
    """At full size; no plan promises less memory than is traced, or much more."""
    assert layouts.main(["tiny", "llama3.1-8b-h100"]) == 0
    *_, tiny, large = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in tiny.strip("|").split("|")]
    assert cells[:4] == ["tiny", "1 × 2 cpu", "TP 2, ZeRO-1 1", "none"]
    assert (
        cells[6] == "5"
    )  # block and loss: two of training each for the block, one for the loss, and two of evaluation
    planned, traced = (float(cell.split()[0]) for cell in large.strip("|").split("|")[4:6])
    assert traced <= planned < 1.35 * traced


def test_documented_layouts_are_those_of_the_profiles():
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    documented = [tuple(cell.strip() for cell in row[:4]) for row in rows[1:]]
    assert documented == list(map(layouts.describe, layouts.startable()))
