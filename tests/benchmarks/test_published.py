"""Plans against published steps: the documented table is current, and the goal reached."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks import published_fit
from benchmarks.harness.results import Results
from benchmarks.published import HELD_OUT, SEARCHED, SOFTWARE, compare, errors, print_searches, read
from modeling.planning.efficiency import ERRORS, kind_of
from modeling.planning.stage_costs import CostCache

PAGE = Path(__file__).parents[2] / "docs/devices/published.md"
# Rows that are planned in a second or two, of several sources, architectures and precisions; the others are in the page only.
PLANNED = ("mosaic-7b-2048-a100x8", "mosaic-3b-2048-h100x8-fp8", "tt-8b-a100x64-selop", "mb-8b-fp8-h100x8")


@pytest.fixture(scope="module")
def rows():
    return {row.name: row for row in read()}


@pytest.fixture(scope="module")
def documented(rows):
    """Cells of the page's row of each published step."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    return {cells[0]: cells for cells in lines if cells[0] in rows}


def test_page_has_every_published_step(rows, documented):
    assert [*documented] == [*rows]
    for name, row in rows.items():
        assert documented[name][1].removesuffix(", held out") == row.source
        assert documented[name][1].endswith(", held out") == (row.source in HELD_OUT)
        assert documented[name][2] == kind_of(row.profile)
    assert {row.source for row in rows.values()} == SOFTWARE.keys()


@pytest.fixture(scope="module")
def cache() -> CostCache:
    return {}


@pytest.mark.slow
def test_documented_ratios_are_those_of_plans(rows, documented, cache):
    for name in PLANNED:
        found = compare(rows[name], cache)
        assert documented[name][3:5] == [f"{found.ratio:.2f}", f"{found.ours:.2f}"]


@pytest.mark.slow
def test_fit_finds_figures_that_explain_steps_made_with_others(rows, cache):
    steps, code = [published_fit.Planned.of(rows[name], cache) for name in PLANNED[:2]], published_fit.used()
    try:
        published_fit.assume(code | {"ampere": 0.8, "fp8": 0.5})
        made = [replace(step, row=replace(step.row, seconds=step.seconds())) for step in steps]
        found = published_fit.fit(made, code)
        assert all(low <= found[name] <= high for name, (low, high) in published_fit.BOUNDS.items())
        assert published_fit.mean_error(made, code) > 0.02
        assert published_fit.mean_error(made, found) < 0.005
    finally:
        published_fit.assume(code)


@pytest.mark.slow
def test_search_finds_a_step_as_fast_as_that_of_the_published_topology(rows, tmp_path):
    """On eight devices; `python -m benchmarks.published --search` does it on up to 16,384."""
    name, file = SEARCHED[0], tmp_path / "search.jsonl"
    assert rows[name].profile.world_size == 8
    assert print_searches([rows[name]], Results(file))
    assert json.loads(file.read_text())["cpu_seconds"] < 60


def test_plans_of_sources_that_the_fit_has_not_seen_are_near_the_published_steps(documented):
    ratios = [float(cells[3]) for cells in documented.values() if cells[1].endswith(", held out")]
    assert len(ratios) > 15
    assert 0.95 <= median(ratios) <= 1.05
    assert sum(abs(ratio - 1) <= 0.25 for ratio in ratios) >= 0.8 * len(ratios)


def test_ranges_that_plans_print_are_those_of_the_page(rows, documented):
    gpus = {name for name, row in rows.items() if row.profile.cluster.device == "cuda"}
    assert errors((cells[2], float(cells[4])) for name, cells in documented.items() if name in gpus) == ERRORS
