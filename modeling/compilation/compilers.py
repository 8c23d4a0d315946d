"""Graph compilers behind one interface: requirements, cache folder, cache misses and hits.

    inductor   CPU and CUDA. Its cache folder holds graphs, generated code and, on a CPU, shared libraries; the folder itself is
               the artifact, because on a CPU `torch.compiler.save_cache_artifacts` omits compiled code
    neuron     TorchNeuron's torch.compile backend: FX, StableHLO, neuronx-cc, and one NEFF per graph in its cache folder.
               Ahead of time it compiles without a device (`TORCH_NEURONX_COMPILE_ONLY`), for the platform that is set
               (`NEURON_PLATFORM_TARGET_OVERRIDE`). Untested on Neuron hardware, and with the real package

A compiler takes a graph as Dynamo captured it and compiles forward and backward before the call returns.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from modeling.compilation import toolchain
from modeling.compilation.manifest import without_random_state
from parallel import device as devices
from parallel.host_products import ONEDNN_PRODUCTS
from profiles.files import folders, state_files
from profiles.schema import Profile

Compiled = Callable[..., Any]
PLATFORM, CORES, FLAGS = "NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG", "NEURON_CC_FLAGS"
LINK_SECONDS = 7 * 86400.0  # for which a link to a removed cache folder is kept
log = logging.getLogger(__name__)


class Compiler(ABC):
    """A compiler for one kind of device.

    Args:
        flags: of `compile.flags`.
        accelerator: of `cluster.accelerator`.
        users: environment variables that the user has set for jobs.
    """

    needs_device = False
    """Whether it can compile only on a machine with a device that works."""

    def __init__(
        self,
        device: str,
        flags: str | None = None,
        accelerator: str | None = None,
        users: Mapping[str, str] = os.environ,
    ) -> None:
        self.device, self.flags, self.accelerator, self.users = device, flags, accelerator, users

    @abstractmethod
    def missing_software(self) -> str | None:
        """What is not installed on this machine for compiling, as a phrase for messages; None if nothing."""

    def missing_device(self) -> str | None:
        """The device, if this machine has none that works, as a phrase for messages; None if it has one."""
        missing = self.device != "cpu" and not torch.accelerator.is_available()
        return f"no {self.device} device" if missing else None

    def missing_requirement(self, *, ahead_of_time: bool = False) -> str | None:
        """What this machine lacks for compiling, as a phrase for messages; None if it has everything.

        Args:
            ahead_of_time: whether the code is only compiled here, and runs elsewhere.
        """
        runs_here = self.needs_device or not ahead_of_time
        return self.missing_software() or (self.missing_device() if runs_here else None)

    def fault(self, folder: Path) -> str | None:
        """Why nothing can be compiled into a folder although nothing is missing, as such a phrase; or None."""
        return None

    def environment(self, folder: Path, *, ahead_of_time: bool = False) -> dict[str, str]:
        """Environment variables with which to start a process that will call `use_cache`; "": without one."""
        return {}

    @property
    def target(self) -> dict[str, str]:
        """Environment variables that decide what a job's compiler makes, with their values; for cache keys."""
        return {}

    @abstractmethod
    def use_cache(self, folder: Path, *, ahead_of_time: bool = False, jobs: int | None = None) -> None:
        """Read and write compiled graphs in this folder from now on.

        Args:
            ahead_of_time: compile only, without a device to run on.
            jobs: maximum number of compiler processes; the compiler's default if None.
        """

    def prepare(self) -> None:  # noqa: B027  some compilers' processes share nothing
        """Fill the cache folder with what all compiling processes need; each starts with a copy of it."""

    @abstractmethod
    def cache_counts(self) -> tuple[int, int]:
        """Cache misses (graphs compiled) and hits (graphs found) of this process so far."""

    @abstractmethod
    def _backend(self) -> Callable[[GraphModule, Sequence[Any]], Compiled]:
        """The torch.compile backend."""

    def compile(self, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile a captured graph, forward and backward; inputs may be fake tensors."""
        from parallel.torch_internals import functorch_config as functorch

        # By default backward is compiled when first run, after its misses and hits have been counted.
        with functorch.patch(force_non_lazy_backward_lowering=True), without_random_state():
            return self._backend()(graph, inputs)


class Inductor(Compiler):
    """Compile graphs with torch's inductor: C++ on CPUs, Triton on GPUs.

    Args:
        settings: those of every compiler.
        async_tensor: whether to merge all-gathers and reduce-scatters over the tensor axis with the matrix products beside them,
            into kernels that read and write the other ranks' memory. Its process group must exist when a graph is compiled.
    """

    def __init__(self, device: str, *settings: Any, async_tensor: bool = False) -> None:
        super().__init__(device, *settings)
        self.async_tensor = async_tensor
        # Triton asks the card's driver for its architecture, and torch's choices of kernels read the card's properties.
        self.needs_device = device != "cpu"

    def compile(self, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        from parallel.torch_internals import inductor_config as inductor

        settings: dict[str, Any] = {}
        if self.async_tensor:
            from parallel.torch_internals import enable_symmetric_memory

            with warnings.catch_warnings():  # it is deprecated, but torch's own pass still needs it
                warnings.simplefilter("ignore", FutureWarning)
                enable_symmetric_memory("tensor")
            settings["_micro_pipeline_tp"] = True
        if self.device == "cuda":
            # Otherwise each rank would measure which block sizes are the fastest for sums, and replicas of weights would drift
            # apart by different orders of addition.
            settings["test_configs.force_filter_reduction_configs"] = True
            settings["dynamic_scale_rblock"] = False
            settings["shape_padding"] = False  # measured too
        if self.device == "cpu" and ONEDNN_PRODUCTS:
            from modeling.compilation.product_pass import OneDNNProducts

            settings["post_grad_custom_pre_pass"] = OneDNNProducts()
        with inductor.patch(settings):
            return super().compile(graph, inputs)

    def missing_software(self) -> str | None:
        if lacks := toolchain.missing():
            return lacks
        if self.device == "cuda" and not (torch.backends.cuda.is_built() and find_spec("triton")):
            return "no PyTorch for CUDA with Triton"
        return None

    def fault(self, folder: Path) -> str | None:
        # Triton compiles far less code, and reports its own errors.
        return toolchain.fault(folder) if self.device == "cpu" else None

    def use_cache(self, folder: Path, *, ahead_of_time: bool = False, jobs: int | None = None) -> None:
        if jobs is not None:
            from parallel.torch_internals import inductor_config as inductor

            inductor.compile_threads = jobs
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_without_spaces(folder))
        link_libraries()

    def prepare(self) -> None:
        """Compile a probe of each of the CPU's instruction sets, which takes 9 s of CPU."""
        if self.device == "cpu":
            from parallel.torch_internals import pick_vec_isa

            pick_vec_isa()

    def cache_counts(self) -> tuple[int, int]:
        from parallel.torch_internals import counters

        counts = counters["inductor"]
        return counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"], counts["fxgraph_cache_hit"]

    def _backend(self) -> Callable[[GraphModule, Sequence[Any]], Compiled]:
        from parallel.torch_internals import compile_fx, compile_fx_inner

        if self.device == "cpu":
            return compile_fx

        # On GPUs, the cache key has the offsets of static inputs in their storage. Weights are views of buckets, whose offsets
        # differ between layers and are not known ahead of time, so that graphs compiled ahead would never be found.
        def compile_inner(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Compiled:
            return compile_fx_inner(graph, inputs, **{**options, "static_input_idxs": ()})

        return partial(compile_fx, inner_compile=compile_inner)


def link_libraries() -> None:
    """Let g++ find torch's libraries if torch is installed below a path with a space."""
    libraries = Path(torch.__file__).with_name("lib")
    if (link := _without_spaces(libraries)) != libraries:
        from torch.utils import cpp_extension

        cpp_extension.TORCH_LIB_PATH = str(link)  # read for each command


def _without_spaces(folder: Path) -> Path:
    """The folder, or a link to it if its path has a space: inductor splits g++'s command at spaces.

    All processes share one link per folder, because a rank may end without removing its own. A new link replaces old ones to
    folders that have been removed.
    """
    if not re.search(r"\s", str(folder)):
        return folder
    state_files.make_folder(folder)
    folder = folder.absolute()
    link = _private_temp_folder() / hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    with suppress(FileExistsError):  # of another process
        link.symlink_to(folder, target_is_directory=True)
        for each in link.parent.iterdir():
            with suppress(OSError):  # removed meanwhile
                # A recent one may be in use: its file system may be unmounted for a moment, or not visible in this container.
                if not state_files.exists(each) and each.lstat().st_mtime < time.time() - LINK_SECONDS:
                    each.unlink()
    return link


def _private_temp_folder() -> Path:
    """A temporary folder that only this user can read and write, the same one in each process."""
    folder = Path(tempfile.gettempdir()) / f"trainshed-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="trainshed-"))  # another user could redirect links in that folder


class Neuron(Compiler):
    folder: Path | None = None
    initial_neffs = 0

    def missing_software(self) -> str | None:
        try:
            devices.load_software(self.device)
        except RuntimeError as error:
            return f"no working TorchNeuron ({error})"
        # The public index has placeholder packages of this name; the real one registers its backend.
        if find_spec("torch_neuronx") is None or "neuron" not in torch.compiler.list_backends():
            return "no TorchNeuron (torch-neuronx from AWS's index)"
        return None

    def environment(self, folder: Path, *, ahead_of_time: bool = False) -> dict[str, str]:
        """TorchNeuron reads some of its settings when torch imports it, and each of them once."""
        names = ("NEFF_CACHE_DIR", "NEFF_LOCAL_CACHE_DIR", "HLO_CACHE_DIR")
        found = {f"TORCH_NEURONX_{name}": str(folder) for name in names} | self.target
        if ahead_of_time:
            found["TORCH_NEURONX_COMPILE_ONLY"] = "1"
        elif PLATFORM not in self.users:  # a node's device is what it is
            found[PLATFORM] = ""
        return found

    @property
    def target(self) -> dict[str, str]:
        """The profile's accelerator, a device's logical cores and the flags, unless the user has set others."""
        platform = self.accelerator or devices.name_of(devices.KINDS[self.device])
        defaults = {PLATFORM: platform, CORES: "", FLAGS: self.flags or ""}
        return {name: self.users.get(name, default) for name, default in defaults.items()}

    def use_cache(self, folder: Path, *, ahead_of_time: bool = False, jobs: int | None = None) -> None:
        """Call before anything runs on the device.

        Variables that change what is compiled, and that the compile step could not know, are replaced with a warning: a container
        image may set them.
        """
        for name, value in self.environment(folder, ahead_of_time=ahead_of_time).items():
            if name in self.target and os.environ.get(name, value) != value:
                replaced = f"{name}={os.environ[name]} of this machine is replaced"
                log.warning(f"{replaced}: the run's programs are compiled with {value or 'none'!r}")
            os.environ.pop(name, None)
            if value:
                os.environ[name] = value
        if self.flags and self.target[FLAGS] != self.flags:
            log.warning(f"{FLAGS}={self.target[FLAGS]} is kept; compile.flags is {self.flags}")
        self.folder, self.initial_neffs = folder, _count_neffs(folder)

    def cache_counts(self) -> tuple[int, int]:
        import torch_neuronx

        misses = _count_neffs(self.folder) - self.initial_neffs if self.folder else 0
        return misses, max(0, len(torch_neuronx.get_dynamo_metrics()) - misses)

    def _backend(self) -> Callable[[GraphModule, Sequence[Any]], Compiled]:
        from parallel.torch_internals import lookup_backend

        return lookup_backend("neuron")


def _count_neffs(folder: Path) -> int:
    return sum(name.endswith(".neff") for name, _ in folders.walk(folder))


COMPILERS: dict[str, type[Compiler]] = {"inductor": Inductor, "neuron": Neuron}


def backend_name(profile: Profile) -> str:
    """The profile's compiler: `compile.backend`, by default its device's."""
    return profile.compile.backend or devices.resolve(profile.cluster.device).compile_backend


def make_compiler(profile: Profile) -> Compiler:
    """The profile's compiler."""
    options = {"async_tensor": True} if profile.compile.async_tensor else {}
    cluster = profile.cluster
    # Pods inherit nothing. On Slurm and on this machine, jobs have the environment of the command that starts them.
    users = cluster.kubernetes.variables if cluster.launcher == "kubernetes" else os.environ
    make = COMPILERS[backend_name(profile)]
    return make(cluster.device, profile.compile.flags, cluster.accelerator, users, **options)
