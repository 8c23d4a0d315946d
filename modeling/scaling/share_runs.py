"""Runs of a share file: a small model in place of the promoted one, and its rounds at several shares.

A round of the small model is as long in proportion to its own training as the series' round is to the target's.
"""

from __future__ import annotations

from modeling.scaling.planned_run import PlannedRun, small_run
from profiles.errors import ProfileError
from profiles.experiments import Share
from profiles.schema import Profile

PLAIN = ("train.epochs=null", "data.schedule=[]")  # rounds ignore the schedule of the sources


def base_of(described: Share, target: PlannedRun) -> PlannedRun:
    """The proxy in place of the promoted model, trained on the series' history."""
    return _small(described, target, described.proxy.tokens_per_parameter, f"{described.name}-base", ())


def round_of(
    described: Share, target: PlannedRun, base: PlannedRun, run: Profile, share: float
) -> PlannedRun:
    """A proxy of a round.

    Args:
        run: the profile of the series' round with this share, with its steps.
    """
    planned = PlannedRun(target.source, run, ())
    length = base.tokens / base.n * planned.tokens / target.tokens
    name = f"{described.name}-{share:g}"
    return _small(described, planned, length, name, described.round_overrides)


def _small(
    described: Share, target: PlannedRun, length: float, name: str, overrides: list[str] | tuple[str, ...]
) -> PlannedRun:
    size = described.proxy
    layers = size.num_hidden_layers or target.profile.model.num_hidden_layers
    shape = size.hidden_size, layers
    try:
        return small_run(
            described, target, shape, length, name, [*overrides, *described.proxy_overrides], PLAIN
        )
    except ProfileError as error:
        raise error.within("proxy") if error.key == "hidden_size" else error from None
