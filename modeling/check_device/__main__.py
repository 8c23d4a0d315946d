"""Check a machine's devices step by step: `python -m modeling.check_device [--device KIND] ...`

With `--calibrate` it measures speeds instead and writes the planner's tables (planning/calibration.py).

It checks this machine's accelerator; only `--device cpu` checks the CPU.

Exit codes: 0 all checks passed, 1 at least one failed, 2 no such device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

import torch

from modeling.check_device import checks, isolation
from modeling.check_device.checks import Check, Result
from parallel import device as devices
from profiles import resolve
from profiles.arguments import Parser
from profiles.errors import ProfileError
from profiles.files import exit_codes


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="modeling.check_device", description=__doc__.splitlines()[0])
    help_text = "kind of device to check (default: this machine's accelerator)"
    parser.add_argument("--device", choices=sorted(devices.KINDS), help=help_text)
    parser.add_argument(
        "--processes", type=int, help="processes to start (default: one per device; 2 on a CPU)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    help_text = "profiles, by name or file, on whose shapes the kernels are checked"
    parser.add_argument("--profile", nargs="+", default=[], metavar="NAME", help=help_text)
    help_text = "measure speeds and write the planner's tables instead of checking"
    parser.add_argument("--calibrate", action="store_true", help=help_text)
    by_name = {check.name: check for check in (*checks.CHECKS, checks.LINKS)}
    parser.add_argument("--check", choices=by_name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    kind = options.device or devices.detect()
    if kind == "cpu" and not options.device:
        reasons = "; ".join(f"{kind}: {_missing(kind)}" for kind in devices.KINDS if kind != "cpu")
        parser.error(f"this machine has no accelerator; {reasons}; to check the CPU: --device cpu")
    if options.check:
        check = by_name[options.check]
        result = check.run(kind, *(map(resolve.load, options.profile) if check.takes_profile else ()))
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(asdict(result)), flush=True)
        exit_codes.leave(0)
    try:
        for profile in options.profile:
            resolve.load(profile)
    except ProfileError as error:
        parser.error(f"argument --profile: {error}")
    try:
        processes = options.processes or isolation.default_processes(kind)
    except RuntimeError as error:
        parser.error(str(error))
    if processes < 1:
        parser.error(
            f"argument --device: this machine has no {kind} device: {_missing(kind)}; to check the CPU: --device cpu"
        )
    if options.calibrate:
        os.environ.update(isolation.environment(kind))  # before this process uses the device
        written = " and ".join(map(str, isolation.write_calibration(kind, processes)))
        print(f"wrote {written}; plans started in this folder use it")
        return 0
    results = isolation.run_checks(kind, processes, options.profile)
    if options.json:
        rows = [{"check": c.name, "expected": c.expected, **asdict(result)} for c, result, _ in results]
        document = {"device": kind, "processes": processes, "torch": torch.__version__, "checks": rows}
        print(json.dumps(document, indent=1))
    else:
        _print_table(kind, processes, results)
    return int(not all(result.passed for _, result, _ in results))


def _missing(kind: str) -> str:
    """Why torch finds no device of this type on this machine."""
    try:
        if kind == "cuda":
            torch.cuda.init()
        else:
            devices.torch_neuronx_version()
    except (AssertionError, RuntimeError) as error:  # torch's, if it is built without CUDA
        return str(error).partition("\n")[0]
    return "no device is visible"


def _print_table(kind: str, processes: int, results: list[tuple[Check, Result, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{kind}, {processes} processes, torch {torch.__version__}\n")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "check", "result", "expected"):
        table.add_column(column)
    table.add_column("time", justify="right")
    for check, result, seconds in results:
        mark = "[green]✓[/]" if result.passed else "[red]✗[/]"
        table.add_row(mark, check.name, result.measured, check.expected, f"{seconds:.0f} s")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
