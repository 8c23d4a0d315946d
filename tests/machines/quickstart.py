"""Runs the quickstart in one machine and prints a row of the table.

Run as `python -m tests.machines.quickstart NAME FOLDER HOW`, with an empty HOW, `short` or `all tests`.
"""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.machines.debian import Debian
from tests.machines.machines import MACHINES, Machine

# A cheap part: what reads Python's own syntax, library and packages, and what a new version of them changes first.
TESTS = (
    "PYTEST=.venv/bin/python -m pytest -p no:cacheprovider -m 'not slow' --maxfail=20 --durations=5 tests/test_makefile.py "
    "tests/profiles tests/tasks/sources tests/tasks/tokenization tests/tasks/store tests/modeling/data tests/flows/cli"
)
ALL_TESTS = "all tests"
SERVERS = ("slurm-wlm", "munge", "postgresql", "chromium")  # of the Makefile's `make test-system`
COLORS = re.compile(r"\x1b\[[\d;]*m")
COUNTS = re.compile(r"(\d+ (?:passed|failed).*?) in [\d.]+s")  # pytest's last line
COMMANDS = {  # the short one trains 20 steps, to find quickly what fails
    False: ("make", "run"),
    True: (".venv/bin/trainshed", "run", "tiny", "--set", "train.steps=20", "--set", "train.warmup_steps=2"),
}
UP = "http://127.0.0.1:4200"
SIGN_IN = re.compile(rf"Prefect's UI: {UP}\S*")
UP_SECONDS, STOP_SECONDS = 300, 120


@dataclass(frozen=True)
class Outcome:
    """How a command ended, with its output, and the seconds and CPU seconds that it took."""

    code: int
    output: str
    seconds: float
    cpu: float


@dataclass(frozen=True)
class Row:
    """A row of the table: the first cause of failure, if any, and each command's seconds (CPU seconds)."""

    machine: str
    python: str
    circumstances: str
    failure: str
    install: str = ""
    run: str = ""
    again: str = ""
    passed: str = "passes"


class Quickstart:
    """The commands of a new user in one machine."""

    def __init__(self, debian: Debian, log: Path) -> None:
        self._debian, self._log = debian, log

    def run(self, *command: str) -> Outcome:
        """Run a command as the machine's user until it ends; its output is appended to the log."""
        started, before = time.monotonic(), _cpu()
        output: list[bytes] = []
        child = self._start(command, output)
        child.wait()
        self._reader.join(timeout=5)  # a daemon may keep the pipe open
        with suppress(ChildProcessError):  # daemons of the command, such as Prefect's server
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        text = b"".join(output).decode(errors="replace")
        return Outcome(child.returncode, text, time.monotonic() - started, _cpu() - before)

    def up(self) -> str:
        """Start `make up`, and interrupt it once it is ready; returns what is wrong, or nothing."""
        output: list[bytes] = []
        child = self._start(("make", "up"), output)
        deadline = time.monotonic() + UP_SECONDS
        while child.poll() is None and time.monotonic() < deadline and b"Ctrl-C" not in b"".join(output):
            time.sleep(0.5)
        answers = _answers()
        os.killpg(child.pid, signal.SIGINT)
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return f"does not stop in {STOP_SECONDS} s"
        self._reader.join(timeout=5)
        if not SIGN_IN.search(b"".join(output).decode(errors="replace")):
            return "prints no address to sign in"
        if not answers:
            return "does not answer"
        return "still answers after Ctrl-C" if _answers() else ""

    def _start(self, command: tuple[str, ...], output: list[bytes]) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own, with its output read by a thread."""
        reader, writer = pty.openpty() if self._debian.machine.terminal else os.pipe()
        child = subprocess.Popen(
            self._debian.command(*command),
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
            preexec_fn=self._debian.restrict,
        )
        os.close(writer)
        with self._log.open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
        self._reader = threading.Thread(target=self._read, args=(reader, output), daemon=True)
        self._reader.start()
        return child

    def _read(self, reader: int, output: list[bytes]) -> None:
        with suppress(OSError), self._log.open("ab", buffering=0) as log:  # a terminal ends with an error
            while data := os.read(reader, 65536):
                output.append(data)
                log.write(data)


def quickstart(machine: Machine, folder: Path, how: str) -> Row:
    """Build a machine, run the quickstart or only all tests in it, and return its row."""
    short = how == "short"
    if how == ALL_TESTS:
        machine = replace(machine, packages=(*machine.packages, *SERVERS))
    log = folder / f"{machine.name}.log"
    log.unlink(missing_ok=True)
    debian = Debian(machine, folder)
    user = Quickstart(debian, log)
    python = user.run(machine.python, "--version").output.split()[-1]
    row = {"machine": machine.name, "python": python, "circumstances": machine.circumstances}
    install = user.run("make", "install")
    row["install"] = _times(install)
    if not machine.starts:
        lines = [line for line in install.output.splitlines() if line and not line.startswith("make: ***")]
        fine = install.code and len(lines) == 1 and re.search(machine.prints, lines[0])
        return Row(**row, failure="" if fine else "make install: does not end with one line")
    if install.code:
        return Row(**row, failure="make install: fails")
    if how == ALL_TESTS:
        if user.run("make", ".venv/installed-for-tests").code:
            return Row(**row, failure="make .venv/installed-for-tests: fails")
        if not machine.network:
            debian.disconnect()
        tests = user.run("make", "test")
        found = counts(tests.output)
        row["passed"] = f"passes: {found}, {_times(tests)}"
        failed = tests.code or not found
        return Row(**row, failure=f"make test: {found or 'no tests'}, {_times(tests)}" if failed else "")
    if machine.tests and not short and user.run("make", "test", TESTS).code:
        return Row(**row, failure="make test: fails")
    if machine.read_only:
        debian.make_read_only()
    if not machine.network:
        debian.disconnect()
    first = user.run(*COMMANDS[short])
    row["run"] = _times(first)
    if first.code or not re.search(machine.prints, first.output) or "validation loss" not in first.output:
        return Row(**row, failure="make run: fails")
    second = user.run(*COMMANDS[short])
    row["again"] = _times(second)
    if second.code:
        return Row(**row, failure="second make run: fails")
    wrong = user.up()
    return Row(**row, failure=f"make up: {wrong}" if wrong else "")


def counts(output: str) -> str | None:
    """How many tests passed, failed and were skipped, from pytest's last line; None without one."""
    found = COUNTS.search(COLORS.sub("", output))
    return found[1] if found else None


def _answers() -> bool:
    """Whether a Prefect server answers where `make up` starts one."""
    try:
        with urllib.request.urlopen(f"{UP}/api/health", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def _times(outcome: Outcome) -> str:
    return f"{outcome.seconds:.0f} ({outcome.cpu:.0f})"


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    name, folder, how = sys.argv[1:]
    machine = next(each for each in MACHINES if each.name == name)
    print(json.dumps(asdict(quickstart(machine, Path(folder), how))))
