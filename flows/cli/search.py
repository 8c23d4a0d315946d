"""`trainshed plan --search`: rank the topologies that fit a cluster; explain why others were rejected."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict

from rich.padding import Padding
from rich.text import Text

from flows.cli.exit_codes import DONE, REJECTED
from flows.ui.console import TrimmedConsole, print_json, print_parts, print_stderr, waiting
from flows.ui.summaries import cluster_summary
from modeling.models.build import device_of
from modeling.planning.efficiency import basis
from modeling.planning.planner import device_bytes
from modeling.planning.search import RejectedDegrees, Topology, Variation, explain, search
from profiles.check import get_value
from profiles.errors import format_value
from profiles.recompute import modes_of
from profiles.schema import Profile
from tasks.reporting.format import format_bytes, format_step_time

MAX_ROWS = 8  # topologies to show
AXES = {"tensor": "TP", "pipeline": "PP", "context": "CP", "data": "DP", "expert": "EP"}  # axis: its column
NUMBER = re.compile(r"\b\d+\b")


def show_search(profile: Profile, typed: str, overrides: Sequence[str], *, as_json: bool) -> int:
    """Print topologies that fit; returns REJECTED if none. `typed` names the profile on the command line."""
    with waiting(lambda: f"searching topologies of {profile.name}"):
        found, rejected = search(profile, vary=True)
    if as_json:
        result = {"topologies": list(map(_describe, found)), "rejected": list(map(asdict, rejected))}
        reasons = explain(found, rejected) if found else []
        print_json({**result, "reasons": reasons})
    else:
        _print(profile, found, rejected)
        if found:
            print(f"\nto plan the first: {_command(profile, typed, overrides, found[0])}")
    if found:
        return DONE
    too_large = any(each.needs for each in rejected)
    advice = "use more nodes or devices with more memory" if too_large else "change the batch or add nodes"
    cluster = f"{cluster_summary(profile)} of {format_bytes(device_bytes(profile))}"
    print_stderr(f"trainshed: no topology of {profile.name} fits {cluster}; {advice}")
    return REJECTED


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
        "basis": planned.basis,
    }


def _print(profile: Profile, found: Sequence[Topology], rejected: Sequence[RejectedDegrees]) -> None:
    console = TrimmedConsole()
    timed = all(topology.plan.step_seconds is not None for topology in found)
    order = "fastest first" if timed else "least communication first"
    several = f"{len(found)} topologies fit, {order}"
    count = {0: "no topology fits", 1: "1 topology fits"}.get(len(found), several)
    console.print(Text.assemble((profile.name, "bold"), f" on {cluster_summary(profile)}: {count}"))
    if found:
        speed = ("step time", "tokens/s", "MFU") if timed else ("communication per step",)
        counts = _counts(profile, found[:MAX_ROWS])
        degrees = (*(AXES[axis] for axis in _axes(profile)), *counts)
        titles = ("", *degrees, "sharding", "recompute", *speed, "memory")
        rows = []
        for rank, topology in enumerate(found[:MAX_ROWS], 1):
            shown = [str(values[rank - 1]) for values in counts.values()]
            rows.append((str(rank), *_row(profile, topology, shown)))
        texts = [index for index, title in enumerate(titles) if title in ("", "sharding", "recompute")]
        print_parts(console, titles, rows, left=texts)
        if timed:
            console.print(basis(profile), style="dim")
            console.print(Text(f"first because {'; '.join(explain(found, rejected))}"))
    if rejected:
        console.print(
            f"\nrejected (limit: {1 - device_of(profile).reserve:.0%} of {format_bytes(device_bytes(profile))} per device):"
        )
    for reason, broken in _reasons(rejected):
        console.print(Padding(Text(f"{reason}: {broken}"), (0, 0, 0, 2)))


def _command(profile: Profile, typed: str, overrides: Sequence[str], topology: Topology) -> str:
    """The command that plans a topology: the user's own with the overrides that the topology changes."""
    changes = {key: value for key, value in topology.overrides.items() if get_value(profile, key) != value}
    unchanged = [override for override in overrides if override.partition("=")[0].strip() not in changes]
    changed = (f"{key}={format_value(value)}" for key, value in changes.items())
    options = [word for override in (*unchanged, *changed) for word in ("--set", override)]
    return shlex.join(["trainshed", "plan", typed, *options])


def _axes(profile: Profile) -> list[str]:
    """The axes with a column: expert only for models with experts."""
    return [axis for axis in AXES if axis != "expert" or profile.model.num_experts]


def _counts(profile: Profile, shown: Sequence[Topology]) -> dict[str, list[int]]:
    """Columns for what else differs between rows: stages per rank, samples per microbatch."""
    places = [Variation.of(profile, topology.overrides) for topology in shown]
    columns = {"stages": [each.stages for each in places], "MBS": [each.microbatch for each in places]}
    return {name: values for name, values in columns.items() if len(set(values)) > 1}


def _row(profile: Profile, topology: Topology, counts: Sequence[str]) -> tuple[str, ...]:
    planned = topology.plan
    speed: tuple[str, ...] = (format_bytes(sum(planned.communication.values())),)
    if planned.step_seconds is not None:
        rate, mfu = f"{planned.tokens_per_second:,.0f}", f"{planned.mfu:.0%}" if planned.mfu else ""
        speed = (format_step_time(planned.step_seconds), rate, mfu)
    degrees = (str(planned.mesh.get(axis, 1)) for axis in _axes(profile))
    memory = f"{planned.needs / planned.device_bytes:.0%}"
    return (*degrees, *counts, _sharding(topology), _recompute(topology), *speed, memory)


def _recompute(topology: Topology) -> str:
    """The activation checkpointing; for a mix only its modes, as the printed command has the full value."""
    value = topology.overrides["train.recompute"]
    if isinstance(value, list):
        return "by stage"
    return value if " + " not in value else ", ".join(sorted(modes_of(value)))


def _sharding(topology: Topology) -> str:
    """'zero1', 'fsdp' over all data/context ranks, 'fsdp 16' with replicas; 'kept': weights stay gathered."""
    degree, kind = (topology.overrides[f"parallel.{key}"] for key in ("shard_degree", "data_sharding"))
    kept = " kept" if topology.overrides["parallel.keep_gathered"] else ""
    return f"{kind} {degree}{kept}" if degree else f"{kind}{kept}"


def _reasons(rejected: Sequence[RejectedDegrees]) -> list[tuple[str, str]]:
    """Each broken rule, with the range of every number in it, and the degrees that break it."""
    rules: dict[str, list[RejectedDegrees]] = {}
    for each in rejected:
        rules.setdefault(NUMBER.sub("#", each.reason), []).append(each)
    return [(_reason(broken), _degrees(broken)) for broken in rules.values()]


def _reason(rejected: Sequence[RejectedDegrees]) -> str:
    if rejected[0].reason == "memory":
        return "out of memory, with as much recomputation as the schedule allows"
    numbers = (map(int, NUMBER.findall(each.reason)) for each in rejected)
    ranges = map(_range, zip(*numbers, strict=True))
    return NUMBER.sub(lambda _: next(ranges), rejected[0].reason)


def _degrees(rejected: Sequence[RejectedDegrees]) -> str:
    """'tensor 1, pipeline 1 to 64 (38.3 GiB or more); tensor 2, …'."""
    texts = []
    for tensor in dict.fromkeys(each.degrees["tensor"] for each in rejected):
        same_tensor = [each for each in rejected if each.degrees["tensor"] == tensor]
        text = f"tensor {tensor}"
        pipelines = [each.degrees["pipeline"] for each in same_tensor if "pipeline" in each.degrees]
        if pipelines:
            text += f", pipeline {_range(pipelines)}"
        if needs := [each.needs for each in same_tensor if each.needs is not None]:
            text += f" ({format_bytes(min(needs))} or more)"
        texts.append(text)
    return "; ".join(texts)


def _range(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"
