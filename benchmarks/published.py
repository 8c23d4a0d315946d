"""Compare plans with published training steps of other frameworks: planned ÷ published.

`published.csv` holds the facts: model and topology as keys of a profile, the accelerator, and the published throughput, step time
or memory, each with its source. Every row is planned with what its framework does differently (`SOFTWARE`), and once more as
Trainshed would run it. Five figures of the plans are fitted to the rows of some sources (published_fit.py), not to those of the
others, HELD_OUT, which `random.Random(0).shuffle` of the sources drew before the first fit. Takes a minute of CPU.

With --search, `trainshed plan --search` looks for a topology of each row's model, batch, precision and devices. What it finds is
compared with the published topology, both as Trainshed would run them. `--out` keeps these rows.

Exit codes: 0; 1 if the ranges in efficiency.py are not those of the rows, or if a search finds nothing as fast as the published.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser
from modeling.models.build import device_of
from modeling.models.flops import flops_per_token
from modeling.planning.auto import resolve_auto
from modeling.planning.efficiency import ERRORS, Software, kind_of
from modeling.planning.planner import Plan, plan
from modeling.planning.search import Topology, search
from modeling.planning.stage_costs import CostCache
from profiles import resolve
from profiles.schema import Profile

FILE = Path(__file__).with_name("published.csv")
HELD_OUT = ("Megatron Bridge", "NeMo AutoModel", "NxD Training", "torchtitan A100")
# What rows have in common unless they say otherwise.
COMMON = (
    "cluster.device=cuda",
    "cluster.devices_per_node=8",
    "cluster.launcher=slurm",
    *(f"parallel.{axis}=1" for axis in ("tensor", "pipeline", "context", "expert")),
    "parallel.schedule=1f1b",
    "parallel.data_sharding=fsdp",
    "parallel.keep_gathered=false",
    "parallel.shard_degree=null",
    "train.precision=bf16",
    "train.micro_batch_size=1",
    "model.dropout=0",
)
# Overrides that a search chooses. It starts from the row's degrees: those of shipped profiles do not divide every cluster.
CHOSEN = re.compile(r"parallel\.(?!tensor|pipeline=|context|expert)|train\.(recompute|micro_batch_size)=")
SEARCHED = (
    *("mb-8b-fp8-h100x8", "mb-70b-fp8-h100x64", "mb-405b-fp8-h100x1024-gbs512", "llama3-405b-16384-cp16"),
    "am-dsv3-h100x256",
)
ONCE = 2.5  # bytes an element if Transformer Engine quantizes it: once for both of its products, weights once per step
MEGATRON = Software(attention="flash-1", fuses=False)  # before FlashAttention: as slow as its first version
TRANSFORMER_ENGINE = Software(attention="cudnn", fuses=True, quantized=ONCE)
SOFTWARE = {
    # attn_impl triton and torch 2.0 without compile, with the first cuBLAS for Hopper, whose speed is fitted
    "llm-foundry": Software(attention="flash-1", fuses=False, hopper_products=0.79, quantized=ONCE),
    "torchtitan A100": Software(attention="flash-2"),
    # scaled_dot_product_attention of torch 2.6 is FlashAttention-2; the times grow with the context degree as without balance
    "torchtitan H100": Software(attention="flash-2", balances_context=False),
    "torchtitan H200": Software(attention="flash-2"),
    "Llama 3": Software(attention="cudnn"),
    # DualPipe, and DeepEP, which sends a token once to each node
    "DeepSeek-V3": replace(TRANSFORMER_ENGINE, overlapped=frozenset({"expert"}), sends_once=True),
    "Megatron-LM 2021": MEGATRON,
    "Megatron-LM 2022": MEGATRON,
    # exchanges of tensor groups overlap; experts are not sharded by tensor groups
    "Megatron Bridge": replace(
        TRANSFORMER_ENGINE, overlapped=frozenset({"tensor"}), sends_once=True, splits_tokens=True
    ),
    "NeMo AutoModel": replace(TRANSFORMER_ENGINE, sends_once=True),
    "NxD Training": Software(),
    "neuronx-nemo-megatron": Software(),
}


@dataclass(frozen=True)
class Row:
    """A published step."""

    name: str
    source: str
    profile: Profile
    seconds: float
    memory: float | None  # GiB
    base: str = ""  # shipped profile
    settings: tuple[str, ...] = ()  # its overrides, less the topology

    @property
    def command(self) -> str:
        """The search for a topology."""
        settings = (word for setting in self.settings for word in ("--set", setting))
        return shlex.join(["trainshed", "plan", self.base, "--search", *settings])


@dataclass(frozen=True)
class Compared:
    """A row with planned ÷ published: with its own software, and as this product would run it."""

    row: Row
    ratio: float
    ours: float
    memory: float | None

    @property
    def held_out(self) -> bool:
        return self.row.source in HELD_OUT


def read() -> list[Row]:
    """The rows of the file."""
    with FILE.open(newline="") as file:
        return [_row(values) for values in csv.DictReader(file)]


def _row(values: dict[str, str]) -> Row:
    common = () if values["accelerator"].startswith("trn") else COMMON
    overrides = re.split(r" (?=[a-z0-9_]+\.[a-z0-9_]+=)", values["overrides"])
    profile = resolve.load(
        values["profile"], [*common, f"cluster.accelerator={values['accelerator']}", *overrides]
    )
    tokens, devices = profile.step_tokens, profile.world_size
    if values["step_seconds"]:
        seconds = float(values["step_seconds"])
    elif values["tokens_per_second_per_device"]:
        seconds = tokens / devices / float(values["tokens_per_second_per_device"])
    else:
        flops = flops_per_token(profile) * tokens / devices
        seconds = flops / (float(values["tflops_per_device"]) * 1e12)
    memory = values["memory_gib"]
    settings = tuple(each for each in overrides if not CHOSEN.match(each))
    given = float(memory) if memory else None
    return Row(values["id"], values["source"], profile, seconds, given, values["profile"], settings)


def compare(row: Row, cache: CostCache) -> Compared:
    """Plan a row twice."""
    profile = resolve_auto(row.profile, cache)
    theirs, ours = plan(profile, cache, SOFTWARE[row.source]), plan(profile, cache)
    memory = row.memory and theirs.needs / 2**30 / row.memory
    return Compared(row, _seconds(theirs) / row.seconds, _seconds(ours) / row.seconds, memory)


def _seconds(planned: Plan) -> float:
    assert planned.step_seconds is not None
    return planned.step_seconds


def within(rows: Sequence[Compared], share: float) -> float:
    """Share of rows whose ratio is at most `share` from 1."""
    return sum(abs(each.ratio - 1) <= share for each in rows) / len(rows)


def errors(ratios: Iterable[tuple[str, float]]) -> dict[str, tuple[float, float, int]]:
    """By kind of run, published ÷ planned: 10th and 90th percentile, and number.

    Args:
        ratios: kind of run, and planned ÷ published as this product runs it, of each step on GPUs.
    """
    by_kind: dict[str, list[float]] = {kind: [] for kind in ERRORS}
    for kind, ratio in ratios:
        by_kind[kind].append(1 / round(ratio, 2))
    found = {}
    for kind, members in by_kind.items():
        last, ordered = len(members) - 1, sorted(members)
        low, high = (ordered[round(share * last)] for share in (0.1, 0.9))
        found[kind] = round(low, 2), round(high, 2), len(members)
    return found


def print_rows(rows: Iterable[Row]) -> list[Compared]:
    """Compare rows and print each when it is complete; those of a model share their measured layers."""
    print("| published step | source | kind | planned ÷ published | as run here | memory |")
    print("|---|---|---|---:|---:|---:|")
    cache: CostCache = {}
    compared = []
    for row in rows:
        each = compare(row, cache)
        source = row.source + (", held out" if each.held_out else "")
        figures = (f"{figure:.2f}" if figure else "" for figure in (each.ratio, each.ours, each.memory))
        print(f"| {' | '.join((row.name, source, kind_of(row.profile), *figures))} |", flush=True)
        compared.append(each)
    return compared


def print_summary(rows: Sequence[Compared]) -> None:
    """Print the median and the spread of all rows, by side of the split and by kind."""
    print("\n| rows | number | median | within 20% | 25% | 50% | median as run here |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    groups = {"all": [*rows], "fitted": [each for each in rows if not each.held_out]}
    groups["held out"] = [each for each in rows if each.held_out]
    groups |= {kind: [each for each in rows if kind_of(each.row.profile) == kind] for kind in ERRORS}
    for name, members in groups.items():
        ratio, ours = median(each.ratio for each in members), median(each.ours for each in members)
        shares = (f"{within(members, share):.0%}" for share in (0.2, 0.25, 0.5))
        print(f"| {name} | {len(members)} | {ratio:.2f} | {' | '.join(shares)} | {ours:.2f} |")


def print_searches(rows: Iterable[Row], results: Results) -> bool:
    """Search a topology of each row; returns whether each is at least as fast as the published one."""
    print("| published step | devices | found | step | published topology, planned | CPU seconds |")
    print("|---|---:|---|---:|---:|---:|")
    commands: list[str] = []
    as_fast = True
    for row in rows:
        theirs = _seconds(plan(resolve_auto(row.profile)))
        profile = resolve.load(row.base, row.settings)
        begun = _cpu_seconds()
        best = search(profile, vary=True)[0][0]
        cpu, seconds = _cpu_seconds() - begun, _seconds(best.plan)
        commands.append(row.command)
        as_fast &= float(f"{seconds:.4g}") <= float(f"{theirs:.4g}")  # searches rank by four digits
        cells = (
            f"`{row.name}`",
            f"{profile.world_size:,}",
            _named(best),
            f"{seconds:.2f} s",
            f"{theirs:.2f} s",
            f"{cpu:.0f}",
        )
        figures = {"seconds": seconds, "published": theirs, "cpu_seconds": cpu}
        results.add(row.name, f"| {' | '.join(cells)} |", found=best.overrides, **figures)
    print("", *commands, sep="\n")
    return as_fast


def _cpu_seconds() -> float:
    """CPU time of this process and of those that it has started."""
    return sum(os.times()[:4])


def _named(topology: Topology) -> str:
    """The keys that a topology sets, with the lengths of lists."""
    words: list[str] = []
    for key, value in topology.overrides.items():
        if value not in (None, 1, False):
            shown = f"{len(value) + 1} stages" if key == "parallel.pipeline_cuts" else value
            words.append(f"{key.rpartition('.')[2]} {shown}")
    return ", ".join(words)


def main() -> int:
    parser = make_parser(__doc__, out="published")
    parser.add_argument("--search", nargs="*", metavar="STEP", help=f"default: {' '.join(SEARCHED)}")
    options = parser.parse_args()
    if options.search is not None:
        known = {row.name: row for row in read()}
        steps = (known[name] for name in options.search or SEARCHED)
        return 0 if print_searches(steps, Results(options.out)) else 1
    rows = print_rows(read())
    print_summary(rows)
    gpus = [each for each in rows if device_of(each.row.profile).architecture]
    found = errors((kind_of(each.row.profile), each.ours) for each in gpus)
    print(f"\nERRORS = {found}")
    return 0 if found == ERRORS else 1


if __name__ == "__main__":
    sys.exit(main())
