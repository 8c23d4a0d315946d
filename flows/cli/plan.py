"""`trainshed plan`: what a run would need, or why it cannot work, in seconds and on one screen."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.ui.plan import mesh
from modeling.planning.planner import MARGIN, Plan, plan, require_fit
from profiles import resolve
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks.reporting.format import format_bytes, format_count, format_duration

ROWS = 8  # stages that are shown one by one
BAR = 10  # characters; half as many where there is a column more
GIB = 2**30


def show(profile: Profile, *, as_json: bool) -> int:
    """Print the plan of a checked profile; ProfileError where it does not fit."""
    planned = plan(profile)
    if as_json:
        json.dump(planned.to_json(), sys.stdout, indent=1)
        print()
    else:
        _print(Console(highlight=False), profile, planned)
    require_fit(profile, planned)
    return 0


def in_days(days: float) -> str:
    """18.04 -> '18 days'; less than two days in hours."""
    return (
        format_duration(days * 24 * 3600)
        if days < 2
        else f"{days:,.0f} days"
        if days >= 10
        else f"{days:.1f} days"
    )


def _print(console: Console, profile: Profile, planned: Plan) -> None:
    console.print(Text.assemble((profile.name, "bold"), f"  {profile.description}"))
    console.print()
    console.print(_facts(_run(profile, planned)))
    console.print()
    console.print(_memory(planned))
    if len(planned.stages) > ROWS:
        console.print(
            f"some of {len(planned.stages)} stages: the ends, the fullest, the emptiest", style="dim"
        )
    console.print(_verdict(planned))
    try:
        resolve.check_start(profile)
    except ProfileError as error:
        console.print(Text(f"plan only: {error}", "yellow"))
    console.print()
    console.print(_facts(_time(profile, planned)))


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values, the values under each other."""
    result = Table(box=None, pad_edge=False, show_header=False)
    result.add_column(style="dim", no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in rows:
        result.add_row(name, Text(value))
    return result


def _run(profile: Profile, planned: Plan) -> list[tuple[str, str]]:
    model, train, cluster = profile.model, profile.train, profile.cluster
    heads = f"{model.num_attention_heads} heads"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" on {model.num_key_value_heads} KV heads"
    device = cluster.accelerator or cluster.device
    axes = mesh(planned.mesh)
    if planned.kv_replication > 1:
        axes += f" (a KV head on {planned.kv_replication})"
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    step_tokens = train.global_batch_size * train.sequence_length
    return [
        ("parameters", f"{planned.parameters:,}"),
        ("model", f"{model.architecture}, {model.num_hidden_layers} layers of {model.hidden_size:,}, {heads}, "
                  f"vocabulary {model.vocab_size:,}"),
        ("ranks", f"{profile.world_size}, {nodes} of {cluster.devices_per_node} × {device}: {axes}"),
        ("step", f"{train.global_batch_size:,} × {train.sequence_length:,} = {format_count(step_tokens)} tokens, "
                 f"{profile.accumulation_steps:,} microbatches"),
        ("recompute", train.recompute),
        ("run", f"{train.steps:,} steps, {format_count(planned.tokens)} tokens" if planned.tokens else "as long as its data"),
    ]  # fmt: skip


def _memory(planned: Plan) -> Table:
    """Of each stage, what it holds; on a narrow screen its layers wrap, figures never do."""
    small = planned.needs < GIB
    unit, size = ("MiB", 2**20) if small else ("GiB", GIB)
    kinds = {"weights": "parameters", **{kind: kind for kind in ("gradients", "optimizer", "activations")}}
    titles = [*kinds, *(["process"] if planned.host_bytes else []), unit]
    rows = []
    for number in _shown(planned):
        stage = planned.stages[number]
        total = stage.total + planned.host_bytes
        parts = [stage.bytes[kind] for kind in kinds.values()] + [planned.host_bytes] * bool(
            planned.host_bytes
        )
        rows.append((number, stage.layers, [f"{part / size:,.2f}" for part in (*parts, total)], total))
    result = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    result.add_column("stage", no_wrap=True, min_width=len("stage"))
    longest = max(len(f"{first}–{end - 1},") for _, held, _, _ in rows for first, end in held)
    result.add_column("layers", min_width=max(longest, len("layers")))
    for title, cells in zip(titles, zip(*(sizes for _, _, sizes, _ in rows), strict=True), strict=True):
        result.add_column(title, justify="right", no_wrap=True, min_width=max(map(len, (title, *cells))))
    bar = BAR // 2 if planned.host_bytes else BAR
    share = f"of {planned.device_bytes / size:,.0f}"
    result.add_column(share, no_wrap=True, min_width=max(len(share), bar + len(" 100%")))
    for number, held, sizes, total in rows:
        layers = ", ".join(f"{first}–{end - 1}" for first, end in held)
        style = "bold" if number == planned.fullest and len(planned.stages) > 1 else ""
        result.add_row(str(number), layers, *sizes, _bar(total / planned.device_bytes, bar), style=style)
    return result


def _shown(planned: Plan) -> list[int]:
    """Numbers of the stages that are shown: all, or those at the ends, the fullest and the emptiest."""
    count = len(planned.stages)
    if count <= ROWS:
        return list(range(count))
    emptiest = min(range(count), key=lambda number: planned.stages[number].total)
    return sorted({0, 1, 2, planned.fullest, emptiest, count - 2, count - 1})


def _bar(share: float, width: int) -> Text:
    """A share of the device's memory as a bar, in colour by how much is left."""
    full = min(width, round(share * width))
    colour = "red" if share > MARGIN else "yellow" if share > 0.85 else "green"
    return Text.assemble(("█" * full, colour), ("░" * (width - full), "dim"), f" {share:4.0%}")


def _verdict(planned: Plan) -> Text:
    if planned.fits:
        left = planned.device_bytes - planned.needs
        return Text(
            f"fits in {format_bytes(planned.device_bytes)} a device, {format_bytes(left)} to spare", "green"
        )
    return Text(
        f"does not fit in {format_bytes(planned.device_bytes)} a device with {1 - MARGIN:.0%} to spare", "red"
    )


def _time(profile: Profile, planned: Plan) -> list[tuple[str, str]]:
    flops = f"{planned.flops_per_token:.3g} a token"
    if planned.tokens:
        flops += f", {planned.flops_per_token * planned.tokens:.3g} in all"
    rows = [("FLOPs", flops)]
    if sent := ", ".join(f"{axis} {format_bytes(size)}" for axis, size in planned.sent.items() if size):
        rows.append(("sent", f"{sent} by a rank in a step"))
    if profile.parallel.pipeline > 1:
        rows.append(("bubble", f"{planned.bubble:.1%} of the working time"))
    if planned.step_seconds is None:
        return [*rows, ("time", f"not known for {profile.cluster.device}")]
    speed = f"{planned.tokens_per_second:,.0f} tokens/s, MFU {planned.mfu:.0%}"
    rows.append(("speed", f"{format_duration(planned.step_seconds)} a step, {speed}"))
    if planned.days is not None:
        whole = f"{in_days(planned.days)}, {planned.node_hours:,.0f} node-hours"
        if planned.price is not None:
            whole += f", {planned.price:,.0f} at {profile.cluster.node_price:g} a node-hour"
        rows.append(("in all", whole))
    return [*rows, ("assuming", "\n".join(planned.assumptions))]
