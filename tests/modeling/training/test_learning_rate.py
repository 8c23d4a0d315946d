"""Learning rate schedule."""

import pytest

from modeling.training.learning_rate import learning_rate
from profiles import resolve

KEYS = "steps: 100, warmup_steps: 10, minimum_rate_steps: 30, learning_rate: 1.0, minimum_learning_rate: 0.1"


@pytest.mark.parametrize(("schedule", "halfway"), [("cosine", 0.55), ("linear", 0.55)])
def test_learning_rate_decays_after_warmup_and_ends_with_steps_at_the_minimum(schedule, halfway):
    train = resolve.load(
        "tiny", [f"train={{{KEYS}, schedule: {schedule}, global_batch_size: 8, sequence_length: 256}}"]
    ).train
    assert [learning_rate(train, step) for step in (1, 10, 40)] == pytest.approx([0.1, 1.0, halfway])
    assert [learning_rate(train, step) for step in (70, 71, 100)] == pytest.approx([0.1] * 3)
    assert learning_rate(train, 69) > 0.1
