"""Inject faults into a run on a real four-node Slurm cluster on this machine, and time the recovery.

Run as root with Debian's slurm-wlm and munge; takes about six minutes. A `trainshed run` over two nodes, with compiled graphs, is
hit in turn by a killed training process, a killed node, a hung rank and a killed orchestrator. Measures the time from each fault
to the first step trained afterwards (for the hang, also to the end of the attempt) and the number of repeated steps, and compares
the losses with those of a run without faults. One delay of a real cluster is missing: a killed node is marked down at once, not
after SlurmdTimeout.

The mean recovery time R determines the effective training time to first order (Young 1974, Daly 2006), for N devices with a
failure every M = 46,000 / N hours (Llama 3, arXiv 2407.21783) and a checkpoint every τ that stalls training for C = 1 s:

    E = 1 - (R + τ / 2) / M - C / τ,    maximal at τ = √(2 C M)
"""

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

from benchmarks.harness.processes import has_ended, training_ranks
from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser
from flows.server.shared_server import start_module
from profiles import resolve
from profiles.files import run_files
from tests.flows.micro import settings, write_profile
from tests.slurm.cluster import Cluster, missing

DEVICE_HOURS = 46_000  # per failure
STALL = 1.0  # seconds that a checkpoint stalls training
SLURMD_TIMEOUT = 300  # seconds until Slurm marks an unresponsive node down, by default
INTERVAL = 250  # steps between checkpoints
STEPS = 3000
OVERRIDES = (
    *("cluster.launcher=slurm", "cluster.nodes=2", "cluster.devices_per_node=1", "cluster.exclusive=false"),
    *("parallel.tensor=2", f"train.steps={STEPS}", f"checkpoint.every={INTERVAL}", "evaluate.every=0"),
    *("compile.enabled=true", "cluster.retries=8"),
)


class Run:
    """A run and its metrics."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.run_folder = folder / "store/runs" / name
        self.metrics = self.run_folder / "metrics.jsonl"
        self.log = folder / f"{name}.out"

    def start(self) -> subprocess.Popen[bytes]:
        arguments = ["run", str(self.folder / "micro.yaml"), "--name", self.name, *settings(*OVERRIDES)]
        return start_module(["flows.cli.main", *arguments], self.log, cwd=self.folder)

    def rows(self) -> list[dict[str, Any]]:
        """Metrics of the trained steps."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return [row for row in map(json.loads, lines) if "loss" in row]

    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.rows()}

    def last_step(self) -> int:
        rows = self.rows()
        return rows[-1]["step"] if rows else 0

    def wait_for(self, condition: Callable[[], bool], timeout: float = 300) -> None:
        """Poll until the condition is true; TimeoutError with the end of the run's log."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(self.log.read_text()[-3000:])
            time.sleep(0.3)

    def recover(self, inject: Callable[[], object], *, detect: bool = False) -> dict[str, float]:
        """Inject a fault between two checkpoints and wait for the next attempt to train.

        Returns:
            seconds: until a later attempt has trained a step.
            repeated: steps trained twice.
            detected: seconds until the attempt ended, if `detect` is set.
        """
        checkpoint = (self.last_step() // INTERVAL + 1) * INTERVAL
        self.wait_for(lambda: self.last_step() >= checkpoint + INTERVAL // 2)
        inode, stopped = self.metrics.stat().st_ino, self.last_step()
        record = self.run_folder / "logs/train.exit.json"
        before = record.stat().st_mtime if record.exists() else 0.0
        start = time.monotonic()
        inject()
        detected = {}
        if detect:
            self.wait_for(lambda: record.exists() and record.stat().st_mtime > before)
            detected["detected"] = time.monotonic() - start
        self.wait_for(lambda: self.metrics.stat().st_ino != inode)
        resumed = self.last_step()
        self.wait_for(lambda: self.last_step() > resumed)
        return {**detected, "seconds": time.monotonic() - start, "repeated": max(0, stopped - resumed)}


def measure(folder: Path, cluster: Cluster) -> Iterator[tuple[str, Any]]:
    """Inject all faults; yields recovery figures, then whether steps and losses match a fault-free run."""
    write_profile(folder)
    reference = Run(folder, "reference")
    if not has_ended(reference.start(), reference.log, 900):
        raise TimeoutError(reference.log.read_text()[-3000:])
    run = Run(folder, "faulty")
    process = run.start()
    yield "process killed", run.recover(lambda: training_ranks(run.run_folder)[1].kill())
    victim = cluster.command("scontrol", "show", "hostnames", cluster.jobs("RUNNING")[0][3]).split()[1]
    yield "node killed", run.recover(lambda: cluster.kill_node(victim))
    median = statistics.median(row["step_seconds"] for row in run.rows()[-100:])
    hang = run.recover(lambda: training_ranks(run.run_folder)[1].suspend(), detect=True)
    cluster_keys = resolve.load(str(run.run_folder / run_files.PROFILE)).cluster
    limit = cluster_keys.hang_factor * median + cluster_keys.hang_seconds
    yield "rank hung", {**hang, "limit": limit}

    run.wait_for(lambda: run.last_step() % INTERVAL > INTERVAL // 2)
    jobs = [job[0] for job in cluster.jobs()]
    os.kill(process.pid, signal.SIGKILL)
    start, size = time.monotonic(), run.log.stat().st_size
    process = run.start()
    run.wait_for(lambda: b"re-attached to it" in run.log.read_bytes()[size:])
    yield "orchestrator killed", {"seconds": time.monotonic() - start, "repeated": 0}
    yield "one job", [job[0] for job in cluster.jobs()] == jobs
    yield "exit code", process.wait(900)
    rows = run.rows()
    yield "each step once", [row["step"] for row in rows] == list(range(1, STEPS + 1))
    yield "losses equal", run.losses() == reference.losses()
    yield "graph cache misses", rows[-1]["graph_cache_misses"]


def effective_training_time(recovery: float, devices: int) -> tuple[float, float]:
    """The optimal interval between checkpoints in seconds, and the share of time spent training."""
    between = DEVICE_HOURS / devices * 3600
    interval = math.sqrt(2 * STALL * between)
    return interval, 1 - (recovery + interval / 2) / between - STALL / interval


def main() -> None:
    options = make_parser(__doc__, out="faults").parse_args()
    if missing():
        sys.exit(missing())
    results, kept = {}, Results(options.out)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, Cluster() as cluster:
        for name, value in measure(Path(folder), cluster):
            results[name] = value
            kept.add(name, format_result(name, value), result=value)
    faults = ("process killed", "node killed", "rank hung")  # a killed orchestrator does not stop training
    recoveries = {
        "mean of the faults": statistics.mean(results[name]["seconds"] for name in faults),
        "node killed, with SlurmdTimeout": results["node killed"]["seconds"] + SLURMD_TIMEOUT,
    }
    for name, recovery in recoveries.items():
        for devices in (512, 16_384):
            interval, share = effective_training_time(recovery, devices)
            print(
                f"{devices:,} devices, recovery {recovery:.0f} s ({name}): a checkpoint every {interval / 60:.1f} min, "
                f"{share:.2%} of the time is spent training"
            )


def format_result(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        return f"{name:<20} {value}"
    text = f"{name:<20} trained again after {value['seconds']:5.1f} s, {value['repeated']} steps repeated"
    if "limit" in value:
        text += f", attempt ended after {value['detected']:.1f} s (limit {value['limit']:.1f})"
    return text


if __name__ == "__main__":
    main()
