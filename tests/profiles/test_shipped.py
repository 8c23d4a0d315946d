"""Every shipped profile at full size: parameters, topology and shapes, without a device."""

import math
from collections import Counter
from functools import cache
from typing import get_args

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from modeling.models.build import MODELS, partition_layers
from modeling.planning.planner import plan
from parallel import Mesh
from parallel import device as devices
from parallel.layout import layout_of
from profiles import resolve
from profiles.check import ACCELERATORS
from profiles.schema import Cluster, Profile

# Exact numbers of parameters; GPT-3's with a vocabulary of 50257, tied.
PARAMETERS = {
    "llama2-7b": 6738415616,
    "llama2-13b": 13015864320,
    "llama2-70b": 68976648192,
    "llama3-8b": 8030261248,
    "llama3-70b": 70553706496,
    "llama3.1-405b": 405853388800,
    "deepseek-coder-1.3b": 1346471936,
    "deepseek-coder-6.7b": 6740512768,
    "deepseek-coder-33b": 33342991360,
    "gpt3-23b": 22980059136,
    "gpt3-46b": 45531619328,
    "gpt3-175b": 174604259328,
}
# Accelerator and nodes; tensor, pipeline, context, data; KV replicas; sequence and batch; steps.
RUNS = {
    "llama2-7b": ("trn1", 4, (8, 1, 1, 16), 1, (4096, 1024), 10000),
    "llama2-13b": ("trn1", 32, (8, 4, 1, 32), 1, (4096, 1024), 30000),
    "llama2-70b": ("trn1", 32, (32, 8, 1, 4), 4, (4096, 1024), 30000),
    "llama3-8b": ("trn2", 1, (16, 1, 1, 4), 2, (8192, 1024), 10000),
    "llama3-8b-trn1": ("trn1", 4, (32, 1, 1, 4), 4, (8192, 1024), 10000),
    "llama3-70b": ("trn2", 8, (32, 4, 1, 4), 4, (8192, 1024), 10000),
    "llama3-70b-trn1": ("trn1", 16, (32, 8, 1, 2), 4, (8192, 1024), 30000),
    "llama3-70b-cp": ("trn1", 16, (32, 8, 2, 1), 4, (8192, 1024), 30000),
    "llama3.1-8b": ("trn2", 1, (16, 1, 1, 4), 2, (8192, 1024), 10000),
    "llama3.1-70b": ("trn2", 8, (32, 4, 1, 4), 4, (8192, 1024), 10000),
    "llama3.1-70b-trn1": ("trn1", 32, (32, 8, 1, 4), 4, (8192, 1024), 30000),
    "llama3.1-405b-trn1": ("trn1", 64, (32, 32, 1, 2), 4, (8192, 256), 30000),
    "gpt3-23b": ("trn1", 4, (8, 4, 1, 4), 1, (2048, 128), 300000),
    "gpt3-46b": ("trn1", 8, (8, 8, 1, 4), 1, (2048, 256), 300000),
    "gpt3-175b": ("trn1", 8, (32, 8, 1, 1), 1, (2048, 64), 300000),
    "deepseek-coder-1.3b": ("trn1", 1, (8, 1, 1, 4), 1, (4096, 256), 1000),
    "deepseek-coder-6.7b": ("trn1", 1, (8, 1, 1, 4), 1, (4096, 256), 1000),
    "deepseek-coder-33b": ("trn1", 4, (8, 4, 1, 4), 1, (4096, 256), 1000),
    "llama3-8b-h200": ("h200", 1, (1, 1, 1, 8), 1, (8192, 1024), 10000),
    "llama3-70b-h200": ("h200", 8, (4, 4, 1, 4), 1, (8192, 1024), 10000),
}


def parameters_of(name: str) -> int:
    """By the longest of the table's names that begins a profile's, 3.1 being as large as 3."""
    plain = name if name in PARAMETERS or "405b" in name else name.replace("3.1", "3")
    return PARAMETERS[max((known for known in PARAMETERS if plain.startswith(known)), key=len)]


@cache
def load(name: str) -> Profile:
    profile = resolve.load(name)
    resolve.check(profile)
    return profile


def build(profile: Profile, mesh: Mesh, layers: range):
    sequence_parallel = profile.parallel.sequence_parallel
    return MODELS[profile.model.architecture](
        profile.model, mesh, layers, sequence_parallel=sequence_parallel, device="meta"
    )


def degrees_of(profile: Profile) -> tuple[int, ...]:
    return profile.parallel.pipeline, profile.data_parallel, profile.parallel.context, profile.parallel.tensor


def test_every_shipped_profile_is_in_the_table():
    assert {*RUNS, "tiny"} == set(resolve.names())


def test_schema_accelerators_are_those_with_specifications():
    field = Cluster.model_fields["accelerator"].annotation
    assert {*get_args(get_args(field)[0])} == devices.ACCELERATORS.keys()
    kinds = {name: kind for kind, names in ACCELERATORS.items() for name in names}
    assert {name: device.type for name, device in devices.ACCELERATORS.items()} == kinds


@pytest.mark.parametrize("name", RUNS)
def test_shipped_settings_match_the_table(name):
    accelerator, nodes, degrees, kv_replication, batch, steps = RUNS[name]
    profile = load(name)
    assert (profile.cluster.accelerator, profile.cluster.nodes) == (accelerator, nodes)
    assert profile.cluster.devices_per_node == {"trn1": 32, "trn2": 64, "h200": 8}[accelerator]
    pipeline, data, context, tensor = degrees_of(profile)
    assert (tensor, pipeline, context, data) == degrees
    assert profile.kv_replication == kv_replication
    assert (profile.train.sequence_length, profile.train.global_batch_size) == batch
    assert (profile.train.steps, profile.train.micro_batch_size, profile.train.seed) == (steps, 1, 1234)


@pytest.mark.parametrize("name", RUNS)
def test_parameters_match_the_table_and_the_plan_fits_with_5_percent_margin(name):
    planned = plan(load(name))
    assert planned.parameters == load(name).model.parameters == parameters_of(name)
    assert max(stage.total for stage in planned.stages) <= 0.95 * planned.device_bytes
    assert planned.fits


@pytest.mark.parametrize("name", RUNS)
def test_ranks_hold_their_shares_of_the_whole_model(name):
    profile = load(name)
    model, stages = profile.model, partition_layers(profile)
    assert [layer for layers in stages for layer in layers] == list(range(model.num_hidden_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 2
    pipeline, data, context, tensor = degrees_of(profile)
    for place in {0, 1, pipeline - 1} & set(range(pipeline)):
        mesh = Mesh(
            pipeline, data, context, tensor, profile.kv_replication, rank=place * data * context * tensor
        )
        layers = stages[place]
        stage = build(
            profile, mesh, layers[:1] if place + 1 < pipeline else layers[-1:]
        )  # one layer is as all
        held: Counter[str] = Counter()
        shapes: dict[str, int] = {}
        for parameter_name, parameter in stage.named_parameters():
            layout = layout_of(parameter)
            assert parameter.shape == layout.local_shape()
            for box in (box for rank in range(tensor) for box in layout.boxes(parameter_name, rank)):
                shapes[box.name] = math.prod(box.shape)
                held[box.name] += math.prod(box.sizes) / box.replicas
                if ".qkv.k." in box.name or ".qkv.v." in box.name:
                    assert box.replicas == profile.kv_replication
                if ".qkv.q." in box.name:
                    assert box.sizes[0] == model.num_attention_heads // tensor * model.head_dim
        assert held == shapes


@pytest.mark.parametrize("name", ["llama3-70b", "llama3-70b-cp", "gpt3-175b"])
def test_rank_of_the_full_world_builds_its_stage(name):
    """Under a process group of the run's size, of which one rank is here."""
    profile = load(name)
    pipeline, data, context, tensor = degrees_of(profile)
    rank = profile.world_size - 1
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=profile.world_size)
    try:
        mesh = Mesh(pipeline, data, context, tensor, profile.kv_replication)
        expected = {"pipeline": pipeline - 1, "data": data - 1, "context": context - 1, "tensor": tensor - 1}
        assert mesh.coordinates() == expected
        assert mesh.tensor.ranks == tuple(range(rank - tensor + 1, rank + 1))
        node = profile.cluster.devices_per_node
        assert {each // node for each in mesh.tensor.ranks} == {profile.cluster.nodes - 1}  # all on one node
        stage = build(profile, mesh, partition_layers(profile)[-1])
        assert stage.last
        assert not stage.first
        mesh.close()
    finally:
        dist.destroy_process_group()
