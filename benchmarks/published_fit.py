"""Fit the unpublished figures that plans use to the steps that other frameworks published.

The steps are those of benchmarks/published.py. Five figures: the share of the peak that products reach on A100, in FP8, and on
H100 with llm-foundry's libraries; the peak of the H100 of 96 GB; and by how much an exchange slows down the compute that it
overlaps with. They minimize the mean of |log(planned ÷ published)|, at most 0.5 a step, over the sources that are not held out:
starting from START, each figure in turn is multiplied or divided by a factor as long as the mean gets smaller, and the factor
shrinks to 1.005. Takes two minutes of CPU.

Exit codes: 0; 1 if a figure of the code is not the fitted one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import fmean

from benchmarks.harness.timing import make_parser
from benchmarks.published import HELD_OUT, SOFTWARE, Row, read
from modeling.models.build import device_of, partition_layers
from modeling.planning import efficiency
from modeling.planning.auto import resolve_auto
from modeling.planning.planner import plan
from modeling.planning.stage_costs import CostCache, LayerCosts, StageCosts
from modeling.planning.step_time import StagePlan, estimate, layer_speed
from parallel.device import ACCELERATORS
from profiles.schema import Profile

Figures = dict[str, float]
HOPPER, OLD = "h100_96", "llm-foundry"
# Products of no published measurement are faster than the upper bounds; contention of 1 is as slow as without overlap.
BOUNDS = {
    "ampere": (0.5, 0.9),
    "fp8": (0.4, 0.75),
    OLD: (0.6, 1.0),
    HOPPER: (0.5, 1.0),
    "contention": (0.01, 1.0),
}
START = dict.fromkeys(BOUNDS, 0.6)
LIMIT = 0.5  # of a step's error: no step that the model does not describe decides the fit
TOLERANCE = 0.011  # figures of the code are rounded


@dataclass(frozen=True)
class Planned:
    """A published step, and what of its plan does not depend on the figures."""

    row: Row
    profile: Profile
    stages: tuple[StagePlan, ...]
    layers: tuple[tuple[LayerCosts, ...], ...]  # by pipeline rank

    @classmethod
    def of(cls, row: Row, cache: CostCache) -> Planned:
        """Plan a row once."""
        profile = resolve_auto(row.profile, cache)
        costs, partition = StageCosts(profile, cache), partition_layers(profile)
        ranks = profile.parallel.pipeline
        layers = [
            tuple(layer for stage in partition[rank::ranks] for layer in costs.layers(stage))
            for rank in range(ranks)
        ]
        return cls(row, profile, plan(profile, cache).stages, tuple(layers))

    def seconds(self) -> float:
        """Planned seconds with the present figures."""
        software = SOFTWARE[self.row.source]
        stages = []
        for stage, layers in zip(self.stages, self.layers, strict=True):
            rate, attention = layer_speed(self.profile, layers, software)
            stages.append(replace(stage, rate=rate, attention=attention))
        seconds = estimate(self.profile, stages, len(stages[0].layers), software).step_seconds
        assert seconds is not None
        return seconds

    def error(self) -> float:
        """|log(planned ÷ published)| with the present figures, at most LIMIT."""
        return min(LIMIT, abs(log(self.seconds() / self.row.seconds)))


def used() -> Figures:
    """The figures of the code."""
    return {
        "ampere": efficiency.SHARES["ampere"],
        "fp8": efficiency.FP8,
        OLD: SOFTWARE[OLD].hopper_products,
        HOPPER: _peak(HOPPER) / _peak("h100"),
        "contention": efficiency.CONTENTION,
    }


def _peak(name: str) -> float:
    peak = ACCELERATORS[name].peak("bf16")
    assert peak is not None
    return peak


def assume(figures: Figures) -> None:
    """Let this process plan with these figures instead of the code's."""
    efficiency.SHARES["ampere"] = figures["ampere"]
    efficiency.FP8 = figures["fp8"]
    efficiency.CONTENTION = figures["contention"]
    SOFTWARE[OLD] = replace(SOFTWARE[OLD], hopper_products=figures[OLD])
    peaks = {kind: figures[HOPPER] * peak for kind, peak in (ACCELERATORS["h100"].peak_flops or {}).items()}
    ACCELERATORS[HOPPER] = replace(ACCELERATORS[HOPPER], peak_flops=peaks)


def mean_error(steps: Sequence[Planned], figures: Figures) -> float:
    """Mean of |log(planned ÷ published)| with these figures, which the fit minimizes."""
    assume(figures)
    return fmean(step.error() for step in steps)


def fit(steps: Sequence[Planned], start: Figures = START) -> Figures:
    """The figures with the smallest mean error."""
    found, least, step = dict(start), mean_error(steps, start), 0.2
    while step > 0.005:
        before = least
        for name, (low, high) in BOUNDS.items():
            for factor in (1 + step, 1 / (1 + step)):
                other = {**found, name: min(high, max(low, found[name] * factor))}
                if (error := mean_error(steps, other)) < least - 1e-6:
                    found, least = other, error
        if least == before:
            step /= 2
    return found


def print_figures(rows: dict[str, Figures]) -> None:
    """Print figures as rows of a Markdown table."""
    print(f"| figures | {' | '.join(BOUNDS)} |\n|---|{'---:|' * len(BOUNDS)}")
    for title, figures in rows.items():
        print(f"| {title} | {' | '.join(f'{figures[name]:.2f}' for name in BOUNDS)} |")


def leave_out(steps: Sequence[Planned], start: Figures) -> None:
    """Fit without each source in turn, and print the errors of that source's steps."""
    fits, errors = {}, {}
    for source in sorted({step.row.source for step in steps}):
        rest, left = ([step for step in steps if (step.row.source == source) is out] for out in (False, True))
        fits[f"without {source}"] = fit(rest, start)
        errors[source] = len(left), mean_error(left, fits[f"without {source}"])
    print_figures(fits)
    for source, (count, error) in errors.items():
        print(f"{source}: mean error {error:.3f} of {count} steps that this fit has not seen")
    total = sum(count * error for count, error in errors.values()) / len(steps)
    print(f"all: {total:.3f}")


def main() -> int:
    parser = make_parser(__doc__)
    text = "fit also without each source in turn, and print the errors of its steps (two more minutes of CPU)"
    parser.add("--leave-out", text)
    arguments = parser.parse_args()
    cache: CostCache = {}
    rows = [row for row in read() if row.source not in HELD_OUT and device_of(row.profile).architecture]
    steps = [Planned.of(row, cache) for row in rows]
    code, fitted = used(), fit(steps)
    print_figures({"fitted": fitted, "in the code": code})
    print(f"mean error of {len(steps)} steps: {mean_error(steps, fitted):.3f}, {mean_error(steps, code):.3f}")
    if arguments.leave_out:
        leave_out(steps, fitted)
    return 0 if all(abs(figure - code[name]) < TOLERANCE for name, figure in fitted.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
