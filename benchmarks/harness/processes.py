"""Run benchmark modules and measured programs in separate processes.

The last line that a module prints is its result, one JSON object with the fields of `Measurement`.
"""

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from parallel import device as devices

# With an address, because a machine's own name may not resolve: torchrun would wait for it for five minutes.
TORCHRUN = ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
TIMEOUT = 1800  # seconds
GRACE = 20  # seconds between SIGTERM and SIGKILL, for torchrun to end its children
LAST_LINES = 30  # of what a failed script wrote
# Of torchrun once a process has failed, which wrote its error before.
TORCHRUN_LINE = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic/multiprocessing/", re.MULTILINE)


class ScriptError(RuntimeError):
    """A script failed or timed out; the message contains the end of its standard error."""


@dataclass(frozen=True)
class Script:
    """A module of `benchmarks` with its arguments, run by torchrun when it needs several processes.

    Attributes:
        device: type of the device whose environment it gets, as a run does from its launcher.
        variables: further environment variables.
    """

    module: str
    arguments: tuple[str, ...] = ()
    processes: int = 1
    device: str = "cpu"
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        launcher = ["-m"]
        if self.processes > 1:
            launcher = ["-m", *TORCHRUN, str(self.processes), "-m"]
        return [sys.executable, *launcher, f"benchmarks.{self.module}", *self.arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that it gets."""
        return {**devices.KINDS[self.device].local_environment(), **os.environ, **self.variables}


@dataclass
class Measurement:
    """Result of a script.

    Attributes:
        seconds: of each timed step.
        losses: of every step, including the warm-up.
        update_seconds: of each timed step's update, from summed gradients to new weights; empty if not timed.
        peak_bytes: peak memory above the inputs.
    """

    seconds: list[float]
    losses: list[float] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def median_seconds(self, update: bool = False) -> float:
        """Seconds of the median step, or of the median update."""
        return statistics.median(self.update_seconds if update else self.seconds)


def run_script(script: Script, timeout: float = TIMEOUT) -> str:
    """Run a script and return its standard output. Raises ScriptError if it fails or takes too long."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            script.command, env=script.environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            output, _ = process.communicate(timeout=timeout)
            failure = f"exit code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"timed out after {timeout:.0f} s"
        finally:
            terminate(process)
        if failure:
            errors.seek(0)
            text = errors.read()
            text = TORCHRUN_LINE.split(text, maxsplit=1)[0].strip() or text.strip()
            last = "\n".join(text.splitlines()[-LAST_LINES:])
            raise ScriptError(f"{script.module}: {failure}\n{last}")
    return output


def measure_script(script: Script, timeout: float = TIMEOUT) -> Measurement:
    """Run a script and parse the last line of its output; raises ScriptError as `run_script` does."""
    return Measurement(**json.loads(run_script(script, timeout).splitlines()[-1]))


def largest_difference(runs: Sequence[Measurement]) -> float:
    """Largest relative difference between losses of the same step in any two runs; NaN if one is NaN."""
    largest = 0.0
    for losses in zip(*(run.losses for run in runs), strict=True):
        if any(map(math.isnan, losses)):
            return math.nan
        largest = max(largest, (max(losses) - min(losses)) / min(map(abs, losses)))
    return largest


def terminate(process: subprocess.Popen[Any]) -> None:
    """Terminate a running launcher or flow: first by SIGTERM, since SIGKILL leaves its children running."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def has_ended(process: subprocess.Popen[bytes], log: Path, seconds: float) -> bool:
    """Whether a process ends within so many seconds. Raises RuntimeError with its output if it fails."""
    try:
        if process.wait(seconds):
            raise RuntimeError(log.read_text()[-3000:])
    except subprocess.TimeoutExpired:
        return False
    return True


def training_ranks(run_folder: Path) -> list[psutil.Process]:
    """Processes that train the run in this folder, in order of rank."""
    ranks = {}
    for process in psutil.process_iter():
        try:
            command, (kind, _, rank) = process.cmdline(), process.name().partition(" ")
        except psutil.Error:
            continue
        if {"modeling.training.train", str(run_folder)} <= set(command) and kind == "rank":
            ranks[int(rank)] = process
    return [ranks[rank] for rank in sorted(ranks)]
