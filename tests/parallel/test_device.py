"""The device of process groups, threads and kernels, without a GPU: calls to torch are recorded."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel import device as devices
from parallel.mesh import Axis
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


@contextmanager
def world_bound_to(device: str | None) -> Iterator[None]:
    world = dist.group.WORLD
    before, world.bound_device_id = world.bound_device_id, torch.device(device) if device else None
    try:
        yield
    finally:
        world.bound_device_id = before


def mesh_beside_a_gpu() -> None:
    """Create a mesh as on a GPU, to which torch binds the host group too."""
    with world_bound_to("cuda:0"), mesh(data=2):
        pass


def test_barrier_of_a_mesh_needs_no_device_memory(pool):
    """torch without CUDA could not allocate any."""
    pool.run(mesh_beside_a_gpu, 2)


def split_mesh(degrees: dict[str, int]) -> tuple[list[str], dict[str, tuple[tuple[int, ...], float]]]:
    """The axes whose groups were made by splits, and each group's ranks with their sum.

    Only NCCL splits reliably, so the split is a mock.
    """
    new_group, split, made = dist.new_group, [], {}

    def split_group(split_ranks: list[list[int]], timeout: timedelta | None, group_desc: str) -> Any:
        split.append(group_desc)
        with world_bound_to(None):
            groups = [new_group(ranks, timeout=timeout) for ranks in split_ranks]
        return next((group for group in groups if isinstance(group, dist.ProcessGroup)), None)

    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(dist, "new_group", side_effect=AssertionError("a split for each group")),
        mock.patch.object(dist, "split_group", split_group),
        world_bound_to("cuda:0"),
        mesh(**degrees) as m,
    ):
        for axis in vars(m).values():
            if isinstance(axis, Axis) and axis.group is not None and axis.name not in made:
                total = torch.tensor(float(m.rank))
                dist.all_reduce(total, group=axis.group)
                made[axis.name] = axis.ranks, total.item()
    return split, made


def test_groups_of_an_axis_are_made_by_one_split_of_the_world(pool):
    """Also if the ranks of a middle pipeline stage are not in a group of the embedding."""
    degrees = {"pipeline": 3, "data": 2, "pipeline_lanes": 2}
    for rank, (split, made) in enumerate(pool.run(split_mesh, 6, degrees=degrees)):
        assert split == ["pipeline", "pipeline_1", "dp_shard", "embedding"]
        stage, pair, line = rank // 2, (rank & ~1, rank | 1), (rank % 2, rank % 2 + 2, rank % 2 + 4)
        ranks = {"pipeline": line, "pipeline_1": line, "dp_shard": pair, "world": tuple(range(6))}
        if stage != 1:
            ranks["embedding"] = line[::2]
        assert made == {name: (each, sum(each)) for name, each in ranks.items()}


def test_thread_gets_the_device_of_its_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    devices.set_current_device(torch.device("cuda", 3))
    devices.set_current_device(torch.device("cpu"))
    assert chosen == [3]


@pytest.mark.parametrize("deterministic", [True, False])
def test_gpus_use_deterministic_kernels_and_reductions_if_asked(deterministic, monkeypatch):
    environment = {}
    monkeypatch.setattr(os, "environ", environment)
    try:
        devices.ACCELERATORS["h200"].choose_kernels(deterministic)
        assert environment == ({"NCCL_ALGO": "^NVLS,NVLSTree"} if deterministic else {})
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert not torch.utils.deterministic.fill_uninitialized_memory
        environment.clear()
        with devices.ACCELERATORS["h200"].chosen_kernels(deterministic):
            pass
        assert not environment
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
        ("NVIDIA B200", 191, "b200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, "cuda"),
        ("NVIDIA H100 PCIe", 85, "cuda"),
        ("NVIDIA GH200 480GB", 100, "cuda"),
        ("NVIDIA A100-SXM4-80GB", 85, "a100"),
        ("NVIDIA A100-SXM4-40GB", 42, "cuda"),
        ("NVIDIA A100 80GB PCIe", 85, "cuda"),
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
    assert found.memory_bytes == properties.total_memory
