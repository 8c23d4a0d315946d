"""`trainshed plan --search`: the best topologies for a cluster, and why the others cannot be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.text import Text

from flows.console import say, table
from modeling.planner import MARGIN
from modeling.search import Rejected, Topology, search
from profiles.schema import Profile
from tasks.text import duration, in_bytes

BEST = 8  # topologies that are shown
NONE = 2  # exit code where nothing fits


def show_search(profile: Profile, *, as_json: bool) -> int:
    """Print what `search` finds; exit code 2 where nothing fits."""
    found, rejected = search(profile)
    if as_json:
        print(
            json.dumps(
                {"topologies": list(map(_describe, found)), "rejected": list(map(asdict, rejected))}, indent=1
            )
        )
    else:
        _print(Console(highlight=False), profile, found, rejected)
    if found:
        return 0
    say(
        f"trainshed: no topology of {profile.name} fits its cluster; more nodes, or devices with more memory, are needed"
    )
    return NONE


def _describe(topology: Topology) -> dict[str, object]:
    planned = topology.plan
    return {
        "overrides": topology.overrides,
        "mesh": planned.mesh,
        "bytes": planned.stages[planned.fullest].total,
        "device_bytes": planned.device_bytes,
        "step_seconds": planned.step_seconds,
        "tokens_per_second": planned.tokens_per_second,
        "mfu": planned.mfu,
    }


def _print(
    console: Console, profile: Profile, found: Sequence[Topology], rejected: Sequence[Rejected]
) -> None:
    cluster = profile.cluster
    device = cluster.accelerator or cluster.device
    where = f"{cluster.nodes} × {cluster.devices_per_node} {device}"
    timed = all(topology.plan.step_seconds is not None for topology in found)
    order = "the best first" if timed else "those that send least first"
    console.print(Text.assemble((profile.name, "bold"), f" on {where}: {len(found)} topologies fit, {order}"))
    if found:
        console.print()
        rows = [_row(place, topology) for place, topology in enumerate(found[:BEST], 1)]
        degrees = ("tensor", "pipeline", "context", "data")
        figures = (*(("a step", "tokens/s", "MFU") if timed else ("sent a step",)), "memory")
        columns = ("", *degrees, "recompute", *figures)
        console.print(table(columns, rows, numbers=(*degrees, *figures)))
        best = " ".join(f"--set {key}={value}" for key, value in _changes(profile, found[0]).items())
        console.print(f"\nthe first: trainshed plan {profile.name} {best}", soft_wrap=True)
    if rejected:
        room = f" in {MARGIN:.0%} of {in_bytes(found[0].plan.device_bytes)} a device" if found else ""
        console.print(f"\nwhat cannot be{room}:")
    for line in reasons(rejected):
        console.print(f"  {line}")


def _changes(profile: Profile, topology: Topology) -> dict[str, object]:
    """What of a topology the profile does not say already."""
    said = profile.model_dump()

    def differs(key: str, value: object) -> bool:
        section, name = key.split(".")
        return said[section][name] != value

    return {key: value for key, value in topology.overrides.items() if differs(key, value)}


def _row(place: int, topology: Topology) -> tuple[str, ...]:
    planned, mesh = topology.plan, topology.plan.mesh
    fullest = planned.stages[planned.fullest].total / planned.device_bytes
    figures = (in_bytes(sum(planned.sent.values())),)
    if planned.step_seconds is not None:
        figures = (duration(planned.step_seconds), f"{planned.tokens_per_second:,.0f}", f"{planned.mfu:.0%}")
    degrees = (str(mesh[axis]) for axis in ("tensor", "pipeline", "context", "data"))
    return (str(place), *degrees, topology.overrides["train.recompute"], *figures, f"{fullest:.0%}")


def reasons(rejected: Sequence[Rejected]) -> list[str]:
    """Rejected families in words, those of one tensor degree that fail alike in one line."""
    lines = []
    for (tensor, reason), group in groupby(rejected, key=lambda each: (each.degrees["tensor"], _kind(each))):
        members = list(group)
        pipelines = sorted({each.degrees["pipeline"] for each in members if "pipeline" in each.degrees})
        what = f"tensor {tensor}"
        if pipelines:
            what += f", pipeline {_range(pipelines)}"
        if reason == "memory":
            least = min(each.needs for each in members if each.needs is not None)
            reason = f"needs {in_bytes(least)} a device or more, all recomputed"
        lines.append(f"{what}: {reason}")
    return lines


def _kind(rejected: Rejected) -> str:
    """The reason without the value that it is said of."""
    return rejected.reason.partition(": ")[2].partition(";")[0] or rejected.reason


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
