"""neuron_parallel_compile, the legacy stack's compiler (PyTorch/XLA): an external command around a short training run.

It runs the training command for its graphs alone (results are zeros), compiles them in parallel into NEURON_COMPILE_CACHE_URL
and ends with three lines, under one of two prefixes:

    ||NEURON_PARALLEL_COMPILE||: Total graphs: 6
    ||PARALLEL_COMPILE||: Total successful compilations: 5
    ||PARALLEL_COMPILE||: Total failed compilations: 1

Its exit status is not documented, so these lines alone count. A failed graph stays in the cache as failed until the compiler is
told to try again, so the cache lies in the run's folder between attempts, and later ones tell it. Never run here with the real
command.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from modeling import compilers
from profiles.resolve import dump
from profiles.schema import Profile

COMMAND = compilers.EXTERNAL
RETRY = "--retry_failed_compilation"
TOTALS = {"graphs": "total", "successful compilations": "successful", "failed compilations": "failed"}
LINE = re.compile(rf"\|\|(?:NEURON_)?PARALLEL_COMPILE\|\|.*?Total ({'|'.join(TOTALS)}):\s*(\d+)")
FAILURE = re.compile(r"^.*(?:Failed compilation|\bERROR\b).*$", re.MULTILINE)
TRIAL = {"steps": 2, "warmup_steps": 0, "constant_steps": 0}


class ParallelCompileFailed(RuntimeError):
    """The command failed, or did not say how it ended."""


def totals(output: str) -> dict[str, int]:
    """Numbers of the last summary in the command's output: total, successful, failed.

    Raises:
        ParallelCompileFailed: one of the three lines is missing, or they do not add up.
    """
    found = {TOTALS[name]: int(number) for name, number in LINE.findall(output)}
    absent = [name for name, ours in TOTALS.items() if ours not in found]
    if absent:
        raise ParallelCompileFailed(f"{COMMAND} did not say its total of {', '.join(absent)}")
    if found["successful"] + found["failed"] != found["total"]:
        raise ParallelCompileFailed(f"{COMMAND} counts do not add up: {found}")
    return found


def run(profile: Profile, folder: Path, dataset: Path, cache: Path, timeout: float) -> dict[str, int]:
    """Compile the graphs of a short training run of the profile into `cache`; its output is appended to a log.

    Args:
        folder: the run's.
        dataset: folder of the dataset artifact.
        cache: kept between attempts; one that is there has failed graphs tried again.

    Returns:
        total, successful and failed, in graphs; `errors`, its lines about failures.

    Raises:
        ParallelCompileFailed: it did not say how it ended.
        TimeoutError: it took longer than `timeout` seconds.
    """
    trial = folder / "graphs" / "trial"
    shutil.rmtree(trial, ignore_errors=True)
    trial.mkdir(parents=True)
    (trial / "profile.yaml").write_text(dump(_short(profile)))
    flags = [
        os.environ.get("NEURON_CC_FLAGS", ""),
        profile.compile.flags or "",
        RETRY if cache.exists() else "",
    ]
    cache.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "NEURON_COMPILE_CACHE_URL": str(cache),
        "NEURON_CC_FLAGS": " ".join(filter(None, flags)),
    }
    command = [
        *(COMMAND, sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(profile.cluster.devices_per_node), "-m", "modeling.train"),
        *("--run-folder", str(trial), "--dataset", str(dataset)),
    ]
    log_file = folder / "logs" / f"{COMMAND}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        start = output.tell()
        _execute(command, environment, output.fileno(), timeout)
    text = log_file.read_bytes()[start:].decode(errors="replace")
    found = totals(text)
    return {**found, "errors": FAILURE.findall(text) if found["failed"] else []}


def _short(profile: Profile) -> Profile:
    """The same graphs in two steps and an evaluation."""
    return profile.model_copy(
        update={
            "train": profile.train.model_copy(update=TRIAL),
            "evaluate": profile.evaluate.model_copy(update={"every": 1, "batches": 1}),
            "checkpoint": profile.checkpoint.model_copy(update={"every": 0}),
            "compile": profile.compile.model_copy(update={"enabled": False}),
        }
    )


def _execute(command: list[str], environment: Mapping[str, str], output: int, timeout: float) -> None:
    """Run it to its end, whatever its exit status; whatever ends this early ends it and what it started."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout
    try:
        while child.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{COMMAND} took longer than {timeout:.0f} s")
            time.sleep(0.2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
