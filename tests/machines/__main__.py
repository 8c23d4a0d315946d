"""`make test-machines`: run the quickstart in fresh Debian machines, as root.

Prints the results as a table and keeps them in a file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.machines.machines import MACHINES
from tests.machines.quickstart import ALL_TESTS, Row

HEADER = (
    "| machine | Python | circumstances | outcome | `make install` | first run | second | date |\n"
    "|---|---|---|---|---:|---:|---:|---|"
)


def table_line(row: Row, date: str) -> str:
    """A row as a line of a Markdown table."""
    cells = [
        row.machine,
        row.python,
        row.circumstances,
        row.failure or row.passed,
        row.install,
        row.run,
        row.again,
        date,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    names = [machine.name for machine in MACHINES]
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__, allow_abbrev=False)
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=f"{', '.join(names)} (default: all)")
    about = "for Debian, packages, logs and the table; 10 GB (default: build/machines)"
    parser.add_argument("--folder", type=Path, default=Path("build/machines"), help=about)
    parser.add_argument(
        "--short", action="store_true", help="train 20 steps, without make test, to find quickly what fails"
    )
    about = "instead of the quickstart, only make install and all of make test, with Debian's Slurm, PostgreSQL and Chromium"
    parser.add_argument("--all-tests", action="store_true", help=about)
    options = parser.parse_args()
    if unknown := set(options.machines) - {*names}:
        parser.error(f"{', '.join(sorted(unknown))}: not a machine; choose from {', '.join(names)}")
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        parser.error("needs root and debootstrap; as root: apt-get install debootstrap")
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    with (folder / "table.md").open("a") as table:
        print(HEADER, flush=True)
        for name in options.machines or names:
            how = ALL_TESTS if options.all_tests else "short" if options.short else ""
            row = _row(name, folder, how)
            line = table_line(row, f"{datetime.date.today()}{how and f', {how}'}")
            print(line, flush=True)
            print(line, file=table, flush=True)
            failed = failed or bool(row.failure)
    return int(failed)


def _row(name: str, folder: Path, how: str) -> Row:
    """Run one machine in its own mount and process namespaces, then remove its files."""
    module = [sys.executable, "-m", "tests.machines.quickstart", name, str(folder), how]
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", *module]
    shutil.rmtree(folder / name, ignore_errors=True)
    try:
        with (folder / f"{name}.build.log").open("wb") as errors:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors)
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            return Row(name, "", "", f"cannot be built; see {errors.name}")
        return Row(**json.loads(lines[-1]))
    finally:
        shutil.rmtree(folder / name, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
