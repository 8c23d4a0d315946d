"""Compiled graphs as training uses them: where they lie, what is compiled, and what became of each program.

What is compiled of a model are its regions: the block, one graph for layers that are alike, and the loss. Each is two programs,
training (a forward and a backward graph) and evaluation (one graph). The embedding's lookup and the last norm stay eager: a
graph of the lookup's backward would add in no fixed order on several threads, and a run must resume to the bit. The optimizer's
update is torch's fused kernel where there is one, and a program of one graph elsewhere. A loss of the user's own runs eager.

`Ledger` counts, program by program, the graphs that were compiled and those that were found; a graph that had to be compiled
though an artifact was there is said, by name.
"""

from __future__ import annotations

import logging
import math
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from modeling.compilation import compilers
from modeling.compilation.compilers import Compiled, Compiler
from parallel.device import fuses_adamw
from parallel.optimizer.adamw import Update, update
from profiles.schema import Profile, Train

CACHE = "cache.tar"
REGIONS = ("block", "recomputed block", "loss")
OPTIMIZER = "optimizer"
PROGRAMS = (
    *(f"{region}, {mode}" for region in REGIONS for mode in ("training", "evaluation")),
    OPTIMIZER,
)
OPTIONS = {"fullgraph": True, "dynamic": False}
log = logging.getLogger("trainshed")

Backend = Callable[[GraphModule, Sequence[Any]], Compiled]


def compile_regions(model: nn.Module, train: Train, backend: Callable[[str], Backend]) -> None:
    """Have a model's regions compiled when they are first called.

    Args:
        model: a stage, its recomputation set.
        backend: torch.compile's backend for a region of this name, the same object whenever asked.
    """
    for number, layer in enumerate(model.layers.values()):
        some = train.recompute_layers is not None and number < train.recompute_layers
        layer.compile(backend=backend("recomputed block" if some else "block"), **OPTIONS)
    if model.last:
        model.loss = torch.compile(model.loss, backend=backend("loss"), **OPTIONS)


def compiled_update(kind: str, backend: Callable[[str], Backend]) -> Update | None:
    """AdamW's update, compiled when it is first called; None where torch has a kernel for the kind of device."""
    return None if fuses_adamw(kind) else torch.compile(update, backend=backend(OPTIMIZER), **OPTIONS)


class Ledger:
    """Compiles regions with a compiler and keeps count.

    Args:
        compiler: opened.
        ahead: whether its folder should hold every graph, so that one it has to compile is worth a warning.
    """

    def __init__(self, compiler: Compiler, *, ahead: bool) -> None:
        self.compiler, self.ahead = compiler, ahead
        self.programs: dict[str, tuple[int, int]] = {}  # graphs compiled, graphs found
        self._backends: dict[str, Backend] = {}
        self._told = 0

    def backend(self, region: str) -> Backend:
        return self._backends.setdefault(region, lambda graph, inputs: self._compile(region, graph, inputs))

    def _compile(self, region: str, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        name = program(region)
        before = self.compiler.counts()
        compiled = self.compiler.compile(graph, inputs)
        was = self.programs.get(name, (0, 0))
        cold, warm = (
            total + now - then for total, now, then in zip(was, self.compiler.counts(), before, strict=True)
        )
        self.programs[name] = cold, warm
        return compiled

    def vector(self) -> Tensor:
        """This rank's counts, (3 · programs) float64, to be summed over the ranks and handed to `totals`."""
        rows = [(*self.programs[name], 1) if name in self.programs else (0, 0, 0) for name in PROGRAMS]
        return torch.tensor(rows, dtype=torch.float64).flatten()

    def totals(self, sums: Sequence[float]) -> dict[str, int]:
        """Of all ranks: graphs compiled, and distinct graphs found. Ranks of one program have the same graphs, so the mean
        over those that have it is its number.
        """
        rows = [sums[3 * place : 3 * place + 3] for place in range(len(PROGRAMS))]
        cold = sum(math.ceil(row[0] - 1e-6) for row in rows)
        if self.ahead and cold > self._told:
            self._told = cold
            names = "; ".join(name for name, row in zip(PROGRAMS, rows, strict=True) if row[0])
            log.warning(f"warning: not among the graphs compiled ahead, compiled in training: {names}")
        warm = sum(round(found / ranks) for _, found, ranks in rows if ranks)
        return {"cold_compiles": cold, "warm_graphs": warm}


class Eager:
    """The ledger of a program that compiles nothing."""

    def vector(self) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def totals(self, sums: Sequence[float]) -> dict[str, int]:
        return {"cold_compiles": 0, "warm_graphs": 0}


def opened(profile: Profile, artifact: Path | None, run: Path) -> tuple[Path | None, bool]:
    """Where a program of the run finds and keeps its compiled graphs, None where it runs eager; and whether they are all there.

    Args:
        artifact: folder of the graphs artifact; without it graphs are compiled as training meets them.
    """
    if not profile.compile.enabled:
        return None, False
    made = compilers.compiler(profile)
    folder = unpack(artifact, run) if artifact else None
    if reason := made.missing():
        log.info(f"{reason} on this machine: training runs eager")
        return None, False
    return (folder, True) if folder else (run / "graphs" / "own", False)


def program(region: str) -> str:
    """A region's program as autograd is set now."""
    if region == OPTIMIZER:
        return region
    return f"{region}, {'training' if torch.is_grad_enabled() else 'evaluation'}"


def unpack(artifact: Path, run: Path) -> Path | None:
    """Unpack a graphs artifact into the run's folder, once a node, and return the folder; None where it holds none.

    Every process may call it: the first to finish wins, the folder appears whole.
    """
    packed = artifact / CACHE
    if not packed.exists():
        return None
    folder = run / "graphs" / artifact.name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpacking-"))
        with tarfile.open(packed) as tar:
            tar.extractall(temporary, filter="data")
        try:
            temporary.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(temporary)
    return folder
