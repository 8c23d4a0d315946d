"""Compiled graphs of a training run: what is compiled, its cache, and misses and hits per program.

Two regions of a model are compiled: the transformer block, one graph for all identical layers, and a chunk of the
loss, one graph for all chunks. Each has two programs: training (a block's forward and backward graphs, a loss graph that
also computes gradients) and evaluation (one graph). For a device that compiles each operator at its first use, more is
compiled: the embedding lookups, the tables of rotary positions, the final norm, a user-defined loss or metric with its
logits, and the arithmetic in between and of the optimizer, small functions with one graph for each combination of shapes.
On other devices these stay eager: the compiled backward of the lookup would accumulate in no fixed order on several
threads, and a resumed run must be bit-identical.

`CompileStatistics` counts cache misses and hits per program. It compares each program with the manifest of those that were
compiled ahead of time, and reports any other.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import shutil
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from modeling.compilation import compilers, manifest
from modeling.compilation.compilers import Compiled, Compiler
from modeling.compilation.manifest import Manifest
from parallel import device as devices
from parallel.attention.maxima import ScoreMaxima, larger
from parallel.experts.layer import MixtureOfExperts
from parallel.layers.deferred import DeferrableLinear, weight_gradient
from parallel.layers.tied import TiedWeight, add
from parallel.loss import LossPrograms, chunk_loss, chunk_token_losses, multiply_gradients
from parallel.optimizer.arithmetic import Compile
from profiles.errors import ProfileError, counted
from profiles.files import run_files, state_files
from profiles.files.file_locks import locked
from profiles.schema import Profile

if TYPE_CHECKING:
    from modeling.models.language_model import LanguageModel


CACHE = "cache.tar"
STEP = "step"  # region of the functions between the others, and of the optimizer's
# regions of a model's modules before and after its layers, by name
ENDS = {"embedding": "embedding", "positions": "embedding", "norm": "norm"}
# regions of a model's methods, by name
METHODS = {
    "rotations": "rotations",
    "embed": "embedding",
    "scale_embedding": "embedding",
    "scale_output": "norm",
    "offsets": STEP,
    "token_keys": STEP,
}
# regions of blocks, by mode of activation checkpointing
BLOCKS = {"none": "block", "selective": "selective block", "full": "recomputed block"}
REGIONS = ("embedding", "rotations", *BLOCKS.values(), "norm", "loss")
PROGRAMS = (*(f"{region}, {mode}" for region in REGIONS for mode in ("training", "evaluation")), STEP)
COUNTS = 4  # of a program: misses, hits, misses of programs of no manifest, and 1
# `recompile_limit`: maximum number of a function's graphs, one for each combination of shapes. torch's configuration would apply
# only to the thread that sets it, and a device's backward pass runs in another thread. Its argument has no type in torch.
OPTIONS: dict[str, Any] = {"fullgraph": True, "dynamic": False, "recompile_limit": 64}
DIFFERS = "differs from the programs that were compiled ahead of time"
log = logging.getLogger(__name__)

Backend = Callable[[GraphModule, Sequence[Any]], Compiled]


def program_name(region: str) -> str:
    """The program that a region is compiled for: training or evaluation, by autograd's current state."""
    if region == STEP:
        return region
    return f"{region}, {'training' if torch.is_grad_enabled() else 'evaluation'}"


def compile_regions(model: LanguageModel, kind: str, backend: Callable[[str], Backend]) -> None:
    """Wrap a stage's regions so that they are compiled at their first call.

    Args:
        model: a stage with activation checkpointing applied.
        kind: device type.
        backend: returns the torch.compile backend for a region, always the same object for the same region.
    """
    for layer in model.layers.values():
        region = BLOCKS[str(layer.checkpointing)]
        # Not `layer.compile`, which would trace the layer's hooks too.
        layer.forward = torch.compile(layer.forward, backend=backend(region), **OPTIONS)
    if devices.KINDS[kind].compiles_operators:
        for name, module in model.named_children():
            if name in ENDS:
                module.forward = torch.compile(module.forward, backend=backend(ENDS[name]), **OPTIONS)
        compiled = torch.compile(weight_gradient, backend=backend(STEP), **OPTIONS)
        for module in model.modules():
            if isinstance(module, DeferrableLinear):
                module.weight_gradient = compiled
            if isinstance(module, MixtureOfExperts):
                module.add = torch.compile(add, backend=backend(STEP), **OPTIONS)
            if isinstance(module, ScoreMaxima):
                module.larger = torch.compile(larger, backend=backend(STEP), **OPTIONS)
        for name, region in METHODS.items():
            if hasattr(model, name):
                setattr(model, name, torch.compile(getattr(model, name), backend=backend(region), **OPTIONS))
    if model.last:
        compile_loss = partial(torch.compile, backend=backend("loss"), **OPTIONS)
        programs = LossPrograms(*map(compile_loss, (chunk_loss, chunk_token_losses, multiply_gradients)))
        if compile := function_compiler(kind, backend):
            programs = LossPrograms(*programs[:3], *(compile(program) for program in programs[3:]))
            if model.first and model.model.tie_word_embeddings and model.embedding.weight.requires_grad:
                model.tied = TiedWeight(model.embedding.weight, compile(add))
        model.loss_programs = programs


def function_compiler(kind: str, backend: Callable[[str], Backend]) -> Compile | None:
    """Function compiler, one graph per combination of shapes; None on devices with a kernel per operator."""
    if not devices.KINDS[kind].compiles_operators:
        return None
    return partial(torch.compile, backend=backend(STEP), **OPTIONS)


class RegionBackends(ABC):
    """The torch.compile backend of each region, which calls `_compile` with a captured graph."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}

    def backend(self, region: str) -> Backend:
        """The torch.compile backend for a region; always the same object."""
        return self._backends.setdefault(region, lambda graph, inputs: self._compile(region, graph, inputs))

    @abstractmethod
    def _compile(self, region: str, graph: GraphModule, inputs: Sequence[Any]) -> Compiled: ...


class CompileStatistics(RegionBackends):
    """Compiles regions, and counts each program's cache misses and hits.

    Args:
        compiler: compiler whose cache folder is set.
        ahead: manifest of the programs that the cache should hold, so that any other and each miss is reported; None: none.
    """

    def __init__(self, compiler: Compiler, *, ahead: Manifest | None = None) -> None:
        super().__init__()
        self.compiler, self.ahead = compiler, ahead
        self.programs: dict[str, tuple[int, int, int]] = {}  # misses, hits, misses of no manifest
        self._differences: dict[str, str] = {}  # of this rank's programs of no manifest, by name
        self._reported: dict[str, tuple[int, int]] = {}  # misses of the manifest and of none, by name
        self._reasons: list[str] = []

    def _compile(self, region: str, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        name, ahead = program_name(region), self.ahead
        known = ahead is not None and manifest.region_digest(name, graph, inputs) in ahead.regions
        unknown = not known and self._differs(name, graph, inputs)
        captured = deepcopy(graph.graph) if known else None  # compilers change it
        before = self.compiler.cache_counts()
        compiled = self.compiler.compile(graph, inputs)
        misses, hits = (now - then for now, then in zip(self.compiler.cache_counts(), before, strict=True))
        if captured is not None and misses:
            # Programs depend on more than regions, such as decompositions.
            unknown = self._differs(name, GraphModule(graph, captured), inputs)
        if unknown:  # also if an earlier attempt has compiled it
            misses, hits = max(1, misses + hits), 0
        counts = self.programs.get(name, (0, 0, 0))
        self.programs[name] = counts[0] + misses, counts[1] + hits, counts[2] + unknown * misses
        return compiled

    def _differs(self, name: str, graph: GraphModule, inputs: Sequence[Any]) -> bool:
        """Whether there is a manifest that lacks this program, which is traced; notes where it differs."""
        if self.ahead is None:
            return False
        _, graphs = manifest.capture(graph, inputs)
        difference = self.ahead.difference(name, manifest.describe(graphs))
        if difference is not None:
            if not self._differences:  # one of each rank is enough
                log.warning(f"{name}: {DIFFERS}: {difference}")
            self._differences.setdefault(name, difference)
        return difference is not None

    def local_counts(self) -> Tensor:
        """This rank's counts, (COUNTS · programs) float64; `metrics` takes their sums over all ranks."""
        rows = [(*self.programs[name], 1) if name in self.programs else (0,) * COUNTS for name in PROGRAMS]
        return torch.tensor(rows, dtype=torch.float64).flatten()

    def metrics(self, sums: Sequence[float]) -> dict[str, int]:
        """Metrics over all ranks: the misses and hits of the graph cache, in distinct graphs.

        Ranks that run a program have the same graphs, so a program counts the mean over those ranks; that of misses is rounded
        up, so that a miss on a single rank counts. A graph of a program that the manifest lacks is a miss, wherever it was found.
        """
        misses = hits = 0
        for i, name in enumerate(PROGRAMS):
            missed, found, unknown, ranks = sums[COUNTS * i : COUNTS * (i + 1)]
            if ranks:
                mean = math.ceil(missed / ranks - 1e-6)
                misses, hits = misses + mean, hits + round(found / ranks)
                # Sums may be of all ranks, or divided by the tensor degree.
                self._report(name, *(math.ceil(n / ranks - 1e-6) for n in (missed - unknown, unknown)))
        return {"graph_cache_misses": misses, "graph_cache_hits": hits}

    def _report(self, name: str, misses: int, unknown: int) -> None:
        """Note what is new in a program's counts, means over its ranks rounded up.

        Args:
            misses: of programs of the manifest.
            unknown: of others.
        """
        before = self._reported.get(name, (0, 0))
        self._reported[name] = misses, unknown
        if self.ahead is None:
            return
        if unknown > before[1]:
            found = self._differences.get(name, "logged by the ranks that compiled it")
            self._reasons.append(f"{name}: {DIFFERS}: {found}")
        if misses > before[0]:
            lacking = counted(misses - before[0], "graph")
            self._reasons.append(f"{name}: the cache lacks {lacking} that the graphs step compiled")
            log.warning(self._reasons[-1])

    def take_reasons(self) -> list[str]:
        """What `metrics` has found to be compiled in training despite a manifest, a line each; each once."""
        taken, self._reasons = self._reasons, []
        return taken


class EagerStatistics:
    """Compile statistics of an eager process."""

    def local_counts(self) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def metrics(self, sums: Sequence[float]) -> dict[str, int]:
        return {"graph_cache_misses": 0, "graph_cache_hits": 0}

    def take_reasons(self) -> list[str]:
        return []


def prepare_cache(profile: Profile, artifact: Path | None, run: Path) -> tuple[Path | None, Manifest | None]:
    """A run's folder of compiled graphs (None: run eager), and the manifest of those that it has already.

    Args:
        artifact: folder of the graphs artifact; None compiles during training.
        run: the run folder.

    Raises:
        ProfileError: a node of accelerators cannot compile, and would train much slower than planned.
        RuntimeError: the node has no working device.
    """
    if not profile.compile.possible:
        return None, None
    ahead = Manifest.read(artifact) if artifact else None
    if ahead and ahead.torch != (version := manifest.torch_version()):
        log.warning(
            f"{artifact}: compiled with torch {ahead.torch}, {platform.node()} has {version}: not used"
        )
        artifact = ahead = None
    folder = unpack(artifact, run) if artifact else None
    compiler = compilers.make_compiler(profile)
    if reason := compiler.missing_software() or compiler.fault(run / run_files.GRAPHS):
        if profile.cluster.device != "cpu":
            hint = f"{reason} on {platform.node()}; install what is missing"
            raise ProfileError("compile.enabled", True, hint, [False])
        log.warning(f"{reason} on this machine: training runs in eager mode")
        return None, None
    if reason := compiler.missing_device():  # a retry may find it ready, or another node
        raise RuntimeError(f"{reason} on {platform.node()}; check its devices and their driver")
    if folder is None:
        # Not shared by versions of torch: inductor's keys of C++ libraries have the code, but not the headers it includes.
        return run / run_files.GRAPHS / f"own-{torch.__version__}", None
    return folder, ahead


def unpack(artifact: Path, run: Path) -> Path | None:
    """Unpack a graphs artifact into the run folder, once per node; None if the artifact has no graphs.

    Safe to call from every process: one unpacks while the others wait, or the next one if it dies; on a file system without locks
    all unpack. The folder appears atomically, because nodes that share it may not share its lock.
    """
    packed = artifact / CACHE
    if not state_files.exists(packed):
        return None
    folder = run / run_files.GRAPHS / artifact.name
    state_files.make_folder(folder.parent)
    with locked(folder.with_name(f".{artifact.name}.lock"), required=False) as held:
        if state_files.exists(folder):
            return folder
        process = platform.node() if held else f"{platform.node()}-{os.getpid()}"
        partial = folder.with_name(f".{artifact.name}-{process}")
        state_files.remove(partial)  # of a process that died
        with tarfile.open(packed) as tar:
            tar.extractall(partial, filter="data")
        try:
            partial.rename(folder)
        except OSError:
            if not state_files.exists(folder):  # otherwise another process was first
                raise
            shutil.rmtree(partial)
    return folder
