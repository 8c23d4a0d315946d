"""The output of `trainshed plan`: parameters, mesh, memory of each stage, step time and cost of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.exit_codes import DONE
from flows.ui.console import TrimmedConsole, plain_table, print_json, waiting, wrap
from modeling.planning.auto import resolve_auto
from modeling.planning.determinism import describe_cost
from modeling.planning.planner import Plan, plan, require_fit
from modeling.planning.search import compared_pace, neighbours, other_recomputation
from modeling.planning.step_time import is_too_short
from profiles import resolve
from profiles.check import with_value
from profiles.errors import ProfileError, counted
from profiles.recompute import describe
from profiles.schema import Profile
from profiles.sections.base import required
from tasks.reporting.advice import interruption_warnings, passes_warning
from tasks.reporting.format import (
    format_bytes,
    format_count,
    format_duration,
    format_mesh,
    format_number,
    format_step_time,
)
from tasks.sources.files import text_bytes

MAX_STAGES = 8  # with more stages, only the most informative are shown
BAR_WIDTH = 10  # characters
GIB = 2**30
BYTES_PER_TOKEN = 4  # of text, roughly


def show_plan(profile: Profile, *, as_json: bool) -> int:
    """Print the plan of a valid profile. Raises ProfileError if it does not fit in the device's memory."""
    with waiting(lambda: f"planning {profile.name}"):
        profile = resolve_auto(profile)
        planned = plan(profile)
    if as_json:
        print_json(planned.to_json())
    else:
        print_plan(TrimmedConsole(), profile, planned)
    require_fit(profile, planned)
    return DONE


def in_days(days: float) -> str:
    """18.04 -> '18 days'; below two days, in hours: 1.5 -> '36:00:00'."""
    if days < 2:
        return format_duration(days * 24 * 3600)
    return f"{days:,.0f} days" if days >= 10 else f"{days:.1f} days"


def print_plan(console: Console, profile: Profile, planned: Plan) -> None:
    """Print a plan, whether it fits or not."""
    console.print(Text.assemble((profile.name, "bold"), f"  {profile.description}"))
    console.print()
    tokens = _data_tokens(profile)
    console.print(plain_table(_run(profile, planned, tokens), "dim"))
    for warning in passes_warning(profile, tokens) if tokens and planned.tokens else ():
        console.print(Text(f"warning: {warning}", "yellow"))
    console.print()
    console.print(_memory(planned))
    if len(planned.stages) > MAX_STAGES:
        selection = "the first, the last, the fullest and the emptiest"
        console.print(f"{selection} of {len(planned.stages)} stages", style="dim")
    console.print(_verdict(planned))
    if profile.model.dropout:
        console.print(Text(f"warning: {_dropout(profile, planned)}", "yellow"))
    console.print()
    console.print(plain_table(_time(profile, planned), "dim"))
    for warning in interruption_warnings(profile, planned.step_seconds):
        console.print(Text(f"warning: {warning}", "yellow"))
    try:
        resolve.check_start(profile)
    except (ProfileError, OSError) as error:
        reasons = [str(error)]
        if isinstance(error, ProfileError):
            reasons = [str(each.along_with(())) for each in (error, *error.others)]
        lines = [f"- {reason}" for reason in reasons] if len(reasons) > 1 else []
        text = "" if lines else reasons[0]
        console.print(Text(f"\n`trainshed run` cannot start it here: {text}".rstrip(), "yellow"))
        for line in lines:
            console.print(Text(wrap(line, console.width, 2), "yellow"), soft_wrap=True)


def _run(profile: Profile, planned: Plan, tokens: float | None) -> list[tuple[str, str]]:
    model, train, cluster = profile.model, profile.train, profile.cluster
    heads = counted(model.num_attention_heads, "head")
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" on {counted(model.num_key_value_heads, 'KV head')}"
    axes = format_mesh(planned.mesh)
    if planned.kv_replication > 1:
        axes += f" (KV heads replicated {planned.kv_replication} times)"
    length = "1 epoch of the data" if train.epochs == 1 else f"{train.epochs} epochs of the data"
    if planned.tokens:
        length = f"{counted(train.last_step, 'step')}, {format_count(planned.tokens)} tokens"
        if tokens:
            length += f", about {format_number(planned.tokens / tokens)} passes over the data"
    samples = f"{train.global_batch_size:,}"
    if profile.objective.traits.pairs:
        samples += f" pairs × {profile.rows_per_sample}"
    device = cluster.accelerator or cluster.device
    return [
        ("parameters", _parameters(profile, planned)),
        ("model", f"{model.architecture}, {counted(model.num_hidden_layers, 'layer')} of {model.hidden_size:,}, {heads}, "
                  f"vocabulary {model.vocab_size:,}"),
        ("ranks", f"{profile.world_size:,}, {counted(cluster.nodes, 'node')} of {cluster.devices_per_node} × {device}: {axes}"),
        ("sharding", _sharding(profile)),
        ("step", f"{samples} × {train.sequence_length:,} = {format_count(profile.step_tokens)} tokens, "
                 f"{profile.accumulation_steps:,} microbatch{'es' * (profile.accumulation_steps != 1)}"),
        ("recompute", ("by stage: " if isinstance(train.recompute, list) else "") + describe(train.recompute)),
        ("run", length),
    ]  # fmt: skip


def _dropout(profile: Profile, planned: Plan) -> str:
    """What dropout of attention costs: no kernel has it, so the probabilities are kept for backward."""
    without = plan(with_value(profile, "model.dropout", 0.0))
    saved = max(0, planned.needs - without.needs)
    return (
        f"model.dropout = {profile.model.dropout:g}: attention has no flash kernel with dropout, and keeps its probabilities; "
        f"without it, a device would need {format_bytes(saved)} less"
    )


def _data_tokens(profile: Profile) -> float | None:
    """Tokens of the training data, estimated from file sizes; None if the files cannot be read here."""
    try:
        size = text_bytes(profile)
    except (ProfileError, OSError):
        return None
    return size and size / BYTES_PER_TOKEN


def _sharding(profile: Profile) -> str:
    """'fsdp over 16 ranks, 8 replicas': how states are sharded over data and context ranks."""
    ranks, kind = profile.shard_degree, profile.parallel.data_sharding
    replicas = profile.weight_replicas // ranks
    if ranks == 1:
        return "none" if replicas == 1 else f"none, {replicas} replicas"
    return f"{kind} over {ranks} ranks" + (f", {replicas} replicas" if replicas > 1 else "")


def _memory(planned: Plan) -> Table:
    """The memory of each stage's fullest rank; on a narrow terminal layers wrap, numbers never do."""
    unit, unit_bytes = ("MiB", 2**20) if planned.needs < GIB else ("GiB", GIB)
    kinds = {"weights": "parameters", **{kind: kind for kind in ("gradients", "optimizer", "activations")}}
    process = [planned.host_bytes] if planned.host_bytes else []
    bar_width = BAR_WIDTH // 2 if process else BAR_WIDTH  # "process" takes a column
    rows = []
    for number in _selected_stages(planned):
        stage = planned.stages[number]
        total = stage.total + planned.host_bytes
        sizes = (*(stage.bytes[kind] for kind in kinds.values()), *process, total)
        layers = [f"{first}–{end - 1}" for first, end in stage.layers]
        shown = [f"{size / unit_bytes:,.{2 if size < 1000 * unit_bytes else 0}f}" for size in sizes]
        bar = _bar(total / planned.device_bytes, planned.reserve, bar_width)
        rows.append((number, layers, shown, bar))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("stage", no_wrap=True, min_width=len("stage"))
    longest = max(len(f"{chunk},") for _, layers, _, _ in rows for chunk in layers)
    table.add_column("layers", min_width=max(longest, len("layers")))
    titles = (*kinds, *(["process"] if process else []), unit)
    for title, cells in zip(titles, zip(*(sizes for _, _, sizes, _ in rows), strict=True), strict=True):
        table.add_column(title, justify="right", no_wrap=True, min_width=max(map(len, (title, *cells))))
    title = f"of {format_bytes(planned.device_bytes)}"
    table.add_column(title, no_wrap=True, min_width=max(len(title), *(len(bar) for *_, bar in rows)))
    for number, layers, shown, bar in rows:
        style = "bold" if number == planned.fullest and len(planned.stages) > 1 else ""
        table.add_row(str(number), ", ".join(layers), *shown, bar, style=style)
    return table


def _selected_stages(planned: Plan) -> list[int]:
    """The stages to show: all, or those at both ends, the fullest and the emptiest."""
    count = len(planned.stages)
    if count <= MAX_STAGES:
        return list(range(count))
    emptiest = min(range(count), key=lambda number: planned.stages[number].total)
    return sorted({0, 1, 2, planned.fullest, emptiest, count - 2, count - 1})


def _bar(fraction: float, reserve: float, width: int) -> Text:
    """A fraction of the device's memory as a bar, coloured by the remaining memory."""
    full = min(width, round(fraction * width))
    colour = "red" if fraction > 1 - reserve else "yellow" if fraction > 0.85 else "green"
    return Text.assemble(("█" * full, colour), ("░" * (width - full), "dim"), f" {fraction:4.0%}")


def _verdict(planned: Plan) -> Text:
    memory = format_bytes(planned.device_bytes)
    if planned.fits:
        spare = format_bytes(planned.device_bytes - planned.needs)
        return Text(f"fits in {memory} per device, {spare} to spare", "green")
    return Text(f"does not fit in {memory} per device with the reserve of {planned.reserve:.0%}", "red")


def _parameters(profile: Profile, planned: Plan) -> str:
    text = f"{planned.parameters:,}"
    if planned.active_parameters != planned.parameters:
        text += f", of which {planned.active_parameters:,} are active per token"
    if profile.lora.rank:
        text += f"; {planned.parameters - profile.model.parameters:,} of them are trained"
    return text


def _time(profile: Profile, planned: Plan) -> list[tuple[str, str]]:
    flops = f"{planned.flops_per_token:.3g} per token"
    if planned.tokens:
        flops += f", {planned.flops_per_token * planned.tokens:.3g} in total"
    rows = [("FLOPs", flops)]
    if volumes := ", ".join(
        f"{axis.replace('_', ' ')} {format_bytes(size)}"
        for axis, size in planned.communication.items()
        if size
    ):
        rows.append(("communication", f"{volumes} per rank and step"))
    if profile.parallel.pipeline > 1:
        rows.append(("bubble", f"{planned.bubble:.1%} of the step's compute time"))
    if planned.step_seconds is None:
        unknown = f"unknown for {profile.cluster.device}"
        return [*rows, ("time", "too small to estimate" if is_too_short(profile) else unknown)]
    speed = f"{planned.tokens_per_second:,.0f} tokens/s" + (f", MFU {planned.mfu:.0%}" if planned.mfu else "")
    rows.append(("speed", f"{format_step_time(planned.step_seconds)} per step, {speed}"))
    if planned.days is not None:
        total = f"{in_days(planned.days)}, {format_number(required(planned.node_hours))} node-hours"
        if planned.price is not None:
            total += f", {planned.price:,.0f} at {profile.cluster.node_price:g} per node-hour"
        rows.append(("total", total))
    rows.append(("nearby", _nearby(profile, planned)))
    if cost := describe_cost(profile, planned):
        rows.append(("deterministic", cost))
    return [*rows, ("assuming", "\n".join((planned.basis, *planned.assumptions)))]


def _nearby(profile: Profile, planned: Plan) -> str:
    """Step time with half and with twice the tensor degree: 'tensor 2: 6% slower, tensor 8: 8% faster; …'.

    Other recomputation is the reason why a faster one may not be preferred, so it is named, with the memory that it takes.
    The planner takes links of a tensor group and of the shards for independent. Where a larger group leaves its chip or node,
    they share links, so that it may not be faster.
    """
    parts = []
    for other in neighbours(profile):
        ratio = required(other.plan.step_seconds) / required(planned.step_seconds)
        pace = compared_pace(ratio)
        if ratio < 1 and (recomputing := other_recomputation(other, profile.train.recompute)):
            pace += f" {recomputing} in {format_bytes(other.plan.needs)}"
        level, larger = other.plan.levels.get("tensor"), other.plan.mesh["tensor"] > planned.mesh["tensor"]
        if ratio < 1 and larger and planned.levels.get("tensor", level) != level:
            across = {"node": "chips", "network": "nodes"}.get(level or "", "devices")
            pace += f" if its groups, then across {across}, do not slow the gathers of the shards"
        parts.append(f"tensor {other.plan.mesh['tensor']}: {pace}")
    found = ", ".join(parts) or "neither half nor twice the tensor degree fits"
    return f"{found}; --search ranks all topologies"
