"""A sitting: scripts of this folder run in turns, each as processes of its own, so that whatever else the machine does meets
all of them alike. A script's last line on standard output is its result, one JSON object.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

LIMIT = 1800  # seconds that a script may take
GRACE = 20  # seconds that a launcher is given to end its processes

Turn = Callable[[str], AbstractContextManager[None]]
"""`with turn(side)` stands around a side's turn, for whoever shows how far things are."""


class ScriptError(RuntimeError):
    """A script ended badly; the message is the end of what it said."""


@dataclass(frozen=True)
class Script:
    """A module of this folder, its arguments, and how many processes run it."""

    module: str
    arguments: tuple[str, ...] = ()
    processes: int = 1

    def command(self, arguments: Sequence[str]) -> list[str]:
        launcher = ["-m"]
        if self.processes > 1:
            launcher = f"-m torch.distributed.run --standalone --nproc-per-node {self.processes} -m".split()
        return [sys.executable, *launcher, f"benchmarks.{self.module}", *self.arguments, *arguments]


@dataclass
class Measured:
    """What one run of a script found: seconds of each timed step, losses of all, the fullest process's memory."""

    seconds: list[float]
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def step(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)


def run(script: Script, arguments: Sequence[str] = ()) -> Measured:
    """Run a script to its end.

    Raises:
        ScriptError: it failed or took longer than LIMIT.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(script.command(arguments), stdout=subprocess.PIPE, stderr=said, text=True)
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            raise ScriptError(f"{script.module} was not done after {LIMIT} s") from None
        finally:
            end(process)
        if process.returncode:
            said.seek(0)
            last = "\n".join(said.read().strip().splitlines()[-30:])
            raise ScriptError(f"{script.module} ended with {process.returncode}:\n{last}")
    return Measured(**json.loads(output.splitlines()[-1]))


def end(process: subprocess.Popen[str]) -> None:
    """Have a process that is still running end, and its children with it, which a kill would leave behind."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def alternate(
    sides: Mapping[str, Script], rounds: int, arguments: Sequence[str], turn: Turn
) -> dict[str, list[Measured]]:
    """Run all sides once a round, one after another. Returns each side's rounds.

    Raises:
        ScriptError: a side failed.
    """
    measured: dict[str, list[Measured]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, script in sides.items():
            with turn(side):
                measured[side].append(run(script, arguments))
    return measured
