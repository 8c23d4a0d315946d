"""Pipeline schedules: passes of 1f1b, idle time and activation memory of each; layers of each stage.

The passes of interleaved and zero_bubble schedules are ordered by torch (pipeline.py).

With P ranks of k stages each and m microbatches of forward time F and backward time B = I + W per rank (I for the gradient of
the input, W for those of the weights), a rank idles for at most, and holds the activations of at most

    1f1b         k = 1    (P - 1)·(F + B)        P microbatches, fewer on later ranks    arXiv 2006.09503
    interleaved  k ≥ 2    (P - 1)·(F + B) / k    (1 + 1/k)·P on the first                arXiv 2104.04473
    zero_bubble  k = 1    (P - 1)·(F + I - W)    P on every rank                         arXiv 2401.10241 (ZB-H1)

With uneven stages a slow early stage should not wait for gradients too: with 1f1b all ranks but the last run extra warmup
forwards if that pays off, and hold as many more microbatches (10% faster on 2 ranks, with stages of 3 layers, and 1
and the head).

A model's layers are cut into P · k stages of consecutive layers. Stage i is on rank i mod P, so a microbatch passes the ranks k
times. The slowest stage determines the time of a step, so stages are balanced to minimise its cost. The head counts: with a large
vocabulary it costs as much as several layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from parallel.constraints import invalid_cuts, minimum_stages, supports_microbatches

SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
WORTHWHILE = 0.02  # share of a step that extra forwards must save


def one_forward_one_backward(
    ranks: int, rank: int, microbatches: int, extra_forwards: int
) -> list[tuple[str, int]]:
    """The 1f1b order of a rank: ("F" or "B", microbatch)."""
    warmup = min(microbatches, _maximum_held(ranks, rank, extra_forwards))
    order = [("F", i) for i in range(warmup)]
    for i in range(microbatches):
        order.append(("B", i))
        if warmup + i < microbatches:
            order.append(("F", warmup + i))
    return order


def _maximum_held(ranks: int, rank: int, extra_forwards: int) -> int:
    """Microbatches whose activations a 1f1b rank holds at once; extra forwards are useless on the last."""
    return ranks - rank + (extra_forwards if rank < ranks - 1 else 0)


def choose_extra_forwards(costs: Sequence[float], microbatches: int) -> int:
    """How many extra warmup forwards to run with 1f1b: the fewest within WORTHWHILE of the fastest step.

    Args:
        costs: of each stage in any unit; backward takes twice as long as forward.
    """
    return _choose_extra_forwards(tuple(costs), min(microbatches, 4 * len(costs)))  # the steady state repeats


@lru_cache
def _choose_extra_forwards(costs: tuple[float, ...], microbatches: int) -> int:
    # No step is shorter: a stage waits for the first forward, and its last backward passes the stages before it.
    shortest = max(sum(costs[:rank]) + microbatches * cost for rank, cost in enumerate(costs))
    if step_time(costs, microbatches, 0) <= shortest * (1 + WORTHWHILE):
        return 0
    times = [step_time(costs, microbatches, extra) for extra in range(len(costs))]
    return next(extra for extra, time in enumerate(times) if time <= min(times) * (1 + WORTHWHILE))


def step_time(costs: Sequence[float], microbatches: int, extra_forwards: int) -> float:
    """Time of a 1f1b step in the unit of the costs, without communication."""
    ranks = len(costs)
    orders = [one_forward_one_backward(ranks, rank, microbatches, extra_forwards) for rank in range(ranks)]
    clocks, done = [0.0] * ranks, [0] * ranks
    # Times at which each rank's passes ended, in order of microbatches; the ends of the pipeline wait for nobody.
    start = [0.0] * microbatches
    forwards = [start, *([] for _ in range(ranks))]
    backwards = [*([] for _ in range(ranks)), start]
    while min(done) < 2 * microbatches:
        for rank, order in enumerate(orders):
            clock, seconds = clocks[rank], costs[rank] / 3
            for kind, i in order[done[rank] :]:
                forward = kind == "F"
                source = forwards[rank] if forward else backwards[rank + 1]
                if i >= len(source):
                    break
                clock = max(clock, source[i]) + (seconds if forward else 2 * seconds)
                (forwards[rank + 1] if forward else backwards[rank]).append(clock)
                done[rank] += 1
            clocks[rank] = clock
    return max(clocks)


def in_flight(
    schedule: str,
    ranks: int,
    rank: int,
    microbatches: int,
    *,
    stages_per_rank: int = 1,
    extra_forwards: int = 0,
) -> float:
    """Peak number of microbatches whose activations a rank holds; in one of its k stages, it counts 1/k."""
    if schedule == "1f1b":
        return min(_maximum_held(ranks, rank, extra_forwards), microbatches)
    if schedule == "zero_bubble":
        return min(ranks, microbatches)
    in_round = microbatches // max(1, microbatches // ranks)
    k = stages_per_rank
    return min((k - 1) * in_round + 2 * (ranks - 1 - rank) + 1, k * microbatches) / k


def bubble(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """Pipeline bubble: a rank's idle time ÷ its busy time, for equal stages and F = I = W."""
    return (
        (ranks - 1) / microbatches / {"1f1b": 1, "interleaved": stages_per_rank, "zero_bubble": 3}[schedule]
    )


def check_microbatches(schedule: str, ranks: int, microbatches: int) -> None:
    """Raise ValueError with the nearest valid numbers if the schedule does not support `microbatches`."""
    if not supports_microbatches(schedule, ranks, microbatches):
        near = range(1, microbatches + 2 * ranks)
        below = [m for m in near if m < microbatches and supports_microbatches(schedule, ranks, m)][-1:]
        above = [m for m in near if m > microbatches and supports_microbatches(schedule, ranks, m)][:1]
        raise ValueError(
            f"microbatches = {microbatches}: schedule {schedule!r} on pipeline = {ranks} does not support this number; "
            f"nearest valid: {', '.join(map(str, below + above))}"
        )


def lane(edge: int, ranks: int, lanes: int) -> int:
    """Process group, by index, of messages between stage `edge` and the next."""
    position = edge % ranks
    return min(2 if ranks % 2 and position == ranks - 1 else position % 2, lanes - 1)


def count_lanes(ranks: int) -> int:
    """Number of lanes that `lane` needs for an interleaved pipeline."""
    return 1 if ranks == 1 else 2 + ranks % 2


def cut_layers(
    costs: Sequence[float], ranks: int, schedule: str = "1f1b", cuts: Sequence[int] | None = None
) -> list[range]:
    """The layers of each stage, in order.

    Args:
        costs: of each layer in any unit; the embedding's is added to the first, the head's to the last.
        ranks: P.
        schedule: one of SCHEDULES.
        cuts: first layer of the second and each later stage; their number determines k. None balances by cost.

    Raises:
        ValueError: an unknown schedule, fewer layers than stages, or invalid cuts.
    """
    layers = len(costs)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule = {schedule!r}: not one of {', '.join(SCHEDULES)}")
    if cuts is not None:
        if reason := invalid_cuts(cuts, layers, ranks, schedule):
            raise ValueError(f"pipeline_cuts = {list(cuts)}: {reason}")
        return [range(low, high) for low, high in pairwise((0, *cuts, layers))]
    stages = minimum_stages(schedule, ranks)
    if layers < stages:
        raise ValueError(
            f"pipeline = {ranks}: {layers} layers do not fill {stages} stages of schedule {schedule!r}; "
            f"nearest valid: {max(1, layers * ranks // stages)}"
        )
    return balance(costs, stages)


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Cut layers into non-empty stages of minimal maximum cost, then minimal sum of squared costs.

    Among equal cuts it prefers more layers in later stages: earlier ones hold more microbatches in flight.
    """
    layers = len(costs)
    sums = [0, *accumulate(costs)]
    # best[n]: (highest cost, sum of squared costs, first layers) of the best cut of the first n layers so far
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(1, stages + 1):
        ends = [layers] if stage == stages else range(stage, layers)
        best = {
            end: min(
                (max(highest, cost), squares + cost**2, [*starts, start])
                for start, (highest, squares, starts) in best.items()
                if start < end and (cost := sums[end] - sums[start]) >= 0
            )
            for end in ends
        }
    starts = best[layers][2]
    return [range(low, high) for low, high in zip(starts, [*starts[1:], layers], strict=True)]
