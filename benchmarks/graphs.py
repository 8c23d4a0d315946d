"""Measure ahead-of-time compilation: trace, first-step or speed.

    trace       trace the large profiles, each in its own process: seconds, peak memory, graphs (at most 120 s and 4 GB)
    first-step  tiny with 8 layers: time of the first step without precompiled graphs, over that with them (at least 4)
    speed       the small workload: tokens/s compiled over eager (above 1), and the difference of the losses (at most 2e-2)

Prints the figures and then their limits; the exit code is 1 if a limit is exceeded.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness.processes import Script, largest_difference, measure_script
from benchmarks.harness.results import Results
from benchmarks.harness.timing import alternate, make_parser, median_ratio
from profiles.resolve import dump, load

LARGE = ("llama3-70b", "llama3-70b-cp", "llama3.1-405b", "gpt3-175b")
MAX_SECONDS, MAX_BYTES = 120, 4e9
MIN_SPEEDUP = 4.0
LOSS_TOLERANCE = 2e-2


def trace(names: Sequence[str], results: Results) -> bool:
    """Trace profiles; returns whether all are within the limits."""
    print(f"{'profile':<20}{'layers':>7}{'ranks':>7}{'seconds':>9}{'MB':>7}{'graphs':>8}")
    within = True
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            run = write_run_folder(Path(folder), name)
            profile = load(str(run / "profile.yaml"))
            output = run / "trace.json"
            command = [sys.executable, "-m", "modeling.tracing.trace"]
            command += ["--run-folder", str(run), "--output", str(output)]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            traced = json.loads(output.read_text())
        graphs = sum(len(program["graphs"]) for program in traced["programs"])
        text = (
            f"{name:<20}{profile.model.num_hidden_layers:>7}{profile.world_size:>7}{traced['seconds']:>9.1f}"
            f"{traced['peak_bytes'] / 1e6:>7.0f}{graphs:>8}"
        )
        results.add(name, text, seconds=traced["seconds"], peak_bytes=traced["peak_bytes"], graphs=graphs)
        within &= traced["seconds"] <= MAX_SECONDS and traced["peak_bytes"] <= MAX_BYTES
    print(f"\nat most {MAX_SECONDS} s and {MAX_BYTES / 1e6:.0f} MB each")
    return within


def first_step(rounds: int, results: Results) -> bool:
    """Time the first step, alternating between an empty compile cache and precompiled graphs."""
    from tasks.step import Context
    from tasks.steps import graphs
    from tasks.store.store import Store
    from tests.modeling import micro

    overrides = (
        *("model.num_hidden_layers=8", "train.steps=1", "train.warmup_steps=0", "evaluate.every=0"),
        "compile.enabled=true",  # for one step, compiling would not pay
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = Store(str(folder / "store"))
        dataset = micro.dataset(folder / "data", tokens=20000)
        profile = load(str(write_run_folder(folder / "compile", "tiny", *overrides) / "profile.yaml"))
        artifact = graphs.GraphsStep().run(Context(profile, store))
        print(graphs.format_summary(artifact.summary))

        def train(kind: str) -> float:
            with tempfile.TemporaryDirectory(dir=folder) as run_folder:
                run = write_run_folder(Path(run_folder), "tiny", *overrides)
                precompiled = ("--graphs", store.artifacts.path(artifact)) if kind == "warm" else ()
                arguments = ("--run-folder", run, "--dataset", dataset, *precompiled)
                micro.finish(micro.start("training.train", *arguments))
                row = micro.metrics(run)[0]
            assert (row["graph_cache_misses"] == 0) == (kind == "warm"), row
            seconds: float = row["step_seconds"]
            return seconds

        sides = {kind: partial(train, kind) for kind in ("cold", "warm")}
        seconds = alternate(sides, rounds, keep=results.turn)
    for kind, times in seconds.items():
        print(f"first step, {kind}: {', '.join(f'{value:.2f}' for value in times)} s")
    ratio = statistics.median(seconds["cold"]) / statistics.median(seconds["warm"])
    print(f"\ncold over warm: {ratio:.2f}, at least {MIN_SPEEDUP}")
    return ratio >= MIN_SPEEDUP


def speed(rounds: int, precision: str, results: Results) -> bool:
    """Compare eager with compiled training steps."""
    with tempfile.TemporaryDirectory() as graphs:
        common = ("--precision", precision, "--threads", "2")
        scripts = {
            "eager": Script("training_steps.ours", common),
            "compiled": Script("training_steps.ours", (*common, "--graphs", graphs)),
        }
        sides = {kind: partial(measure_script, script) for kind, script in scripts.items()}
        runs = alternate(sides, rounds, keep=lambda side, run: results.turn(side, run.median_seconds()))
    seconds = {kind: [run.median_seconds() for run in measured] for kind, measured in runs.items()}
    for kind, times in seconds.items():
        print(f"step, {kind}: {', '.join(f'{value * 1e3:.0f}' for value in times)} ms")
    ratio = median_ratio(seconds["eager"], seconds["compiled"])
    error = largest_difference([runs["eager"][-1], runs["compiled"][-1]])
    print(
        f"\ncompiled over eager, {precision}: {ratio:.2f}, above 1; losses differ by {error:.1e}, at most {LOSS_TOLERANCE}"
    )
    return ratio > 1 and error <= LOSS_TOLERANCE


def write_run_folder(folder: Path, name: str, *overrides: str) -> Path:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "profile.yaml").write_text(dump(load(name, overrides)))
    return folder


def main() -> int:
    parser = make_parser(__doc__, rounds=2, out="graphs")
    parser.add_argument("what", choices=("trace", "first-step", "speed"))
    parser.add_argument("--profiles", nargs="+", default=LARGE, help="for `trace`")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32", help="for `speed`")
    options = parser.parse_args()
    results = Results(options.out)
    if options.what == "trace":
        within = trace(options.profiles, results)
    elif options.what == "first-step":
        within = first_step(options.rounds, results)
    else:
        within = speed(options.rounds, options.precision, results)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
