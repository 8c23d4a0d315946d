"""Pipeline stages: the layers of each, balanced by cost.

A model's layers are cut into P · k stages of consecutive layers, for P pipeline ranks with k stages each. Stage i is on rank
i mod P, so a microbatch passes the ranks k times.

The slowest stage determines the time of a step, so stages are balanced to minimise its cost. The head counts: with a large
vocabulary it costs as much as several layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from parallel.constraints import invalid_cuts, minimum_stages
from parallel.pipeline.schedules import SCHEDULES


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
