"""The one module that knows devices: what a process group, a compiler and an attention kernel are called on each kind,
how much memory there is and how fast it can multiply.

Figures are the vendors' published ones, dense, for one device as a launcher sees it (a Neuron logical core, a GPU,
the whole CPU). The rest of the tree asks a `Device` and never a type string.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass

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
        peak_flops: dense matrix FLOP/s of one device by precision, empty where unknown.
        attention: name of its attention kernel (attention_kernels.py).
    """

    type: str
    backend: str
    compile_backend: str
    reduces: bool
    memory_bytes: int | None = None
    peak_flops: dict[str, float] | None = None
    attention: str = "math"

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
        accelerator = torch.accelerator.current_accelerator()
        return torch.accelerator.device_count() if accelerator and accelerator.type == self.type else 0

    def peak(self, precision: str) -> float | None:
        """Peak dense FLOP/s of one device in "float32" or "bf16", None where it is not known."""
        return (self.peak_flops or {}).get(precision)

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
TRN1 = Device("neuron", "neuron", "neuron", True, 16 * GIB, {"bf16": 95e12}, "nki")
TRN2 = Device("neuron", "neuron", "neuron", True, 24 * GIB, {"bf16": 166.8e12}, "nki")
H200 = Device("cuda", "nccl", "inductor", True, 141 * 10**9, {"bf16": 989e12, "float32": 67e12}, "cuda-flash")
CUDA = Device("cuda", "nccl", "inductor", True, attention="cuda-flash")

KINDS = {"cpu": CPU, "cuda": CUDA, "neuron": TRN2}


def resolve(kind: str) -> Device:
    """The device of a profile's `cluster.device`, with figures where they are known.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"device {kind!r} is not one of {', '.join(KINDS)}")
    if kind == "cuda" and torch.cuda.is_available() and "H200" in torch.cuda.get_device_name():
        return H200
    return KINDS[kind]


def has_fused_adamw(tensor: torch.Tensor) -> bool:
    """Whether torch has a fused AdamW kernel where this tensor lies."""
    return tensor.device.type in ("cpu", "cuda")


def platform_tag(kind: str) -> str:
    """What compiled code depends on besides the compiler: the processor and its vector units, or the card."""
    if kind == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"cuda-sm{major}{minor}"
    if kind == "cpu":
        return f"cpu-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    return kind
