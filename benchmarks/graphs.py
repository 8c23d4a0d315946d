"""Ahead-of-time compilation measured: python -m benchmarks.graphs trace | first-step | speed

    trace       traces the large profiles, each in a process of its own: seconds, peak memory, graphs (at most 120 s and 4 GB)
    first-step  tiny's model at 8 layers: the first step with graphs compiled ahead over the first step without (at most 1/4)
    speed       the benchmark model, compiled over eager, tokens/s (above 1), and how far the losses differ (bf16: 2e-2)

Each prints its figures and, under a line, what they have to be; the exit code is 1 where they are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from profiles.resolve import dump, load

LARGE = ("llama3-70b", "llama3-70b-trn1", "llama3-70b-cp", "llama3.1-405b-trn1", "gpt3-175b")
SECONDS, BYTES = 120, 4e9
COLD_OVER_WARM = 4.0
LOSSES = 2e-2


def trace(names: Sequence[str]) -> bool:
    """A row a profile."""
    print(f"{'profile':<20}{'layers':>7}{'ranks':>7}{'seconds':>9}{'MB':>7}{'graphs':>8}")
    good = True
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            run = _run_folder(Path(temporary), name)
            profile = load(str(run / "profile.yaml"))
            output = run / "trace.json"
            _python("modeling.tracing.trace", "--run-folder", run, "--output", output)
            found = json.loads(output.read_text())
        graphs = sum(len(program["graphs"]) for program in found["programs"])
        print(
            f"{name:<20}{profile.model.num_hidden_layers:>7}{profile.world_size:>7}{found['seconds']:>9.1f}"
            f"{found['peak_bytes'] / 1e6:>7.0f}{graphs:>8}"
        )
        good &= found["seconds"] <= SECONDS and found["peak_bytes"] <= BYTES
    print(f"\nat most {SECONDS} s and {BYTES / 1e6:.0f} MB each")
    return good


def first_step(rounds: int) -> bool:
    """Cold and warm, in turn; the cold one compiles into an empty folder."""
    from tasks import graphs
    from tasks.step import Context
    from tasks.store.store import Store
    from tests.modeling import micro

    overrides = ("model.num_hidden_layers=8", "train.steps=1", "train.warmup_steps=0", "evaluate.every=0")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store = Store(str(folder / "store"))
        corpus = micro.dataset(folder / "data", tokens=20000)
        run = _run_folder(folder / "ahead", "tiny", *overrides)
        profile = load(str(run / "profile.yaml"))
        artifact = graphs.Graphs().run(Context(profile, store))
        print(graphs.sentence(artifact.summary))
        seconds: dict[str, list[float]] = {"cold": [], "warm": []}
        for number in range(rounds):
            for kind, times in seconds.items():
                run = _run_folder(folder / f"{kind}-{number}", "tiny", *overrides)
                ahead = ("--graphs", store.artifacts.path(artifact)) if kind == "warm" else ()
                micro.finish(
                    micro.start("train", "--run-folder", run, "--dataset", corpus, *ahead),
                )
                row = micro.metrics(run)[0]
                assert (row["cold_compiles"] == 0) == (kind == "warm"), row
                times.append(row["step_seconds"])
    for kind, times in seconds.items():
        print(f"first step, {kind}: {', '.join(f'{value:.2f}' for value in times)} s")
    ratio = statistics.median(seconds["cold"]) / statistics.median(seconds["warm"])
    print(f"\ncold over warm: {ratio:.2f}, at least {COLD_OVER_WARM}")
    return ratio >= COLD_OVER_WARM


def speed(rounds: int, precision: str) -> bool:
    """Eager and compiled, in turn, medians of a run's steps."""
    seconds: dict[str, list[float]] = {"eager": [], "compiled": []}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as graphs:
        for _ in range(rounds):
            for kind, times in seconds.items():
                more = ("--graphs", graphs) if kind == "compiled" else ()
                told = _python("benchmarks.ours", "--precision", precision, "--threads", "2", *more)
                result = json.loads(told.splitlines()[-1])
                times.append(statistics.median(result["seconds"]))
                losses[kind] = result["losses"]
    for kind, times in seconds.items():
        print(f"a step, {kind}: {', '.join(f'{value * 1e3:.0f}' for value in times)} ms")
    ratio = statistics.median(e / c for e, c in zip(seconds["eager"], seconds["compiled"], strict=True))
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["compiled"], losses["eager"], strict=True))
    print(
        f"\ncompiled over eager, {precision}: {ratio:.2f}, above 1; losses differ by {apart:.1e}, at most {LOSSES}"
    )
    return ratio > 1 and apart <= LOSSES


def _run_folder(folder: Path, name: str, *overrides: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.yaml").write_text(dump(load(name, overrides)))
    (folder / "logs").mkdir(exist_ok=True)
    return folder


def _python(module: str, *arguments: object) -> str:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("what", choices=("trace", "first-step", "speed"))
    parser.add_argument("--profiles", nargs="+", default=LARGE, help="of trace")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    options = parser.parse_args()
    if options.what == "trace":
        good = trace(options.profiles)
    elif options.what == "first-step":
        good = first_step(options.rounds)
    else:
        good = speed(options.rounds, options.precision)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
