"""Rules for `data.schedule`: weights of the sources that change during training."""

import pytest

from tests.profiles.test_check import accepted, rejection

TWO_SOURCES = "data.sources=[{kind: python-docs, weight: 3}, {kind: python-docs, weight: 1}]"


@pytest.mark.parametrize(
    ("schedule", "key", "reason"),
    [
        ("[{step: 9, weights: [1]}]", "data.schedule.0.weights", "has 1 weights for 2 training sources"),
        ("[{step: 9, weights: [0, 0]}]", "data.schedule.0.weights", "are all zero"),
        ("[{step: 9, weights: [1, 2]}, {step: 9, weights: [1, 1]}]", "data.schedule.1.step", "is not after step 9"),
        ("[{step: 301, weights: [1, 2]}]", "data.schedule.0.step", "is after the last step, train.steps 300"),
        ("[{step: 9, weights: [1, -2]}]", "data.schedule.0.weights.1", "is below 0"),
    ],
)  # fmt: skip
def test_an_impossible_schedule_of_the_mixture_is_rejected(schedule, key, reason):
    error = rejection(TWO_SOURCES, f"data.schedule={schedule}")
    assert error.key == key
    assert reason in error.reason


def test_a_schedule_of_the_mixture_needs_weights():
    accepted(TWO_SOURCES, "data.schedule=[{step: 1, weights: [0, 1]}, {step: 300, weights: [1, 1]}]")
    assert "have none" in rejection("data.schedule=[{step: 9, weights: [1]}]").reason
