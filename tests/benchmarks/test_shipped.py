"""Table of the shipped profiles: they are planned and traced; the docs match.

That all its other rows are those of the current profiles and plans is tested in tests/profiles/test_shipped.py.
"""

from pathlib import Path

import pytest

from benchmarks import shipped
from profiles import resolve
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


def test_search_wants_a_reason_for_each_faster_topology_that_is_not_shipped(capsys, tmp_path, monkeypatch):
    """From 2% of a step on, with that number."""
    slow = "extends: stablelm2-1.6b\nmodel: {num_hidden_layers: 6}\nparallel: {tensor: 4}\n"
    monkeypatch.setitem(resolve.shipped_files(), "slow", tmp_path / "slow.yaml")
    (tmp_path / "slow.yaml").write_text(slow)
    assert shipped.main(["slow"], searches=True) == 1
    (_, _, _, faster, changes, _, _) = cells_of(capsys.readouterr().out.splitlines())["slow"]
    assert "parallel.tensor=1" in changes
    percent = round(float(faster.removesuffix("%")))
    (tmp_path / "slow.yaml").write_text(
        f"# Tensor 1 is estimated to be {percent}% faster, but not shipped.\n{slow}"
    )
    assert shipped.main(["slow"], searches=True) == 0
    assert "2% faster" in shipped.comments("phi4-14b-h100")  # in the overlay for H100
    assert "6% faster" in shipped.comments("llama3.1-70b")  # in the profile that it extends
