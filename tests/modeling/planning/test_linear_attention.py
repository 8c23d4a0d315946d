"""Plans of linear attention: FLOPs and memory in proportion to the tokens, and exchanged states."""

from itertools import product

import pytest

from benchmarks.memory import HYBRID, SINGLE, case
from modeling.planning.stage_costs import StageCosts
from parallel.attention.delta_rule import CHUNK, executed_multiply_adds

CONTEXT, LENGTHS = 4, (2048, 8192)


@pytest.fixture(scope="module")
def costs():
    """Costs of the layers by context degree and sequence length, and the model."""
    alone = (*HYBRID, *SINGLE, "train.recompute=none", "train.micro_batch_size=1", "train.precision=bf16")
    found = {}
    for degree, s in product((1, CONTEXT), LENGTHS):
        changes = (f"parallel.context={degree}", f"cluster.devices_per_node={degree}")
        changes += (f"train.sequence_length={s}", f"model.max_position_embeddings={s}")
        found[degree, s] = StageCosts(case([*alone, *changes])).layers(range(4))
    return found, case(alone).model


def test_cost_per_token_does_not_depend_on_the_length(costs):
    found, model = costs
    d, u = model.linear_key_head_dim, model.linear_value_head_dim
    rule = sum(executed_multiply_adds(d, u, CHUNK, backward) for backward in (False, True))
    weights = model.layer_weights(None, linear=True)
    short, long = (found[1, s] for s in LENGTHS)
    for s, (_, linear, _, _) in zip(LENGTHS, (short, long), strict=True):
        assert linear.flops == 2 * s * (3 * weights + model.linear_num_value_heads * rule)
    assert (long[1].saved, long[1].moved) == pytest.approx((4 * short[1].saved, 4 * short[1].moved), rel=1e-3)
    assert long[3].flops > 5 * short[3].flops  # with full attention


def test_context_ranks_exchange_states_whose_size_does_not_depend_on_the_length(costs):
    found, model = costs
    d, u, n = model.linear_key_head_dim, model.linear_value_head_dim, model.linear_num_value_heads
    convolved = 2 * model.linear_num_key_heads * d + n * u
    # In float32 what tokens add to a state and its factor, and three tokens in bf16, of two chunks; as many in backward.
    sent = 2 * 2 * (CONTEXT - 1) * (4 * n * d * (d + u) + 2 * 3 * convolved)
    assert [found[CONTEXT, s][1].communication["context"] for s in LENGTHS] == [sent, sent]
