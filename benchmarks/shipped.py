"""Plan and trace profiles at full size: topology, memory, graphs and step time as Markdown tables.

Without names, every profile that supported hardware can start is planned and traced. Memory and step time are the planner's;
`traced` is the memory with the activations of the traced graphs instead; `graphs` is the number of graphs that are compiled ahead
of time for all ranks (modeling/tracing/trace.py). Each row takes 2 to 30 s of CPU time and is printed when it is complete.

There is one table for each model, with the heading of docs/devices/shipped.md.

With --search, the table shows the fastest topology that `trainshed plan --search` finds with the profile's microbatch, and how
much faster it is. From RESOLUTION on, a comment in the profile's file has to say why it is not shipped, with that number.

Exit codes: 0; 1 if a plan does not fit its device or needs less memory than its trace, if the search finds no topology, or if a
file does not say why.
"""

import re
import sys
from itertools import groupby

from benchmarks.harness.timing import make_parser
from flows.ui.summaries import cluster_summary
from modeling.planning.planner import Plan, plan
from modeling.planning.search import Variation, search
from modeling.tracing.trace import trace
from modeling.tracing.traced_plan import apply_trace
from profiles import recompute, resolve
from profiles.check import get_value
from profiles.errors import format_value
from profiles.schema import Profile
from profiles.sections.base import required
from tasks.reporting.format import format_step_time

COLUMNS = ("profile", "cluster", "topology", "recompute", "GiB planned", "traced", "graphs", "a step")
SEARCHED = ("profile", "GiB planned", "a step", "faster", "with", "GiB planned", "a step")
RESOLUTION = 0.02  # share of a step; of topologies that are closer, plans do not tell which is faster


def topology(profile: Profile) -> str:
    """Parallel degrees except data, and the sharding over data × context, such as "TP 4, FSDP 16 × 2"."""
    parallel = profile.parallel
    degrees = {"TP": parallel.tensor, "PP": parallel.pipeline, "CP": parallel.context, "EP": parallel.expert}
    parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if profile.shard_degree > 1:
        replicas = profile.weight_replicas // profile.shard_degree
        kind = {"zero1": "ZeRO-1", "fsdp": "FSDP"}[parallel.data_sharding]
        parts.append(f"{kind} {profile.shard_degree}" + (f" × {replicas}" if replicas > 1 else ""))
    return ", ".join(parts) or "one process"


def describe(profile: Profile) -> tuple[str, str, str, str]:
    """The cells of a row that need no plan."""
    return (
        profile.name,
        cluster_summary(profile),
        topology(profile),
        recompute.describe(profile.train.recompute),
    )


def describe_plan(planned: Plan) -> tuple[str, str]:
    """Memory and time of a step."""
    step = planned.step_seconds
    memory = f"{planned.needs / 2**30:.1f} of {planned.device_bytes / 2**30:.1f}"
    return memory, format_step_time(step) if step else "-"


def row(profile: Profile) -> tuple[tuple[str, ...], bool]:
    """A profile's row, and whether its plan fits and needs no less memory than its trace."""
    planned, traced = plan(profile), trace(profile)
    needs = apply_trace(profile, planned, traced.to_json()).needs
    memory, step = describe_plan(planned)
    cells = *describe(profile), memory, f"{needs / 2**30:.1f}", str(traced.graphs), step
    return cells, planned.fits and needs <= planned.needs


def searched_row(profile: Profile) -> tuple[tuple[str, ...], bool]:
    """A profile's row with the fastest topology found, and whether it is shipped or the file says why not."""
    own, found = plan(profile), search(profile, vary=True)[0]
    size = profile.train.micro_batch_size
    same = (each for each in found if Variation.of(profile, each.overrides).microbatch == size)
    if (best := next(same, None)) is None:
        return (profile.name, *describe_plan(own), "-", f"none with microbatch {size}", "-", "-"), False
    changes = {key: value for key, value in best.overrides.items() if get_value(profile, key) != value}
    keys = ", ".join(f"{key}={format_value(value)}" for key, value in changes.items())
    faster = 1 - required(best.plan.step_seconds) / required(own.step_seconds)
    cells = (profile.name, *describe_plan(own), f"{faster:.1%}", keys or "-", *describe_plan(best.plan))
    reason = re.search(rf"\b{faster:.0%} (faster|shorter)", comments(profile.name))
    return cells, faster < RESOLUTION or reason is not None


def comments(name: str) -> str:
    """A profile's comments: of its file, and of those that it extends for the same hardware."""
    path = resolve.shipped_files()[name]
    if path.is_file():
        text = path.read_text()
        (base,) = re.findall(r"^extends: (\S+)", text, re.M) or [None]
    else:  # an entry of an overlay, and the lines above it
        entry = rf"((?:^  #.*\n)*)^  {re.escape(name.removesuffix('-' + path.parent.stem))}:"
        (text,), base = re.findall(entry, path.parent.read_text(), re.M), None
    said = " ".join(re.findall(r"# (.*)", text))
    if base and resolve.load(base).cluster.accelerator == resolve.load(name).cluster.accelerator:
        said += f" {comments(base)}"
    return said


def by_model() -> list[Profile]:
    """The shipped profiles by model, smallest first."""
    profiles = sorted(map(resolve.load, resolve.names()), key=lambda profile: profile.model.parameters)
    models = list(dict.fromkeys(map(model_of, profiles)))
    return sorted(profiles, key=lambda profile: models.index(model_of(profile)))


def model_of(profile: Profile) -> str:
    """The profile's name without size, objective and hardware: `llama3` of `llama3-8b-dpo`."""
    return re.split(r"-(?:\d|h\d+$|sft|dpo|orpo|lora|moe)", profile.name)[0]


def main(names: list[str], searches: bool = False) -> int:
    profiles = [resolve.load(name) for name in names] or by_model()
    if searches:  # not on this machine's CPU, whose speed is unknown
        profiles = [profile for profile in profiles if profile.cluster.accelerator]
    columns, measure = (SEARCHED, searched_row) if searches else (COLUMNS, row)
    passed = True
    heading = f"| {' | '.join(columns)} |\n|{'---|' * 4}{'---:|' * (len(columns) - 4)}"
    for model, group in groupby(profiles, model_of):
        print(f"\n## {model}\n\n{heading}", flush=True)
        for profile in group:
            resolve.check(profile)
            cells, passes = measure(profile)
            print(f"| {' | '.join(cells)} |", flush=True)
            passed &= passes
    return 0 if passed else 1


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("profiles", nargs="*", metavar="PROFILE", help="default: all that can start")
    parser.add_argument("--search", action="store_true", help="compare with the fastest topologies found")
    options = parser.parse_args()
    sys.exit(main(options.profiles, options.search))
