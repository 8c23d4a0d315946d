"""Rungs of a ladder: small runs of its sizes and lengths."""

from __future__ import annotations

from collections.abc import Sequence

from modeling.scaling.planned_run import PlannedRun, small_run
from profiles.errors import ProfileError
from profiles.experiments import Ladder, RungSize


def rungs_of(ladder: Ladder, target: PlannedRun) -> list[PlannedRun]:
    """The rungs in order of compute. Raises ProfileError with the rung's key if a size is impossible."""
    found: dict[str, PlannedRun] = {}
    for number, size in enumerate(ladder.rungs):
        for length in size.tokens_per_parameter:
            try:
                rung = _rung(ladder, target, size, length)
            except ProfileError as error:
                raise error.within(f"rungs.{number}") from None
            if rung.name in found:
                raise ProfileError(f"rungs.{number}", rung.name, "is listed twice")
            found[rung.name] = rung
    return sorted(found.values(), key=lambda rung: rung.flops)


def _rung(ladder: Ladder, target: PlannedRun, size: RungSize, length: float) -> PlannedRun:
    layers = size.num_hidden_layers or target.profile.model.num_hidden_layers
    name = f"{ladder.name}-h{size.hidden_size}-l{layers}-t{length:g}"
    return small_run(ladder, target, (size.hidden_size, layers), length, name, ladder.rung_overrides)


def warnings_of(target: PlannedRun, rungs: Sequence[PlannedRun]) -> list[str]:
    """Warnings about settings that make a forecast from these rungs worse than necessary."""
    found = []
    if target.profile.model.parametrization == "standard":
        found.append(
            "model.parametrization is standard: the best learning rate changes with size; set it to mup or completep, with the "
            "size that train.learning_rate was tuned for"
        )
    largest = max((rung.flops for rung in rungs), default=0)
    if largest and target.flops > 100 * largest:
        found.append(f"the target has {target.flops / largest:,.0f} times the compute of the largest rung")
    return found
