"""The chosen activation checkpointing against all mixes of modes, for a few layers of several kinds."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from modeling.planning.auto import choose_modes
from modeling.planning.memory import eager_working_bytes
from modeling.planning.stage_costs import LayerCosts
from profiles.recompute import MODES

BYTES = st.integers(0, 9)


@st.composite
def kinds(draw):
    """Costs by mode: a mode that saves fewer bytes needs no fewer in addition; times are arbitrary."""
    saved = sorted((draw(BYTES) for _ in MODES), reverse=True)
    tops = sorted(draw(BYTES) for _ in MODES)
    return {
        mode: LayerCosts(
            low, low + draw(st.integers(0, top)), low + top, {}, draw(BYTES), {"context": draw(BYTES)}
        )
        for mode, low, top in zip(MODES, saved, tops, strict=True)
    }


@st.composite
def ranks(draw):
    """The stages of a rank: at most six layers of one to three kinds."""
    several = draw(st.lists(kinds(), min_size=1, max_size=3))
    lengths = draw(st.sampled_from([(1,), (3,), (5,), (6,), (1, 2), (2, 3), (3, 3), (2, 1, 2)]))
    return [[draw(st.sampled_from(several)) for _ in range(length)] for length in lengths]


def cost(layer):
    return layer.communication["context"], layer.moved


def total(stages, mix):
    """Seconds and bytes moved with the modes of each stage, and the chosen layers' costs."""
    chosen = [
        [layer[mode] for layer, mode in zip(*pair, strict=True)] for pair in zip(stages, mix, strict=True)
    ]
    costs = (
        sum(values) for values in zip(*(cost(layer) for layers in chosen for layer in layers), strict=True)
    )
    return tuple(costs), chosen


@settings(max_examples=60, deadline=None)
@given(ranks(), st.sampled_from([1, 1.5, 2, 4]), st.integers(0, 120))
def test_choice_fits_if_any_mix_does_and_costs_no_more_than_any_other(stages, microbatches, limit):
    by_stage = [product(MODES, repeat=len(layers)) for layers in stages]
    every = [total(stages, mix) for mix in product(*map(list, by_stage))]
    fitting = [costs for costs, chosen in every if eager_working_bytes(chosen, microbatches) <= limit]
    costs, chosen = total(stages, choose_modes(stages, microbatches, limit, cost, tolerance=(0, 0)))
    working = eager_working_bytes(chosen, microbatches)
    if fitting:
        assert working <= limit
        assert costs == min(fitting)
    else:
        assert working == min(eager_working_bytes(other, microbatches) for _, other in every)


def test_among_mixes_near_the_least_cost_the_fewest_mode_changes_are_chosen():
    """Selective checkpointing of the second kind saves as many bytes at a cost lower by 1/1000."""
    one, other = (
        {
            mode: LayerCosts(size, size, size, {}, 0, {"context": seconds})
            for mode, size, seconds in zip(MODES, (10, 5, 5), (1000, selective, 2000), strict=True)
        }
        for selective in (1010, 1009)
    )
    layers = [one, one, other, one, other]
    choices = [choose_modes([layers], 1, 40, cost, tolerance) for tolerance in ((0, 0), (0.002, 0.002))]
    assert choices == [
        [["none", "none", "selective", "none", "selective"]],
        [["selective", "selective", "none", "none", "none"]],
    ]
