"""Run rows within a time: each is printed and appended to a file when it exists.

Rows that an earlier lease of the same card has appended are skipped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_lease.start import ONE_DEVICE, is_older
from benchmarks.harness import results

REHEARSAL = "a rehearsal on the CPU"  # in place of a card
LOG_LINES = 20  # of a failed process, in its row
SLOWER = 10  # times as long as on a GPU machine that a rehearsal may take, on a busy CPU
# Blocks of kernels of several ranks must be resident together; NVLS needs several devices.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
OLDER_ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # without the key that torch 2.13 adds


class Failed(RuntimeError):
    """A measured module failed or took too long; the message has the end of its output."""


@dataclass
class Machine:
    """Where and how measured modules run.

    Attributes:
        rehearse: on the CPU, with small sizes.
        nccl: NCCL library that allows several ranks on one GPU, if torch's own does not.
        deadline: on the clock of `time.monotonic`.
    """

    rehearse: bool
    deadline: float
    graphs: Path
    nccl: Path | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def run(
        self,
        module: str,
        *arguments: object,
        limit: float,
        ranks: int = 1,
        variables: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The JSON object that a module prints last.

        Args:
            limit: seconds; never beyond the deadline.
            ranks: processes, which share the one device.

        Raises:
            Failed: it failed or took longer.
        """
        from parallel import device as devices

        common = {**devices.KINDS[self.device].local_environment(), **os.environ, "PYTHONUNBUFFERED": "1"}
        common |= OLDER_ALLOCATOR if is_older() and not self.rehearse else {}
        common |= variables or {}
        command = [sys.executable, "-m", "benchmarks.gpu_lease.start"]
        limit = min(limit * (SLOWER if self.rehearse else 1), self.left)
        if ranks > 1:
            command.append(ONE_DEVICE)
            common |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            common |= SHARED | ({"LD_PRELOAD": str(self.nccl)} if self.nccl else {})
        command += [module, *map(str, arguments)]
        children: list[subprocess.Popen[str]] = []
        with tempfile.TemporaryDirectory(prefix="lease-") as folder:
            logs = [Path(folder, f"{rank}.txt") for rank in range(ranks)]
            try:
                for rank, log in enumerate(logs):
                    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                    with log.open("w") as output:
                        given: Any = {"env": common | own, "stdout": output, "stderr": subprocess.STDOUT}
                        children.append(subprocess.Popen(command, text=True, **given))
                ended = _wait(children, limit)
            finally:
                for child in children:
                    child.kill()  # unless it has ended
                codes = [child.wait() for child in children]
            texts = [log.read_text(errors="replace") for log in logs]
        failed = [rank for rank, code in enumerate(codes) if code]
        by_themselves = [rank for rank in failed if codes[rank] != -signal.SIGKILL]
        first = (by_themselves or failed or [0])[0]
        last = "\n".join(texts[first].strip().splitlines()[-LOG_LINES:])
        if not ended:
            raise Failed(f"{module}: took longer than {limit:.0f} s\n{last}")
        if failed:
            raise Failed(f"{module}, rank {first}: exit code {codes[first]}\n{last}")
        lines = [line for line in texts[0].splitlines() if line.startswith("{")]
        if not lines:
            raise Failed(f"{module}: printed no result")
        result: dict[str, Any] = json.loads(lines[-1])
        return result


def _wait(children: Sequence[subprocess.Popen[str]], seconds: float) -> bool:
    """Wait until all children have ended or one has failed, at most so long; returns whether it is so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [child.poll() for child in children]
        if None not in codes or any(codes):
            return True
        time.sleep(0.05)
    return False


@dataclass(frozen=True)
class Row:
    """A row: its figures, and the seconds below which it is not started."""

    name: str
    needs: float
    measure: Callable[[Machine], dict[str, Any]]


def run(rows: Sequence[Row], machine: Machine, out: Path) -> int:
    """Run the rows that earlier leases of this card have not; returns 0, or 1 if one failed."""
    kept, facts, code = results.Results(out), describe(machine), 0
    earlier = (each for each in results.read(out) if each.get("card") == facts["card"])
    done = {each["row"] for each in earlier if "failed" not in each}
    for row in rows:
        if row.name in done:
            print(f"{row.name}: done in an earlier lease", flush=True)
            continue
        if machine.left < row.needs:
            print(f"{row.name}: not started, needs {row.needs:.0f} s of {machine.left:.0f}", flush=True)
            continue
        begun = time.monotonic()
        try:
            figures = row.measure(machine)
        except Exception as error:  # one row must not end the lease
            figures, code = {"failed": f"{type(error).__name__}: {error}"}, 1
        took = round(time.monotonic() - begun, 1)
        shown = figures.get("failed") or ", ".join(f"{name} {value}" for name, value in figures.items())
        kept.add(row.name, f"{row.name}: {shown}", took=took, **facts, **figures)
    return code


def describe(machine: Machine) -> dict[str, Any]:
    """Card and versions, which every result has."""
    facts: dict[str, Any] = {"torch": torch.__version__}
    if machine.rehearse:
        return {**facts, "card": REHEARSAL}
    properties = torch.cuda.get_device_properties()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    facts |= {"card": properties.name, "memory_mib": properties.total_memory >> 20}
    return {**facts, "cuda": torch.version.cuda, "nccl": nccl}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
