"""Run rows within a time: each is printed and appended to a file when it exists.

Rows that an earlier lease of the same card has appended are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_lease.start import ONE_DEVICE, is_older
from benchmarks.harness import results
from benchmarks.harness.processes import GRACE, TORCHRUN, Measurement, Script, measure_script

REHEARSAL = "a rehearsal on the CPU"  # in place of a card
START = "gpu_lease.start"
SLOWER = 10  # times as long as on a GPU machine that a rehearsal may take, on a busy CPU
# Blocks of kernels of several ranks must be resident together; NVLS needs several devices.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
OLDER_ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # without the key that torch 2.13 adds


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

    def timeout(self, limit: float, ranks: int = 1) -> float:
        """Seconds that a module which should take at most `limit` may take, until the deadline at most."""
        left = self.left - (GRACE if ranks > 1 else 0)  # within which torchrun ends ranks that hang
        return min(limit * (SLOWER if self.rehearse else 1), left)

    def script(self, module: str, *arguments: object, ranks: int = 1) -> Script:
        """A module with its arguments.

        Args:
            ranks: processes, which share the one device.
        """
        given, variables = [module, *map(str, arguments)], dict[str, str]()
        if is_older() and not self.rehearse:
            variables |= OLDER_ALLOCATOR
        if ranks > 1:
            given = [*TORCHRUN, str(ranks), "-m", f"benchmarks.{START}", ONE_DEVICE, *given]
            variables |= SHARED | ({"LD_PRELOAD": str(self.nccl)} if self.nccl else {})
        return Script(START, tuple(given), device=self.device, variables=variables)

    def run(self, module: str, *arguments: object, limit: float, ranks: int = 1) -> Measurement:
        """What a module measures. Raises ScriptError if it fails or takes longer than `limit` seconds."""
        script = self.script(module, *arguments, ranks=ranks)
        return measure_script(script, timeout=self.timeout(limit, ranks))


@dataclass(frozen=True)
class Row:
    """A row: its figures, the seconds without which it is not started, whether it needs a GPU."""

    name: str
    needs: float
    measure: Callable[[Machine], dict[str, Any]]
    needs_gpu: bool = False


def run(rows: Sequence[Row], machine: Machine, out: Path) -> int:
    """Run the rows that earlier leases of this card have not; returns 0, or 1 if one failed."""
    kept, facts, code = results.Results(out), describe(machine), 0
    earlier = (each for each in results.read(out) if each.get("card") == facts["card"])
    done = {each["row"] for each in earlier if "failed" not in each}
    for row in rows:
        if row.name in done:
            print(f"{row.name}: done in an earlier lease", flush=True)
            continue
        if machine.rehearse and row.needs_gpu:
            print(f"{row.name}: not rehearsed, needs a GPU", flush=True)
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
