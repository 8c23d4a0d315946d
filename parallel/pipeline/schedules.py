"""In what order a pipeline's ranks work: what each schedule costs, and how many microbatches it takes.

With P ranks of k stages each and m microbatches of forward time F and backward time B = I + W a rank (I for the input's
gradient, W for the weights'), a rank waits for, and holds the activations of, at most

    1f1b         k = 1    (P - 1)·(F + B)        P microbatches, fewer on later ranks    arXiv 2006.09503
    interleaved  k ≥ 2    (P - 1)·(F + B) / k    (1 + 1/k)·P on the first                arXiv 2104.04473
    zero_bubble  k = 1    (P - 1)·(F + I - W)    P on every rank                         arXiv 2401.10241 (ZB-H1)

Where stages are uneven, an early one that is slow should not wait for gradients as well: with 1f1b, ranks before the last run one
or more forwards ahead if that pays, and hold as many microbatches more. (3 layers, and 1 with the head: 10 % faster on 2 ranks.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from parallel.constraints import supports_microbatches

SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
WORTHWHILE = 0.02  # of a step, that forwards ahead must gain


def one_forward_one_backward(ranks: int, rank: int, microbatches: int, ahead: int) -> list[tuple[str, int]]:
    """A rank's ("F" or "B", microbatch) in the order of 1f1b."""
    first = min(microbatches, held(ranks, rank, ahead))
    order = [("F", i) for i in range(first)]
    for i in range(microbatches):
        order.append(("B", i))
        if first + i < microbatches:
            order.append(("F", first + i))
    return order


def held(ranks: int, rank: int, ahead: int) -> int:
    """Microbatches that a rank holds at once with 1f1b; the last one has nothing to run ahead of."""
    return ranks - rank + (ahead if rank < ranks - 1 else 0)


def forwards_ahead(costs: Sequence[float], microbatches: int) -> int:
    """How many forwards the ranks before the last should run ahead with 1f1b: the fewest that come close to the best.

    Args:
        costs: of each stage in any unit; backward takes twice as long as forward.
    """
    return _forwards_ahead(tuple(costs), min(microbatches, 4 * len(costs)))  # what more do is the same again


@lru_cache
def _forwards_ahead(costs: tuple[float, ...], microbatches: int) -> int:
    times = [step_time(costs, microbatches, ahead) for ahead in range(len(costs))]
    return next(ahead for ahead, time in enumerate(times) if time <= min(times) * (1 + WORTHWHILE))


def step_time(costs: Sequence[float], microbatches: int, ahead: int) -> float:
    """Time of a step of 1f1b in the unit of the costs, messages taking none."""
    ranks = len(costs)
    orders = [one_forward_one_backward(ranks, rank, microbatches, ahead) for rank in range(ranks)]
    clocks = [0.0] * ranks
    ended: dict[tuple[str, int, int], float] = {}  # by kind, rank, microbatch
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                kind, i = order[0]
                before = rank - 1 if kind == "F" else rank + 1
                if 0 <= before < ranks:
                    if (kind, before, i) not in ended:
                        break
                    clocks[rank] = max(clocks[rank], ended[kind, before, i])
                clocks[rank] += costs[rank] * (1 if kind == "F" else 2) / 3
                ended[kind, rank, i] = clocks[rank]
                order.pop(0)
    return max(clocks)


def in_flight(
    schedule: str, ranks: int, rank: int, microbatches: int, *, each: int = 1, ahead: int = 0
) -> float:
    """Microbatches whose activations a rank holds when it holds most; with k stages, one of a single stage counts 1/k.

    Args:
        each: k, stages a rank.
        ahead: forwards ahead with 1f1b.
    """
    if schedule == "1f1b":
        return min(held(ranks, rank, ahead), microbatches)
    if schedule == "zero_bubble":
        return min(ranks, microbatches)
    in_round = microbatches // max(1, microbatches // ranks)
    return min((each - 1) * in_round + 2 * (ranks - 1 - rank) + 1, each * microbatches) / each


def bubble(schedule: str, ranks: int, microbatches: int, each: int = 1) -> float:
    """Time a rank waits in a step as a share of the time it works, where F, I and W take alike and stages are even."""
    return (ranks - 1) / microbatches / {"1f1b": 1, "interleaved": each, "zero_bubble": 3}[schedule]


def check_microbatches(schedule: str, ranks: int, microbatches: int) -> None:
    """Raise ValueError, naming the nearest that do, unless the schedule takes this number of microbatches a step."""
    if not supports_microbatches(schedule, ranks, microbatches):
        near = range(1, microbatches + 2 * ranks)
        below = [m for m in near if m < microbatches and supports_microbatches(schedule, ranks, m)][-1:]
        above = [m for m in near if m > microbatches and supports_microbatches(schedule, ranks, m)][:1]
        raise ValueError(
            f"microbatches = {microbatches}: schedule {schedule!r} on pipeline = {ranks} does not take so many a step; "
            f"nearest valid: {', '.join(map(str, below + above))}"
        )
