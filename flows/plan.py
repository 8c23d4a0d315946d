"""`trainshed plan`: what a run would need, or why it cannot work, in seconds."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from flows.console import table
from modeling.planner import Plan, plan, require_fit
from profiles.schema import Profile
from tasks.text import duration


def show(profile: Profile, *, as_json: bool) -> int:
    """Print the plan of a checked profile; ProfileError where it does not fit."""
    planned = plan(profile)
    if as_json:
        json.dump(planned.to_json(), sys.stdout, indent=1)
        print()
    else:
        _print(profile, planned)
    require_fit(profile, planned)
    return 0


def sentence(planned: Plan) -> str:
    """The plan in a line, for the log of a run."""
    fullest = max(stage.total for stage in planned.stages)
    axes = " × ".join(f"{axis} {size}" for axis, size in planned.mesh.items() if size > 1) or "one process"
    return (
        f"{in_words(planned.parameters)} parameters on {axes}, {amount(planned)}, "
        f"{in_bytes(fullest)} of {in_bytes(planned.device_bytes)} on the fullest rank"
    )


def amount(planned: Plan) -> str:
    """How much is trained on; of epochs it is known once the data is."""
    return f"{planned.tokens:,} tokens" if planned.tokens else "all of the data"


def in_words(count: int) -> str:
    """2714304 -> '2.71 million'."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"


def in_bytes(size: float) -> str:
    """57016320 -> '54.4 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def _print(profile: Profile, planned: Plan) -> None:
    console = Console(highlight=False)
    train = profile.train
    console.print(f"{profile.name}: {profile.description}\n")
    facts = [
        ("parameters", f"{planned.parameters:,}"),
        (
            "ranks",
            " × ".join(f"{axis} {size}" for axis, size in planned.mesh.items()) + f" = {profile.world_size}",
        ),
        (
            "batch",
            f"{train.global_batch_size} samples of {train.sequence_length} tokens, "
            + (f"{train.steps:,} steps" if train.steps else f"{train.epochs} epochs"),
        ),
        ("trained on", amount(planned)),
        ("FLOPs a token", f"{planned.flops_per_token:.3g}"),
    ]
    if planned.step_seconds:
        facts += [
            ("time a step", duration(planned.step_seconds)),
            ("tokens a second", f"{planned.tokens_per_second:,.0f}"),
        ]
    if planned.step_seconds and train.steps:
        facts.append(("time in all", duration(planned.step_seconds * train.steps)))
    console.print(table(("", ""), facts))
    console.print("\nmemory of the fullest rank of each stage")
    kinds = list(planned.stages[0].bytes)
    rows = []
    for number, stage in enumerate(planned.stages):
        layers = ", ".join(f"{first}–{end - 1}" for first, end in stage.layers)
        sizes = [in_bytes(stage.bytes[kind]) for kind in kinds]
        rows.append((str(number), layers, *sizes, in_bytes(stage.total)))
    columns = ("stage", "layers", *kinds, "together")
    console.print(table(columns, rows, numbers=(*kinds, "together")))
    verdict = "fits in" if planned.fits else "does not fit in"
    console.print(f"\n{verdict} {in_bytes(planned.device_bytes)} a device")
