"""Cutting layers into pipeline stages."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.pipeline.schedules import balance, cut_layers


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(1, 5))
def test_balance_minimises_the_cost_of_the_slowest_stage(costs, stages):
    if len(costs) < stages:
        return
    layers = balance(costs, stages)
    assert [layer for stage in layers for layer in stage] == list(range(len(costs)))
    assert len(layers) == stages
    costs_of_all_cuts = (
        max(sum(costs[low:high]) for low, high in pairwise((0, *cuts, len(costs))))
        for cuts in combinations(range(1, len(costs)), stages - 1)
    )
    assert max(sum(costs[layer] for layer in stage) for stage in layers) == min(costs_of_all_cuts)


def test_head_counts_and_ties_favour_later_stages():
    assert cut_layers([1, 1, 1, 3], 2) == [range(3), range(3, 4)]
    assert cut_layers([1] * 10, 4) == [range(2), range(2, 4), range(4, 7), range(7, 10)]
    assert cut_layers([1] * 4, 2, "interleaved") == [range(i, i + 1) for i in range(4)]


def test_explicit_cuts_determine_the_stages():
    assert cut_layers([1] * 4, 2, "1f1b", [3]) == [range(3), range(3, 4)]
    assert len(cut_layers([1] * 6, 2, "interleaved", [1, 2, 3, 4, 5])) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3, 4), ["pipeline = 4", "3 layers", "nearest valid: 3"]),
        ((7, 4, "interleaved"), ["pipeline = 4", "8 stages", "nearest valid: 3"]),
        ((4, 2, "1f1b", [4]), ["pipeline_cuts = [4]", "between 1 and 3"]),
        ((4, 2, "1f1b", [0]), ["pipeline_cuts = [0]", "between 1 and 3"]),
        ((6, 3, "zero_bubble", [3, 3]), ["pipeline_cuts = [3, 3]", "strictly increasing"]),
        ((6, 3, "1f1b", [3]), ["pipeline_cuts = [3]", "takes 2 cuts"]),
        ((6, 2, "interleaved", [3]), ["pipeline_cuts = [3]", "takes 3, 5, ... cuts"]),
        ((4, 2, "gpipe"), ["schedule = 'gpipe'", "1f1b, interleaved, zero_bubble"]),
    ],
)
def test_invalid_cuts_are_rejected_with_valid_ones(arguments, words):
    layers, *rest = arguments
    with pytest.raises(ValueError, match="=") as caught:
        cut_layers([1] * layers, *rest)
    for word in words:
        assert word in str(caught.value)
