"""Faults one after another on a real Slurm cluster of four nodes on this machine, and how long each keeps a run from training.

    python -m benchmarks.faults [--json]        # as root, with Debian's slurm-wlm and munge; about six minutes

One run of `trainshed run` over two nodes with compiled graphs meets, in turn: a killed training process, a node that dies, a rank
that hangs, the death of the orchestrator. Measured is the time from the fault to the first step that is trained again (for the
hang: to the end of the attempt), and the steps that were trained twice. At the end its losses are compared with those of
a run that nothing happened to.

One wait of a real cluster is left out: a node that dies is set down at once, which Slurm does by itself after SlurmdTimeout.

From the mean time to training again R the effective training time follows to first order (Young 1974, Daly 2006), for N devices
with a failure every M = 46,000 / N hours (Llama 3, arXiv 2407.21783) and a checkpoint every τ, which halts training for C:

    E = 1 - (R + τ / 2) / M - C / τ,    at its best for τ = √(2 C M)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.flows.micro import settings, write_profile
from tests.slurm.cluster import Cluster, missing

DEVICE_HOURS = 46_000
LEFT_OUT = 300  # seconds until a node is known to be dead: Slurm's own SlurmdTimeout
EVERY = 250  # steps between checkpoints
STEPS = 3000
OVERRIDES = (
    *("cluster.launcher=slurm", "cluster.nodes=2", "cluster.devices_per_node=1", "cluster.exclusive=false"),
    *("parallel.tensor=2", f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "evaluate.every=0"),
    *("compile.enabled=true", "cluster.retries=8"),
)


class Bench:
    """A run, followed by its metrics."""

    def __init__(self, folder: Path, cluster: Cluster, name: str) -> None:
        self.folder, self.cluster, self.name = folder, cluster, name
        self.run = folder / "store/runs" / name
        self.metrics = self.run / "metrics.jsonl"

    def start(self) -> subprocess.Popen[bytes]:
        profile = self.folder / "micro.yaml"
        command = [
            sys.executable,
            "-m",
            "flows.cli.main",
            "run",
            str(profile),
            "--name",
            self.name,
            *settings(*OVERRIDES),
        ]
        with (self.folder / f"{self.name}.out").open("ab") as output:
            return subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=output, start_new_session=True
            )

    def rows(self) -> list[dict]:
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return [row for row in map(json.loads, lines) if "loss" in row]

    def last(self) -> int:
        rows = self.rows()
        return rows[-1]["step"] if rows else 0

    def ranks(self) -> list[psutil.Process]:
        found = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if (
                    "modeling.training.train" in process.cmdline()
                    and "RANK" in environment
                    and str(self.run) in process.cmdline()
                ):
                    found[int(environment["RANK"])] = process
            except psutil.Error:
                continue
        return [found[rank] for rank in sorted(found)]

    def wait(self, true: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError((self.folder / f"{self.name}.out").read_text()[-3000:])
            time.sleep(0.3)

    def fault(self, do: Callable[[], None], *, ended: bool = False) -> dict[str, float]:
        """Let it happen some steps after a checkpoint; seconds until a later attempt has trained a step, and steps repeated."""
        begin = self.last() // EVERY * EVERY + EVERY
        self.wait(lambda: self.last() >= begin + EVERY // 2)
        file, stopped = self.metrics.stat().st_ino, self.last()
        record = self.run / "logs/train.exit.json"
        before = record.stat().st_mtime if record.exists() else 0.0
        at = time.monotonic()
        do()
        done = {}
        if ended:
            self.wait(lambda: record.exists() and record.stat().st_mtime > before)
            done["detected"] = time.monotonic() - at
        self.wait(lambda: self.metrics.stat().st_ino != file)
        resumed = self.last()
        self.wait(lambda: self.last() > resumed)
        return {**done, "seconds": time.monotonic() - at, "repeated": max(0, stopped - resumed)}


def measure(folder: Path, cluster: Cluster) -> Iterator[tuple[str, Any]]:
    """All faults, as they are over; seconds and steps of each, and whether the losses are those of an undisturbed run."""
    write_profile(folder)
    calm = Bench(folder, cluster, "calm")
    process = calm.start()
    if process.wait(900) != 0:
        raise RuntimeError((folder / "calm.out").read_text()[-3000:])
    expected = {row["step"]: row["loss"] for row in calm.rows()}
    bench = Bench(folder, cluster, "stormy")
    process = bench.start()
    yield "process killed", bench.fault(lambda: os.kill(bench.ranks()[1].pid, signal.SIGKILL))
    victim = cluster.command("scontrol", "show", "hostnames", cluster.jobs("RUNNING")[0][3]).split()[1]
    yield "node killed", bench.fault(lambda: cluster.kill_node(victim))
    median = statistics.median(row["step_seconds"] for row in bench.rows()[-100:])
    hung = bench.fault(lambda: bench.ranks()[1].suspend(), ended=True)
    yield "rank hung", {**hung, "limit": 5 * median + 30}

    bench.wait(lambda: bench.last() % EVERY > EVERY // 2)
    jobs = [job[0] for job in cluster.jobs()]
    os.kill(process.pid, signal.SIGKILL)
    at, log = time.monotonic(), folder / "stormy.out"
    size = log.stat().st_size
    process = bench.start()
    bench.wait(lambda: b"re-attached to it" in log.read_bytes()[size:])
    yield "orchestrator killed", {"seconds": time.monotonic() - at, "repeated": 0}
    yield "one job", [job[0] for job in cluster.jobs()] == jobs
    yield "exit code", process.wait(900)
    rows = bench.rows()
    yield "each step once", [row["step"] for row in rows] == list(range(1, STEPS + 1))
    yield "losses alike", {row["step"]: row["loss"] for row in rows} == expected
    yield "cold compiles", rows[-1]["cold_compiles"]


def effective(restart: float, stall: float, devices: int) -> tuple[float, float]:
    """The best interval between checkpoints, in seconds, and the share of the time that trains."""
    between = DEVICE_HOURS / devices * 3600
    interval = math.sqrt(2 * stall * between)
    return interval, 1 - (restart + interval / 2) / between - stall / interval


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--stall", type=float, default=1.0, help="seconds that a checkpoint halts training (default: 1)"
    )
    options = parser.parse_args()
    if missing():
        sys.exit(missing())
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, Cluster() as cluster:
        found = {}
        for name, value in measure(Path(folder), cluster):
            found[name] = value
            if not options.json:
                print(line(name, value), flush=True)
    stops = ("process killed", "node killed", "rank hung")  # the orchestrator's death stops no training
    restarts = {
        "mean of the stops": statistics.mean(found[name]["seconds"] for name in stops),
        "node killed, with Slurm's own wait": found["node killed"]["seconds"] + LEFT_OUT,
    }
    found["effective"] = {
        name: {devices: effective(restart, options.stall, devices) for devices in (512, 16_384)}
        for name, restart in restarts.items()
    }
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, restart in restarts.items():
        for devices, (interval, share) in found["effective"][name].items():
            print(
                f"{devices:,} devices, {restart:.0f} s a stop ({name}): a checkpoint every {interval / 60:.1f} min, "
                f"{share:.2%} of the time trains"
            )


def line(name: str, value: Any) -> str:
    """A finding as it is printed."""
    if not isinstance(value, dict):
        return f"{name:<20} {value}"
    limit = (
        f", attempt ended after {value['detected']:.1f} s (limit {value['limit']:.1f})"
        if "limit" in value
        else ""
    )
    return f"{name:<20} training again after {value['seconds']:5.1f} s, {value['repeated']} steps repeated{limit}"


if __name__ == "__main__":
    main()
