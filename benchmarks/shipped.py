"""Plan and trace profiles at full size: topology, memory, graphs and step time as Markdown tables.

Without names, every profile that supported hardware can start is planned and traced. Memory and step time are the planner's;
`traced` is the memory with the activations of the traced graphs instead; `graphs` is the number of graphs that are compiled ahead
of time for all ranks (modeling/tracing/trace.py). Each row takes 2 to 30 s of CPU time and is printed when it is complete.

There is one table for each model, with the heading of docs/devices/shipped.md.

Exit codes: 0; 1 if a plan does not fit its device or needs less memory than its trace.
"""

import re
import sys
from itertools import groupby

from benchmarks.harness.timing import make_parser
from flows.ui.summaries import cluster_summary
from modeling.planning.planner import Plan, plan
from modeling.tracing.trace import trace
from modeling.tracing.traced_plan import apply_trace
from profiles import recompute, resolve
from profiles.schema import Profile
from tasks.reporting.format import format_step_time

COLUMNS = ("profile", "cluster", "topology", "recompute", "GiB planned", "traced", "graphs", "a step")


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


def by_model() -> list[Profile]:
    """The shipped profiles by model, smallest first."""
    profiles = sorted(map(resolve.load, resolve.names()), key=lambda profile: profile.model.parameters)
    models = list(dict.fromkeys(map(model_of, profiles)))
    return sorted(profiles, key=lambda profile: models.index(model_of(profile)))


def model_of(profile: Profile) -> str:
    """The profile's name without size, objective and hardware: `llama3` of `llama3-8b-dpo`."""
    return re.split(r"-(?:\d|h\d+$|sft|dpo|orpo|lora|moe)", profile.name)[0]


def main(names: list[str]) -> int:
    profiles = [resolve.load(name) for name in names] or by_model()
    fitting = True
    for model, group in groupby(profiles, model_of):
        print(f"\n## {model}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * 4}{'---:|' * 4}", flush=True)
        for profile in group:
            resolve.check(profile)
            cells, fits = row(profile)
            print(f"| {' | '.join(cells)} |", flush=True)
            fitting &= fits
    return 0 if fitting else 1


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("profiles", nargs="*", metavar="PROFILE", help="default: all that can start")
    sys.exit(main(parser.parse_args().profiles))
