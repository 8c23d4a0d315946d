"""Runs each check in separate processes, so that a crash or a hang does not affect the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from modeling.check_device import checks
from modeling.check_device.checks import Check, Result, local_device
from modeling.check_device.kernel_check import TOLERANCES
from modeling.planning import calibration
from modeling.planning.measure import calibrate
from parallel import device as devices
from profiles import resolve

TIMEOUT = 900  # seconds of a check; the first compilation on an accelerator takes minutes
GRACE = 10.0  # seconds that processes of a check that timed out have to end


def run_checks(kind: str, processes: int, profiles: Sequence[str] = ()) -> list[tuple[Check, Result, float]]:
    """Run each check, once per profile if it accepts one; returns checks, results and seconds."""
    results = []
    for check in checks.CHECKS:
        if check.all_devices and processes == 1:
            continue
        for profile in profiles if check.takes_profile and profiles else (None,):
            shown = check
            if profile is not None:
                eight = resolve.load(profile).train.precision == "fp8"
                expected = f"{check.expected}, FP8 {TOLERANCES['fp8']:.0e}" if eight else check.expected
                shown = replace(check, name=f"{check.name}, {Path(profile).stem}", expected=expected)
            if sys.stderr.isatty():
                print(f"\r\x1b[2K{shown.name} ...", end="\r", file=sys.stderr, flush=True)
            start = time.perf_counter()
            result = _run_isolated(check, kind, processes, profile)
            results.append((shown, result, time.perf_counter() - start))
    return results


def _run_isolated(check: Check, kind: str, processes: int, profile: str | None = None) -> Result:
    """Run a check in new processes."""
    command = [sys.executable, "-m"]
    if check.all_devices:
        # Ours listens on loopback only.
        command += ["modeling.supervision.torchrun", "--master-addr", "127.0.0.1", "--master-port", "0"]
        command += ["--nproc-per-node", str(processes), "-m"]
    command += ["modeling.check_device", "--device", kind, "--check", check.name]
    command += ["--profile", profile] if profile else []
    # A user's own profiles/ in the working folder must not be imported in place of ours.
    own = {**environment(kind), "PYTHONSAFEPATH": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=own, stdout=pipe, stderr=pipe, text=True)
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        try:
            process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return Result(f"timed out after {TIMEOUT} s", passed=False)
    if process.returncode == 0:
        return Result(**json.loads(output.splitlines()[-1]))
    lines = errors.splitlines()
    reason = next((line for line in lines if "Error" in line), lines[-1] if lines else "")
    return Result(f"failed ({process.returncode}): {reason}", passed=False)


def write_calibration(kind: str, processes: int, settings: Sequence[bool] = (True, False)) -> list[Path]:
    """Measure this machine's devices and write their tables: one per setting, on GPUs.

    Args:
        settings: values of `train.deterministic` to measure, where it chooses kernels.
    """
    links = {}
    if processes > 1:  # before this process uses a device: Neuron's runtime would reserve all of them
        measured = _run_isolated(checks.LINKS, kind, processes)
        if not measured.passed:
            raise RuntimeError(f"collectives over {processes} devices: {measured.measured}")
        links = json.loads(measured.measured)
    device, local = local_device(kind)
    paths = []
    for deterministic in dict.fromkeys(calibration.kernels_of(device, setting) for setting in settings):
        device.choose_kernels(deterministic is not False)
        table = calibrate(device, local, devices.name_of(device), compiled=kind != "cpu")
        table = replace(table, links=links, deterministic=deterministic)
        path = calibration.path_of(table.accelerator, deterministic)
        table.save(path)
        paths.append(path)
    return paths


def default_processes(kind: str) -> int:
    """Number of devices, 2 for a CPU. Raises RuntimeError if the device's software is missing."""
    return 2 if kind == "cpu" else devices.resolve(kind).available()


def environment(kind: str) -> dict[str, str]:
    """This process's environment, and of the variables that launchers set for a run those it lacks."""
    return {**devices.KINDS[kind].local_environment(), **os.environ}
