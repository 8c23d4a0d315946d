"""Memory of a rank beyond parameters, gradients and states."""

from modeling.planning.memory import PlannedBucket, activation_bytes
from parallel.optimizer.adamw import AdamW
from parallel.optimizer.muon import Muon
from profiles import resolve


def test_matrices_of_compiled_muon_are_held_at_the_same_time():
    """More than the exchanged gradients, which are AdamW's peak."""
    profile = resolve.load("llama3-8b")
    bucket = PlannedBucket(8000, True, True, shards=8, replicas=1, experts=False, rule=AdamW())
    adamw, muon = (
        activation_bytes(profile, 0, 1, 0, [bucket._replace(rule=rule, stacked=held)])
        for rule, held in ((AdamW(), 0), (Muon(), 12_000))
    )
    assert muon - adamw == 12_000 - 4 * 1000
