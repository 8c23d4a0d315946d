"""The one module that knows devices: what a process group, a compiler and an attention kernel are called on each kind,
how much memory there is and how fast it can multiply.

Figures are the vendors' published ones, dense, for one device as a launcher sees it (a Neuron logical core, a GPU,
the whole CPU). The rest of the tree asks a `Device` and never a type string.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import torch

GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
        type: torch's device type.
        backend: name of the process-group backend.
        compile_backend: name that `torch.compile` knows its compiler by.
        reduces: whether the backend's own reducing collectives are the fastest way to reduce (see collectives.py).
        memory_bytes: memory of one device, None where it is the host's.
        bandwidth: bytes a second between one device and its memory, None where unknown.
        link: bytes a second that one device sends to others in its node, None where unknown.
        network: bytes a second that are one device's share of its node's network, None where unknown.
        peak_flops: dense matrix FLOP/s of one device by precision, empty where unknown.
        attention: name of its attention kernel (attention_kernels.py).
        monitor: name of what tells how it is doing.
        environment: what a launcher sets for processes that span nodes.
        communicator: variable that tells the device's runtime where its collectives meet, as host:port; None: none does.
    """

    type: str
    backend: str
    compile_backend: str
    reduces: bool
    memory_bytes: int | None = None
    peak_flops: dict[str, float] | None = None
    attention: str = "math"
    bandwidth: float | None = None
    link: float | None = None
    network: float | None = None
    monitor: str = "psutil"
    environment: tuple[tuple[str, str], ...] = ()
    communicator: str | None = None

    def local(self, local_rank: int = 0) -> torch.device:
        """The torch device of the process with this rank on its node, made the current one."""
        if self.type == "cpu":
            _keep_freed_memory()
            return torch.device("cpu")
        device = torch.device(self.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
        return device

    def synchronize(self) -> None:
        if self.type != "cpu":
            torch.accelerator.synchronize()

    def available(self) -> int:
        """How many devices of this kind this machine has. Raises RuntimeError where its software is missing."""
        if self.type == "cpu":
            return os.cpu_count() or 1
        if self.type == "cuda":
            return torch.cuda.device_count()
        neuron_software()
        accelerator = torch.accelerator.current_accelerator()
        return torch.accelerator.device_count() if accelerator and accelerator.type == self.type else 0

    def peak(self, precision: str) -> float | None:
        """Peak dense FLOP/s of one device in "float32" or "bf16", None where it is not known."""
        return (self.peak_flops or {}).get(precision)

    @property
    def synchronous(self) -> bool:
        """Whether work is done when the call that asks for it returns, so that the host's clock can time it."""
        return self.type == "cpu"

    @property
    def allocated_bytes(self) -> int | None:
        """The most memory that tensors of this process have taken, where the allocator counts it."""
        return torch.cuda.max_memory_allocated() if self.type == "cuda" else None


def _keep_freed_memory() -> None:
    """Have glibc keep large freed blocks rather than give them back to the system; other C libraries stay as they are.

    Having the same pages given anew at each allocation costs a step of a small Llama 7 % in float32 and 20 % in bf16.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        mallopt(trim_threshold, GIB)
        mallopt(mmap_threshold, GIB)


CPU = Device("cpu", "gloo", "inductor", reduces=False, attention="cpu-flash")
# A ring of the last collectives of each process, for when one of them hangs.
CUDA = Device(
    "cuda",
    "nccl",
    "inductor",
    True,
    attention="cuda-flash",
    monitor="nvml",
    environment=(("TORCH_FR_BUFFER_SIZE", "2000"),),
)
# EFA is the nodes' network. Without an address to meet at, the runtime hangs at its start.
NEURON = Device(
    "neuron",
    "neuron",
    "neuron",
    True,
    attention="nki",
    monitor="neuron-monitor",
    environment=(
        ("FI_PROVIDER", "efa"),
        ("FI_EFA_USE_DEVICE_RDMA", "1"),
        ("FI_EFA_FORK_SAFE", "1"),
        ("MALLOC_ARENA_MAX", "64"),
    ),
    communicator="NEURON_RT_ROOT_COMM_ID",
)

# AWS's figures are of chips and nodes: two devices share a chip of trn1, four one of trn2 and trn3 (logical cores of two).
ACCELERATORS = {
    "trn1": replace(
        NEURON,
        memory_bytes=16 * GIB,
        peak_flops={"bf16": 95e12},
        bandwidth=820 * GIB / 2,
        link=384 * GIB / 2,
        network=800e9 / 8 / 32,
    ),
    "trn2": replace(
        NEURON,
        memory_bytes=24 * GIB,
        peak_flops={"bf16": 166.8e12},
        bandwidth=2.9e12 / 4,
        link=1.28e12 / 4,
        network=3200e9 / 8 / 64,
    ),
    "trn3": replace(
        NEURON,
        memory_bytes=36 * GIB,
        peak_flops={"bf16": 167.8e12},
        bandwidth=4.9e12 / 4,
        link=2.56e12 / 4,
        network=12800e9 / 8 / 64,
    ),
    "h100": replace(
        CUDA,
        memory_bytes=80 * 10**9,
        peak_flops={"bf16": 989e12, "float32": 67e12},
        bandwidth=3.35e12,
        link=450e9,
        network=400e9 / 8,
    ),
    "h200": replace(
        CUDA,
        memory_bytes=141 * 10**9,
        peak_flops={"bf16": 989e12, "float32": 67e12},
        bandwidth=4.8e12,
        link=450e9,
        network=400e9 / 8,
    ),
}
KINDS = {"cpu": CPU, "cuda": CUDA, "neuron": ACCELERATORS["trn2"]}  # the first that the native stack is for


def resolve(kind: str, accelerator: str | None = None) -> Device:
    """The device of a profile's `cluster.device`, with the figures of its `cluster.accelerator`, or of the card that is here.

    Raises:
        ValueError: an unknown kind or accelerator.
    """
    if kind not in KINDS:
        raise ValueError(f"device {kind!r} is not one of {', '.join(KINDS)}")
    if accelerator is None and kind == "cuda" and torch.cuda.is_available():
        card = torch.cuda.get_device_name().lower()
        accelerator = next((name for name in ACCELERATORS if name in card), None)
        if accelerator is None:
            return replace(CUDA, memory_bytes=torch.cuda.get_device_properties().total_memory)
    if accelerator is None:
        return KINDS[kind]
    if accelerator not in ACCELERATORS or ACCELERATORS[accelerator].type != kind:
        known = [name for name, device in ACCELERATORS.items() if device.type == kind]
        raise ValueError(f"accelerator {accelerator!r} of device {kind!r} is not one of {', '.join(known)}")
    return ACCELERATORS[accelerator]


def present() -> str:
    """The kind of the accelerator that this machine has, else "cpu"; for tools that look, never for a run."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator and accelerator.type in KINDS else "cpu"


def neuron_software() -> str:
    """The version of TorchNeuron, whose package is torch-neuronx.

    Raises:
        RuntimeError: it is missing, or only the public index's placeholder of that name (1.0), or made for another torch.
    """
    source = "it comes from AWS's own package index"
    try:
        found = version("torch-neuronx")
    except PackageNotFoundError:
        raise RuntimeError(f"torch-neuronx is not installed; {source}") from None
    if found.startswith("1."):
        raise RuntimeError(
            f"torch-neuronx {found} is the public index's placeholder, without any code; {source}"
        )
    release = torch.__version__.split("+")[0]
    if found.split(".")[:2] != release.split(".")[:2]:
        raise RuntimeError(f"torch-neuronx {found} is not made for torch {release}; {source}")
    return found


def has_fused_adamw(tensor: torch.Tensor) -> bool:
    """Whether torch has a fused AdamW kernel where this tensor lies."""
    return fuses_adamw(tensor.device.type)


def fuses_adamw(kind: str) -> bool:
    """Whether torch has one on this kind of device."""
    return kind in ("cpu", "cuda")


def host_memory_for(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the host for copies of a tensor; page-locked where the device then copies beside other work."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's random generators on the host and on a device, bytes."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_random_states(device: torch.device, states: dict[str, torch.Tensor]) -> None:
    """Put back what `random_states` gave."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type])


def platform_tag(kind: str) -> str:
    """What compiled code depends on besides the compiler: the processor and its vector units, or the card."""
    if kind == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"cuda-sm{major}{minor}"
    if kind == "cpu":
        return f"cpu-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    return kind
