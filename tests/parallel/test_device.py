"""The device of process groups, threads and kernels, without a GPU: calls to torch are recorded."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel import device as devices
from tests.pool import mesh


def test_process_groups_of_gpus_are_bound_to_their_device(monkeypatch):
    """They then connect when they are created, and never on device 0."""
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: calls.append((given, named)))
    limit, gpu = timedelta(seconds=7), torch.device("cuda", 3)
    devices.ACCELERATORS["h100"].start_process_group(gpu, limit)
    devices.CPU.start_process_group(torch.device("cpu"), limit)
    assert calls == [
        (("nccl",), {"timeout": limit, "device_id": gpu}),
        (("gloo",), {"timeout": limit, "device_id": None}),
    ]


def mesh_beside_a_gpu() -> None:
    """Create a mesh as on a GPU, to which torch binds the host group too."""
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    try:
        with mesh(data=2):
            pass
    finally:
        dist.group.WORLD.bound_device_id = None


def test_barrier_of_a_mesh_needs_no_device_memory(pool):
    """torch without CUDA could not allocate any."""
    pool.run(mesh_beside_a_gpu, 2)


def test_thread_gets_the_device_of_its_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    devices.set_current_device(torch.device("cuda", 3))
    devices.set_current_device(torch.device("cpu"))
    assert chosen == [3]


@pytest.mark.parametrize("deterministic", [True, False])
def test_gpus_use_deterministic_kernels_if_asked(deterministic):
    try:
        devices.ACCELERATORS["h200"].choose_kernels(deterministic)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert not torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(False)
        devices.CPU.choose_kernels(deterministic=True)  # its kernels are deterministic
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize(
    ("gpu", "gigabytes", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 85, "h100"),
        ("NVIDIA H200", 150, "h200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, "cuda"),
        ("NVIDIA H100 PCIe", 85, "cuda"),
        ("NVIDIA GH200 480GB", 100, "cuda"),
        ("NVIDIA A100-SXM4-80GB", 85, "cuda"),
    ],
)
def test_gpu_has_the_figures_of_its_name_unless_it_is_another_variant(monkeypatch, gpu, gigabytes, name):
    """Calibrations are stored by this name; `torch.cuda` is mocked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    properties = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    found = devices.resolve("cuda")
    assert devices.name_of(found) == name
    assert found.memory_bytes <= properties.total_memory
