"""What each schedule takes and costs."""

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from parallel.pipeline.schedules import (
    SCHEDULES,
    bubble,
    check_microbatches,
    forwards_ahead,
    in_flight,
    one_forward_one_backward,
    step_time,
)


class Stub:
    """As much of a stage as torch's schedules look at when they are made."""

    def __init__(self, number: int, count: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = number, count, ranks, 0
        self.submod = None


def made(schedule: str, ranks: int, microbatches: int):
    kind, each = {
        "interleaved": (ScheduleInterleaved1F1B, 2),
        "zero_bubble": (ScheduleInterleavedZeroBubble, 1),
    }[schedule]
    return kind([Stub(i, ranks * each, ranks) for i in range(0, ranks * each, ranks)], microbatches), each


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_microbatches_are_refused_where_torch_refuses_them(schedule, ranks):
    for microbatches in range(1, 14):
        try:
            check_microbatches(schedule, ranks, microbatches)
        except ValueError as error:
            with pytest.raises(ValueError, match="microbatches"):
                made(schedule, ranks, microbatches)
            for nearest in str(error).split("nearest valid: ")[1].split(", "):
                made(schedule, ranks, int(nearest))
        else:
            made(schedule, ranks, microbatches)


def test_1f1b_takes_at_least_as_many_microbatches_as_stages():
    check_microbatches("1f1b", 4, 4)
    with pytest.raises(ValueError, match="nearest valid: 4"):
        check_microbatches("1f1b", 4, 3)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 4), (4, 8), (4, 3), (3, 12)])
def test_microbatches_in_flight_are_those_of_the_schedule(schedule, ranks, microbatches):
    order, each = made(schedule, ranks, microbatches)
    for rank in range(ranks):
        held = most = 0
        for action in filter(None, order.pipeline_order[rank]):
            held += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_INPUT": 0, "BACKWARD_WEIGHT": -1}[
                action.computation_type.name
            ]
            most = max(most, held)
        assert in_flight(schedule, ranks, rank, microbatches, each=each) == most / each


def test_other_schedules_wait_less():
    waits = [bubble(schedule, 4, 8, each) for schedule, each in zip(SCHEDULES, (1, 2, 1), strict=True)]
    assert waits == [3 / 8, 3 / 16, 1 / 8]


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 5), (4, 4), (4, 9)])
def test_1f1b_holds_no_more_than_it_says(ranks, microbatches, ahead):
    for rank in range(ranks):
        held = most = 0
        order = one_forward_one_backward(ranks, rank, microbatches, ahead)
        for kind, _ in order:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert in_flight("1f1b", ranks, rank, microbatches, ahead=ahead) == most
        assert sorted(order) == [(kind, i) for kind in "BF" for i in range(microbatches)]


def test_even_stages_wait_as_the_formula_says_and_gain_nothing_by_running_ahead():
    for ranks, microbatches in ((2, 4), (4, 8)):
        expected = microbatches * (1 + bubble("1f1b", ranks, microbatches))
        assert step_time([1.0] * ranks, microbatches, ahead=0) == pytest.approx(expected)
        assert forwards_ahead([1.0] * ranks, microbatches) == 0


def test_a_slow_early_stage_runs_ahead():
    assert forwards_ahead([2.5, 1.9], 4) == 1
    assert step_time([2.5, 1.9], 4, ahead=1) < 0.92 * step_time([2.5, 1.9], 4, ahead=0)
    assert forwards_ahead([1.9, 2.5], 4) == 0
