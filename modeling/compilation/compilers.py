"""The compilers behind one seam: what each needs, where it keeps what it compiled, and how many graphs it compiled or found.

    inductor   CPU and CUDA; a cache folder of graphs, generated code and, on a CPU, shared libraries. The folder is what is
               kept: on a CPU `torch.compiler.save_cache_artifacts` carries no compiled code
    neuron     TorchNeuron's backend of torch.compile: FX, StableHLO, neuronx-cc, and a NEFF for each graph in its cache folder.
               Ahead of time it compiles without a device (`TORCH_NEURONX_COMPILE_ONLY`). Never run here on a Neuron machine

A compiler is handed a graph as Dynamo captured it and compiles its forward and its backward at once, so that whatever it does
is done when the call returns.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from parallel import device as devices
from profiles.schema import Profile

Compiled = Callable[..., Any]


class Compiler(ABC):
    """One compiler, for one kind of device."""

    def __init__(self, device: str, flags: str | None = None) -> None:
        self.device, self.flags = device, flags

    @abstractmethod
    def missing(self) -> str | None:
        """What it lacks on this machine, in words; None where it can compile here."""

    @abstractmethod
    def open(self, folder: Path, *, ahead: bool = False, jobs: int | None = None) -> None:
        """Find and keep compiled graphs in this folder from now on.

        Args:
            ahead: there is no device to run them on.
            jobs: processes that may compile at a time; as the compiler likes by default.
        """

    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Graphs of this process so far: compiled, and found in the folder."""

    @abstractmethod
    def _backend(self) -> Callable[[GraphModule, Sequence[Any]], Compiled]:
        """torch.compile's backend."""

    def compile(self, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile a captured graph, forward and backward, for inputs that may be fake."""
        import torch._functorch.config as functorch

        # torch would leave backward until it is first run: too late to know what became of it.
        with functorch.patch(force_non_lazy_backward_lowering=True):
            return self._backend()(graph, inputs)


class Inductor(Compiler):
    def missing(self) -> str | None:
        if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
            return "no C++ compiler (g++ or clang++)"
        if self.device == "cuda" and not (torch.cuda.is_available() and find_spec("triton")):
            return "no CUDA device with Triton"
        return None

    def open(self, folder: Path, *, ahead: bool = False, jobs: int | None = None) -> None:
        if jobs is not None:
            import torch._inductor.config as inductor

            inductor.compile_threads = jobs
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)

    def counts(self) -> tuple[int, int]:
        from torch._dynamo.utils import counters

        found = counters["inductor"]
        return found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"], found["fxgraph_cache_hit"]

    def _backend(self) -> Callable[[GraphModule, Sequence[Any]], Compiled]:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx


class Neuron(Compiler):
    folder: Path | None = None
    before = 0

    def missing(self) -> str | None:
        # The public index has stubs of this name; the real one registers its backend.
        if find_spec("torch_neuronx") is None or "neuron" not in torch.compiler.list_backends():
            return "no TorchNeuron (torch-neuronx from AWS's index)"
        return None

    def open(self, folder: Path, *, ahead: bool = False, jobs: int | None = None) -> None:
        """Before anything runs on the device: TorchNeuron reads its settings once."""
        for name in ("NEFF_CACHE_DIR", "NEFF_LOCAL_CACHE_DIR", "HLO_CACHE_DIR"):
            os.environ[f"TORCH_NEURONX_{name}"] = str(folder)
        if ahead:
            os.environ["TORCH_NEURONX_COMPILE_ONLY"] = "1"
        if self.flags:
            os.environ["NEURON_CC_FLAGS"] = self.flags
        self.folder, self.before = folder, _neffs(folder)

    def counts(self) -> tuple[int, int]:
        import torch_neuronx

        cold = _neffs(self.folder) - self.before if self.folder else 0
        return cold, max(0, len(torch_neuronx.get_dynamo_metrics()) - cold)

    def _backend(self) -> Callable[[GraphModule, Sequence[Any]], Compiled]:
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend("neuron")


def _neffs(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.neff"))


COMPILERS: dict[str, type[Compiler]] = {"inductor": Inductor, "neuron": Neuron}


def backend_name(profile: Profile) -> str:
    """The profile's compiler: what it says, else its device's own."""
    return profile.compile.backend or devices.resolve(profile.cluster.device).compile_backend


def lacks(profile: Profile) -> str | None:
    """What the profile's compiler lacks on this machine, in words; None where it can compile here."""
    return compiler(profile).missing()


def compiler(profile: Profile) -> Compiler:
    """The profile's compiler."""
    return COMPILERS[backend_name(profile)](profile.cluster.device, profile.compile.flags)
