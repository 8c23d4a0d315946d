"""Pipeline schedules: supported microbatches, idle time and microbatches in flight."""

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from parallel.pipeline.schedules import (
    SCHEDULES,
    bubble,
    check_microbatches,
    choose_extra_forwards,
    count_lanes,
    in_flight,
    lane,
    one_forward_one_backward,
    step_time,
)


class Stub:
    """The attributes of a stage that constructors of torch's schedules read."""

    def __init__(self, number: int, count: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = number, count, ranks, 0
        self.submod = None


def torch_schedule(schedule: str, ranks: int, microbatches: int):
    kind, stages_per_rank = {
        "interleaved": (ScheduleInterleaved1F1B, 2),
        "zero_bubble": (ScheduleInterleavedZeroBubble, 1),
    }[schedule]
    return kind(
        [Stub(i, ranks * stages_per_rank, ranks) for i in range(0, ranks * stages_per_rank, ranks)],
        microbatches,
    ), stages_per_rank


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_check_microbatches_agrees_with_torch(schedule, ranks):
    for microbatches in range(1, 14):
        try:
            check_microbatches(schedule, ranks, microbatches)
        except ValueError as error:
            with pytest.raises(ValueError, match="microbatches"):
                torch_schedule(schedule, ranks, microbatches)
            for nearest in str(error).split("nearest valid: ")[1].split(", "):
                torch_schedule(schedule, ranks, int(nearest))
        else:
            torch_schedule(schedule, ranks, microbatches)


def test_1f1b_needs_at_least_as_many_microbatches_as_ranks():
    check_microbatches("1f1b", 4, 4)
    with pytest.raises(ValueError, match="nearest valid: 4"):
        check_microbatches("1f1b", 4, 3)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 4), (4, 8), (4, 3), (3, 12)])
def test_in_flight_matches_torchs_schedule(schedule, ranks, microbatches):
    order, stages_per_rank = torch_schedule(schedule, ranks, microbatches)
    for rank in range(ranks):
        held = most = 0
        for action in filter(None, order.pipeline_order[rank]):
            held += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_INPUT": 0, "BACKWARD_WEIGHT": -1}[
                action.computation_type.name
            ]
            most = max(most, held)
        assert (
            in_flight(schedule, ranks, rank, microbatches, stages_per_rank=stages_per_rank)
            == most / stages_per_rank
        )


def test_bubbles_match_the_formulas():
    bubbles = [bubble(schedule, 4, 8, k) for schedule, k in zip(SCHEDULES, (1, 2, 1), strict=True)]
    assert bubbles == [3 / 8, 3 / 16, 1 / 8]


@pytest.mark.parametrize("extra_forwards", [0, 1, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 5), (4, 4), (4, 9)])
def test_in_flight_matches_the_1f1b_order(ranks, microbatches, extra_forwards):
    for rank in range(ranks):
        held = most = 0
        order = one_forward_one_backward(ranks, rank, microbatches, extra_forwards)
        for kind, _ in order:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert in_flight("1f1b", ranks, rank, microbatches, extra_forwards=extra_forwards) == most
        assert sorted(order) == [(kind, i) for kind in "BF" for i in range(microbatches)]


def test_even_stages_match_the_bubble_formula_and_need_no_extra_forwards():
    for ranks, microbatches in ((2, 4), (4, 8)):
        expected = microbatches * (1 + bubble("1f1b", ranks, microbatches))
        assert step_time([1.0] * ranks, microbatches, extra_forwards=0) == pytest.approx(expected)
        assert choose_extra_forwards([1.0] * ranks, microbatches) == 0


def test_slow_early_stage_runs_extra_forwards():
    assert choose_extra_forwards([2.5, 1.9], 4) == 1
    assert step_time([2.5, 1.9], 4, extra_forwards=1) < 0.92 * step_time([2.5, 1.9], 4, extra_forwards=0)
    assert choose_extra_forwards([1.9, 2.5], 4) == 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_edges_before_and_after_a_stage_have_different_lanes(ranks):
    lanes = count_lanes(ranks)
    used = [lane(edge, ranks, lanes) for edge in range(4 * ranks)]
    assert {*used} == {*range(lanes)}
    for rank in range(ranks):
        after = {used[edge] for edge in range(rank, len(used), ranks)}
        before = {used[edge] for edge in range(rank + ranks - 1, len(used), ranks)}
        assert len(after) == len(before) == 1
        assert after != before
    assert {lane(edge, ranks, 1) for edge in range(ranks)} == {0}
