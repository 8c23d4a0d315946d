"""`trainshed plan --search`: the best topologies for a cluster, and why the others cannot be."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from flows.ui.console import say, table
from modeling.planning.planner import MARGIN, device_bytes
from modeling.planning.search import Rejected, Topology, search
from profiles.check import value_of
from profiles.errors import shown
from profiles.schema import Profile
from tasks.reporting.format import format_bytes, format_duration

BEST = 8  # topologies that are shown
NONE = 2  # exit code where nothing fits
NUMBER = re.compile(r"\b\d+\b")


def show_search(profile: Profile, given: str, overrides: Sequence[str], *, as_json: bool) -> int:
    """Print what `search` finds; exit code 2 where nothing fits.

    Args:
        given: the profile's name or path as it was typed, and `overrides` with it.
    """
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
            print(f"\nthe first: {_command(profile, given, overrides, found[0])}")
    if found:
        return 0
    room = f"{_where(profile)} of {format_bytes(device_bytes(profile))}"
    helps = "another batch, or more nodes,"
    if any(each.needs for each in rejected):
        helps = "more nodes, or devices with more memory,"
    say(f"trainshed: no topology of {profile.name} fits {room}; {helps} are needed")
    return NONE


def _describe(topology: Topology) -> dict[str, object]:
    planned = topology.plan
    return {
        "overrides": topology.overrides,
        "mesh": planned.mesh,
        "bytes": planned.needs,
        "device_bytes": planned.device_bytes,
        "step_seconds": planned.step_seconds,
        "tokens_per_second": planned.tokens_per_second,
        "mfu": planned.mfu,
    }


def _where(profile: Profile) -> str:
    cluster = profile.cluster
    return f"{cluster.nodes} × {cluster.devices_per_node} {cluster.accelerator or cluster.device}"


def _print(
    console: Console, profile: Profile, found: Sequence[Topology], rejected: Sequence[Rejected]
) -> None:
    timed = all(topology.plan.step_seconds is not None for topology in found)
    order = "the best first" if timed else "those that send least first"
    many = {0: "no topology fits", 1: "1 topology fits"}.get(
        len(found), f"{len(found)} topologies fit, {order}"
    )
    console.print(Text.assemble((profile.name, "bold"), f" on {_where(profile)}: {many}"))
    if found:
        rows = [_row(place, topology) for place, topology in enumerate(found[:BEST], 1)]
        degrees = ("tensor", "pipeline", "context", "data")
        figures = (*(("a step", "tokens/s", "MFU") if timed else ("sent a step",)), "memory")
        columns = ("", *degrees, "recompute", *figures)
        console.print(table(columns, rows, numbers=(*degrees, *figures)))
    if rejected:
        console.print(f"\nwhat cannot be, in {MARGIN:.0%} of {format_bytes(device_bytes(profile))} a device:")
    for reason, families in reasons(rejected):
        console.print(Padding(Text(f"{reason}: {families}"), (0, 0, 0, 2)))


def _command(profile: Profile, given: str, overrides: Sequence[str], topology: Topology) -> str:
    """What to type for a topology: what was typed, and what of the topology that does not say already."""
    changes = {key: value for key, value in topology.overrides.items() if value_of(profile, key) != value}
    kept = [each for each in overrides if each.partition("=")[0].strip() not in changes]
    said = (f"{key}={'null' if value is None else shown(value)}" for key, value in changes.items())
    words = [word for override in (*kept, *said) for word in ("--set", override)]
    return shlex.join(["trainshed", "plan", given, *words])


def _row(place: int, topology: Topology) -> tuple[str, ...]:
    planned, mesh = topology.plan, topology.plan.mesh
    figures = (format_bytes(sum(planned.sent.values())),)
    if planned.step_seconds is not None:
        figures = (
            format_duration(planned.step_seconds),
            f"{planned.tokens_per_second:,.0f}",
            f"{planned.mfu:.0%}",
        )
    degrees = (str(mesh[axis]) for axis in ("tensor", "pipeline", "context", "data"))
    fullest = f"{planned.needs / planned.device_bytes:.0%}"
    return (str(place), *degrees, topology.overrides["train.recompute"], *figures, fullest)


def reasons(rejected: Sequence[Rejected]) -> list[tuple[str, str]]:
    """Each rule in words, with the range of each number in it, and the families that break it by their tensor degree."""
    rules: dict[str, list[Rejected]] = {}
    for each in rejected:
        rules.setdefault(NUMBER.sub("#", each.reason), []).append(each)
    return [(_reason(members), _families(members)) for members in rules.values()]


def _reason(members: Sequence[Rejected]) -> str:
    if members[0].reason == "memory":
        return "more memory is needed, even with all recomputed"
    ranges = map(_range, zip(*(map(int, NUMBER.findall(each.reason)) for each in members), strict=True))
    return NUMBER.sub(lambda _: next(ranges), members[0].reason)


def _families(members: Sequence[Rejected]) -> str:
    """'tensor 1, pipeline 1 to 64 (38.3 GiB or more); tensor 2, …'."""
    found = []
    for tensor in dict.fromkeys(each.degrees["tensor"] for each in members):
        own = [each for each in members if each.degrees["tensor"] == tensor]
        what = f"tensor {tensor}"
        if pipelines := [each.degrees["pipeline"] for each in own if "pipeline" in each.degrees]:
            what += f", pipeline {_range(pipelines)}"
        if needs := [each.needs for each in own if each.needs is not None]:
            what += f" ({format_bytes(min(needs))} or more)"
        found.append(what)
    return "; ".join(found)


def _range(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"
