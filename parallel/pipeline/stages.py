"""Pipeline stages: which layers each holds, and where it lies.

A model's layers are cut into P · k stages of neighbouring layers, for P ranks of the pipeline axis with k stages each.
Stage i lies on rank i mod P, so microbatches go around the ranks k times.

A step takes as long as its slowest stage lets it, so layers are cut where the costliest stage costs least: the head, worth
several layers where the vocabulary is large, counts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from parallel.constraints import invalid_cuts, minimum_stages_per_rank
from parallel.pipeline.schedules import SCHEDULES


def cut_layers(
    costs: Sequence[float], ranks: int, schedule: str = "1f1b", cuts: Sequence[int] | None = None
) -> list[range]:
    """The layers of every stage, in the order of the stages.

    Args:
        costs: of each layer in any unit; the first one's includes the embedding's, the last one's the head's.
        ranks: P.
        schedule: one of SCHEDULES.
        cuts: layers that begin the second and later stages; their number decides k. Balanced by cost where None.

    Raises:
        ValueError: an unknown schedule, fewer layers than stages, cuts out of range, not rising or of a number that the
            schedule does not take.
    """
    layers = len(costs)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule = {schedule!r} is not one of {', '.join(SCHEDULES)}")
    if cuts is not None:
        if reason := invalid_cuts(cuts, layers, ranks, schedule):
            raise ValueError(f"pipeline_cuts = {list(cuts)}: {reason}")
        return [range(low, high) for low, high in pairwise((0, *cuts, layers))]
    each = minimum_stages_per_rank(schedule, ranks)
    if layers < ranks * each:
        stages = f"{ranks * each} stages" if each == 1 else f"{ranks} x {each} stages"
        raise ValueError(
            f"pipeline = {ranks}: {layers} layers do not fill {stages} of schedule {schedule!r}; "
            f"nearest valid: {max(1, layers // each)}"
        )
    return balance(costs, ranks * each)


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Cut layers into stages of at least one so that the costliest costs least and, that given, they are even.

    Of equal cuts it takes the one with more layers in later stages: earlier ones hold more microbatches in flight.
    """
    layers = len(costs)
    sums = [0, *accumulate(costs)]
    # best[n]: for the first n layers in the stages so far (costliest, sum of squares, where the stages begin)
    best = {0: (0.0, 0.0, [])}
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
