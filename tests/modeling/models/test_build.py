"""Models built from profiles."""

from modeling.models.build import build_expert_options
from profiles import resolve


def test_balance_losses_of_pairs_are_averaged_over_the_rows_of_a_step():
    """Each row, of which a pair has two, adds its loss."""
    pretraining = resolve.load("tiny-moe")
    pairs = resolve.load("tiny-moe", ["objective.kind=dpo"])
    batch = pretraining.train.global_batch_size
    assert build_expert_options(pretraining).balance.samples == batch
    assert build_expert_options(pairs).balance.samples == 2 * batch
