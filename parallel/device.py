"""Devices (CPU, CUDA, Neuron): backend, compiler, attention kernel, memory, bandwidths, peak FLOP/s.

All properties of a device are here. Other modules ask a `Device`, and compare types only where a feature exists on one type
alone. Figures are the vendors' published dense ones, for one device as a launcher counts it (a Neuron
logical core, a GPU, the entire CPU).
"""

from __future__ import annotations

import logging
import os
import platform
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from parallel.host_memory import retain_freed_memory

log = logging.getLogger(__name__)

MIB, GIB = 1024**2, 1024**3
LOCAL_PORTS = range(20000, 32000)  # below those that the kernel gives to clients
Mark = Any  # a point in a device's work: seconds of the host's clock, or an event


@dataclass(frozen=True)
class Device:
    """A device type, or a specific accelerator with its figures."""

    type: str  # torch device type
    backend: str  # process-group backend
    compile_backend: str  # `torch.compile` backend
    # whether the backend's own reductions are the fastest way to reduce (collectives.py)
    supports_reduction: bool
    # whether a reduce-scatter may write its result into its input, as NCCL documents
    reduces_in_place: bool = False
    # whether FSDP's collectives are operators of compiled blocks, which the compiler schedules (optimizer/fsdp.py)
    gathers_in_graph: bool = False
    # whether collectives run concurrently with kernels, on a separate stream, so that splitting a product into chunks hides
    # part of them (layers/overlap.py); not on devices whose compiler schedules both
    concurrent_collectives: bool = False
    attention_kernel: str = "math"  # name of the default attention kernel (attention/kernels.py)
    memory_bytes: int | None = None  # memory of one device; None: host memory
    # dense matrix FLOP/s of one device by precision; None: unknown
    peak_flops: dict[str, float] | None = None
    reserve: float = 0.05  # share of the memory that a plan leaves free
    bandwidth: float | None = None  # memory bandwidth of one device in bytes/s; None: unknown
    chip: int = 1  # devices of one chip, which share its memory
    architecture: str | None = None  # of GPUs: "ampere", "hopper" or "blackwell"; None: others, or unknown
    link: float | None = None  # bandwidth from one device to others in its node in bytes/s; None: unknown
    # one device's share of its node's network bandwidth in bytes/s; None: unknown
    network: float | None = None
    monitor: str = "psutil"  # name of its utilization reader (telemetry)
    # whether its fastest kernels may round differently each time they run
    nondeterministic: bool = False
    # whether it compiles each operator at its first use, so that a step must consist of compiled programs only
    compiles_operators: bool = False
    # whether compiled code contains the index of the device that runs it, so that each device of a node needs its own
    code_names_device: bool = False
    # whether process groups connect when they are created, and need the device then
    binds_process_groups: bool = False
    # whether copies to and from the host wait for the device unless the host's memory is page-locked
    page_locks: bool = False
    # environment variables that launchers set for processes
    environment: tuple[tuple[str, str], ...] = ()
    # environment variable with the host:port where the device runtime's collectives rendezvous; None: unused
    communicator: str | None = None

    def local_environment(self) -> dict[str, str]:
        """Environment variables for processes on this machine only, with their own port for `communicator`."""
        found = dict(self.environment)
        if self.communicator:
            address = os.environ.get(self.communicator)
            found[self.communicator] = address or f"127.0.0.1:{_free_port()}"
        return found

    def set_current(self, local_rank: int = 0) -> torch.device:
        """Make the device of this local rank the current one and return it."""
        if self.type == "cpu":
            retain_freed_memory()
            return torch.device("cpu")
        load_software(self.type)
        device = torch.device(self.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
        return device

    def choose_kernels(self, deterministic: bool, precision: str = "float32") -> None:
        """Let this process use deterministic kernels only, or the fastest ones.

        Unless the precision is float32, the few float32 products run in TF32 on tensor cores. Those of routers: it holds bf16
        values exactly in forward, and rounds the gradients of the logits to 10 bits. And those of the gated delta rule, whose
        factors it rounds.
        """
        if self.nondeterministic:
            torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
            torch.use_deterministic_algorithms(deterministic)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a pass over memory, for debugging; untyped
            if deterministic:
                # In both, switches add in any order; torch excludes NVLS only. NCCL reads it when the first group connects.
                os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")

    @contextmanager
    def chosen_kernels(self, deterministic: bool, precision: str = "float32") -> Iterator[None]:
        """Choose kernels within a `with` statement, for example while graphs are captured and compiled."""
        before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
        algorithms = os.environ.get("NCCL_ALGO")
        self.choose_kernels(deterministic, precision)
        try:
            yield
        finally:
            if self.nondeterministic:
                torch.use_deterministic_algorithms(before[0])
                torch.set_float32_matmul_precision(before[1])
                if algorithms is None:
                    os.environ.pop("NCCL_ALGO", None)

    def start_process_group(self, device: torch.device, timeout: timedelta | None = None) -> None:
        """Initialize the default process group from the environment, for tensors of `device` only."""
        bound = device if self.binds_process_groups else None
        dist.init_process_group(self.backend, timeout=timeout, device_id=bound)

    def synchronize(self) -> None:
        if self.type != "cpu":
            torch.accelerator.synchronize()

    def available(self) -> int:
        """Number of devices of this type on the machine; RuntimeError if the device's software is missing."""
        if self.type == "cpu":
            return os.cpu_count() or 1
        if self.type == "cuda":
            return torch.cuda.device_count()
        torch_neuronx_version()
        load_software(self.type)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.accelerator.device_count() if accelerator and accelerator.type == self.type else 0

    def compiled_for(self, count: int) -> int:
        """How many of this machine's devices, from device 0, need their own code if a node has `count`."""
        return max(1, min(count, self.available())) if self.code_names_device else 1

    def peak(self, precision: str) -> float | None:
        """Peak dense FLOP/s of one device in "float32", "bf16" or "fp8"; None if unknown."""
        return (self.peak_flops or {}).get(precision)

    @property
    def chip_link(self) -> float | None:
        """Bandwidth to the chip's other devices in bytes/s: messages are read and written in shared memory."""
        return self.bandwidth and self.bandwidth / 2

    @property
    def synchronous(self) -> bool:
        """Whether operators complete before their call returns, so that the host's clock can time them."""
        return self.type == "cpu"

    def mark(self) -> Mark:
        """The point at which all work queued on the device so far is done."""
        if self.synchronous:
            return time.perf_counter()
        event = torch.get_device_module(self.type).Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks, both of which the device must have reached."""
        return end - start if self.synchronous else start.elapsed_time(end) / 1000

    @property
    def allocated_bytes(self) -> int | None:
        """Peak memory allocated to tensors of this process; None if the allocator does not count it."""
        return torch.cuda.max_memory_allocated() if self.type == "cuda" else None


def _free_port() -> int:
    """A free port of the loopback interface."""
    while True:
        port = secrets.choice(LOCAL_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


CPU = Device("cpu", "gloo", "inductor", supports_reduction=False, attention_kernel="cpu-flash")
CUDA = Device(
    "cuda",
    "nccl",
    "inductor",
    True,
    reduces_in_place=True,
    concurrent_collectives=True,
    attention_kernel="cuda-flash",
    monitor="nvml",
    nondeterministic=True,
    code_names_device=True,
    binds_process_groups=True,
    page_locks=True,
    environment=(
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),  # cuBLAS is deterministic with a fixed-size workspace only
        ("TORCH_FR_BUFFER_SIZE", "2000"),  # last collectives of each process, to debug hangs
        ("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false"),  # pipelines order their messages
        # Less fragmentation; and page-locked copies of checkpoints take their size, not the next power of 2.
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True,pinned_max_round_threshold_mb:1"),
    ),
)
# EFA is the nodes' network. Without a rendezvous address the runtime hangs at startup.
NEURON = Device(
    "neuron",
    "neuron",
    "neuron",
    True,
    gathers_in_graph=True,
    attention_kernel="nki",
    compiles_operators=True,
    monitor="neuron-monitor",
    environment=(
        ("FI_PROVIDER", "efa"),
        ("FI_EFA_USE_DEVICE_RDMA", "1"),
        ("FI_EFA_FORK_SAFE", "1"),
        ("MALLOC_ARENA_MAX", "64"),
    ),
    communicator="NEURON_RT_ROOT_COMM_ID",
)


# Fragmentation: users of trn2 report that an allocation of 2.5 GB failed while 10 GB were free in smaller blocks.
FRAGMENTED = replace(NEURON, reserve=0.10)


def _accelerator(
    base: Device, chip: int, memory_bytes: int, bandwidth: float, link: float, network: float, **peak: float
) -> Device:
    """A device with its figures; `link` and `network`: bytes/s of one device."""
    figures: dict[str, Any] = {"memory_bytes": memory_bytes, "bandwidth": bandwidth, "peak_flops": peak}
    return replace(base, chip=chip, link=link, network=network, **figures)


# AWS publishes figures by chip and node: a trn1 chip has two devices, a trn2 or trn3 chip four (logical cores of two).
# Of GPUs, memory is what nvidia-smi shows of a card: more than the decimal GB in its name. The reserve of 5%, 4 GiB of an
# H100's, is for what a plan does not count: the driver keeps 0.6 to 0.7 GiB of that total (a B200 of 183,359 MiB reports 178.35
# GiB to programs, pytorch/ao 4002), a process's CUDA context 0.3 to 0.5 GiB (pytorch 107667), NCCL's buffers 0.5 to 0.7 GiB for
# each communicator with connections of its own (NVIDIA/nccl 964), and the allocator's fragmentation the rest.
AMPERE, HOPPER, BLACKWELL = (replace(CUDA, architecture=name) for name in ("ampere", "hopper", "blackwell"))
ACCELERATORS = {
    "trn1": _accelerator(NEURON, 2, 16 * GIB, 820 * GIB / 2, 384 * GIB / 2, 800e9 / 8 / 32, bf16=95e12),
    "trn2": _accelerator(FRAGMENTED, 4, 24 * GIB, 2.9e12 / 4, 1.28e12 / 4, 3200e9 / 8 / 64, bf16=166.8e12),
    "trn3": _accelerator(
        FRAGMENTED, 4, 36 * GIB, 4.9e12 / 4, 2.56e12 / 4, 12800e9 / 8 / 64, bf16=167.8e12, fp8=2.517e15 / 4
    ),
    "a100": _accelerator(AMPERE, 1, 81_920 * MIB, 2.039e12, 300e9, 200e9 / 8, bf16=312e12, float32=19.5e12),
    "h100": _accelerator(
        HOPPER, 1, 81_559 * MIB, 3.35e12, 450e9, 400e9 / 8, bf16=989e12, float32=67e12, fp8=1979e12
    ),
    # With 96 GB of HBM2e and 500 instead of 700 W, as torchtitan's published runs have it. Its peak is not published; it is
    # fitted to them, 0.89 of the H100's (benchmarks/published_fit.py), which is the cube root of the power's ratio.
    "h100_96": _accelerator(
        HOPPER, 1, 97_871 * MIB, 2.4e12, 450e9, 400e9 / 8, bf16=880e12, float32=60e12, fp8=1761e12
    ),
    # An H100 with 400 instead of 900 GB/s of NVLink, both directions together.
    "h800": _accelerator(
        HOPPER, 1, 81_559 * MIB, 3.35e12, 200e9, 400e9 / 8, bf16=989e12, float32=67e12, fp8=1979e12
    ),
    "h200": _accelerator(
        HOPPER, 1, 143_771 * MIB, 4.8e12, 450e9, 400e9 / 8, bf16=989e12, float32=67e12, fp8=1979e12
    ),
    "b200": _accelerator(BLACKWELL, 1, 183_359 * MIB, 8e12, 900e9, 400e9 / 8, bf16=2.25e15, fp8=4.5e15),
}
# trn2: the first generation that native PyTorch supports
KINDS = {"cpu": CPU, "cuda": CUDA, "neuron": ACCELERATORS["trn2"]}


def resolve(kind: str, accelerator: str | None = None) -> Device:
    """Device of `cluster.device`, with the figures of `cluster.accelerator`, or of this machine's GPU.

    Raises:
        ValueError: unknown kind or accelerator.
    """
    if kind not in KINDS:
        raise ValueError(f"device {kind!r} is not one of {', '.join(KINDS)}")
    if accelerator is None and kind == "cuda" and torch.cuda.is_available():
        words = re.split(r"\W+", torch.cuda.get_device_name().lower())
        named = () if {"pcie", "nvl"} & {*words} else words  # slower variants, whose figures are not known
        found = next((ACCELERATORS[word] for word in named if word in ACCELERATORS), CUDA)
        # What the card reports: a little less than nvidia-smi shows, or that of a partition.
        return replace(found, memory_bytes=torch.cuda.get_device_properties().total_memory)
    if accelerator is None:
        return KINDS[kind]
    if accelerator not in ACCELERATORS or ACCELERATORS[accelerator].type != kind:
        known = [name for name, device in ACCELERATORS.items() if device.type == kind]
        raise ValueError(f"accelerator {accelerator!r} of device {kind!r} is not one of {', '.join(known)}")
    return ACCELERATORS[accelerator]


def name_of(device: Device) -> str:
    """The accelerator's name, or the device's type if its figures are not known."""

    def is_known(known: Device) -> bool:
        # A card reports up to 1% less memory than nvidia-smi shows; a partition of it has much less, and is slower.
        whole = (device.memory_bytes or 0) >= 0.95 * (known.memory_bytes or 0)
        return whole and vars(known) | {"memory_bytes": device.memory_bytes} == vars(device)

    return next((name for name, known in ACCELERATORS.items() if is_known(known)), device.type)


def detect() -> str:
    """Type of this machine's accelerator, else "cpu"; for diagnostics only: runs never guess their device."""
    load_software("neuron")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator and accelerator.type in KINDS else "cpu"


def torch_neuronx_version() -> str:
    """Version of TorchNeuron, the package torch-neuronx.

    Raises:
        RuntimeError: it is missing, the public index's placeholder of that name (1.0), or built for another torch.
    """
    source = "install it from AWS's package index"
    try:
        found = version("torch-neuronx")
    except PackageNotFoundError:
        raise RuntimeError(f"torch-neuronx is not installed; {source}") from None
    if found.startswith("1."):
        raise RuntimeError(f"torch-neuronx {found} is the public index's empty placeholder; {source}")
    release = torch.__version__.split("+")[0]
    if found.split(".")[:2] != release.split(".")[:2]:
        raise RuntimeError(f"torch-neuronx {found} is not built for torch {release}; {source}")
    return found


def load_software(kind: str) -> None:
    """Import the package of a device type unless it is built into torch, missing or a placeholder.

    torch itself imports it only while `TORCH_DEVICE_BACKEND_AUTOLOAD` allows that.

    Raises:
        RuntimeError: it cannot be imported.
    """
    if kind != "neuron" or "torch_neuronx" in sys.modules:
        return
    try:
        found = torch_neuronx_version()
    except RuntimeError:  # reported where the device is used
        return
    try:
        import_module("torch_neuronx")
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f"torch-neuronx {found} cannot be imported: {error}; repair or remove it"
        ) from error


def register_replica_groups(name: str, groups: Sequence[Sequence[int]] | None) -> None:
    """Tell TorchNeuron, if it is loaded, the ranks of all groups of a registered name; None: forget them.

    Its compiler replaces a collective's name by the groups of all ranks. Unless a `DeviceMesh` has made them, it would know only
    this rank's, which does not compile: every rank must be in one, and each rank would have its own graph.
    """
    if "torch_neuronx" not in sys.modules:
        return
    try:
        known = vars(import_module("torch_neuronx.distributed.mesh_registry"))["_MESH_REGISTRY"]
    except (ImportError, KeyError) as error:
        log.warning(
            "cannot register the groups of collectives with TorchNeuron, so they may not compile: %s", error
        )
        return
    if groups is None:
        known.pop(name, None)
    else:
        known[name] = [list(ranks) for ranks in groups]


def has_adamw_kernel(kind: str) -> bool:
    """Whether AdamW's update has a kernel for this device type: torch's, or on GPUs ours."""
    return kind in ("cpu", "cuda")


class Download:
    """An asynchronous copy of a tensor to the host.

    Attributes:
        host: the copy, incomplete before `wait`.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host, self._event = tensor, None
        if tensor.device.type != "cpu":
            self.host = host_memory_for(tensor).copy_(tensor, non_blocking=True)
            self._event = torch.get_device_module(tensor.device).Event()
            self._event.record()

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self.host


def becomes_one_kernel(tensor: torch.Tensor) -> bool:
    """Whether elementwise operators and sums of them are compiled into one kernel for a GPU.

    They then replace scatters, for each of which deterministic GPUs launch about twenty kernels.
    """
    return tensor.is_cuda and torch.compiler.is_compiling()


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor to a device without waiting."""
    return page_locked(tensor, device).to(device, non_blocking=True)


def page_locked(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor in memory from which copies to a device are asynchronous."""
    return tensor.pin_memory() if _page_locks(device) else tensor


def set_current_device(device: torch.device) -> None:
    """Make a device this thread's current one; no effect for the CPU."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def current(kind: str) -> torch.device:
    """This thread's current device of this type."""
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )


def for_traces(kind: str) -> torch.device:
    """The device of fake tensors that stand for this type's; the CPU if this machine cannot stand for it.

    Torch has the operators of a device that is not built in wherever the device's package is loaded, also without hardware, and
    shapes and dispatch are the same. For GPUs they depend on the card: compilers and torch's choices of kernels ask it.
    """
    load_software(kind)
    known = torch.accelerator.current_accelerator()
    if kind == "cpu" or known is None or known.type != kind:
        return torch.device("cpu")
    if torch.accelerator.is_available():
        return current(kind)
    return torch.device("cpu") if kind == "cuda" else torch.device(kind, 0)


def host_memory_for(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialized host tensor for copies of `tensor`, page-locked if that makes copies asynchronous."""
    return torch.empty_like(tensor, device="cpu", pin_memory=_page_locks(tensor.device))


def _page_locks(device: torch.device) -> bool:
    kind = KINDS.get(device.type)
    return kind is not None and kind.page_locks


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of torch's random generators on the host and on a device, as bytes."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_random_states(device: torch.device, states: dict[str, torch.Tensor]) -> None:
    """Restore the states returned by `random_states`."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type])


def platform_tag(kind: str) -> str:
    """The hardware that compiled code depends on: processor and vector units, or GPU architecture."""
    if kind == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"cuda-sm{major}{minor}"
    if kind == "cpu":
        return f"cpu-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    return kind
