"""Values of `train.recompute`: from text to the modes of layers and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.recompute import MODES, describe, from_layer_modes, invalid, layer_modes

STAGES = st.lists(st.lists(st.sampled_from(MODES), min_size=1, max_size=5), min_size=1, max_size=4)


@given(STAGES)
def test_layer_modes_round_trip_through_text(stages):
    value = from_layer_modes(stages)
    assert invalid(value) is None
    assert layer_modes(value, [*map(len, stages)]) == [mode for modes in stages for mode in modes]


@pytest.mark.parametrize(
    ("value", "stages"),
    [
        ("full", ["ff", "fff"]),
        ("full 2", ["ff", "ffn"]),
        ("full 1 + selective", ["fs", "fss"]),
        ("none 1 + full", ["nf", "nff"]),
        (["full 1", "none"], ["fn", "nnn"]),
    ],
)
def test_numbers_count_the_first_layers_of_each_stage(value, stages):
    modes = {mode[0]: mode for mode in MODES}
    by_stage = [[modes[letter] for letter in letters] for letters in stages]
    assert layer_modes(value, [2, 3]) == [mode for each in by_stage for mode in each]
    assert from_layer_modes(by_stage) == value


def test_equal_stages_are_described_once():
    assert describe(["full 2", "none", "none"]) == "full 2, 2 × none"
