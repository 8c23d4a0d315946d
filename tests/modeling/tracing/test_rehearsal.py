"""Rehearsal: the optimizer's rehearsed programs are those of a step."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch

from modeling.models.build import build_optimizer, build_stage, partition_layers
from modeling.tracing.trace import fake_world
from parallel import device
from parallel.optimizer import buckets
from profiles.resolve import load
from tests.modeling import micro

FSDP = "parallel.data_sharding=fsdp"
BF16 = ("train.precision=bf16", "train.gradient_dtype=bf16")
TIED = ("model.tie_word_embeddings=true", "parallel.pipeline=2")


@pytest.mark.parametrize(
    "settings",
    [(*BF16, FSDP, "parallel.shard_degree=2"), (*BF16, FSDP), BF16, (*BF16, *TIED), (*TIED, FSDP)],
    ids=["hsdp", "fsdp", "zero1", "tied ends", "tied ends, fsdp"],
)
def test_rehearsal_runs_the_programs_of_a_step(tmp_path, monkeypatch, settings):
    """In bf16, where shards, sums over replicas and what graphs return differ in dtype."""
    monkeypatch.setattr(buckets, "resize_storage", lambda *_: None)  # rehearsals have fake tensors
    alone = ("parallel.tensor=1", "cluster.devices_per_node=4", "train.micro_batch_size=1")
    compiled = ("cluster.device=neuron", "compile.enabled=true")
    options = (*compiled, "train.global_batch_size=8", *alone, *settings)
    profile = load(str(micro.run_folder(tmp_path, *options) / "profile.yaml"))
    called: set[tuple[Any, ...]] = set()

    def compile(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            called.add((function.__name__, *map(described, (*arguments, *named.items()))))
            return function(*arguments, **named)

        return run

    with fake_world(profile, 0, 0) as mesh, device.NEURON.chosen_kernels(True):
        model = build_stage(profile, mesh, partition_layers(profile)[0], torch.device("cpu"))
        optimizer = build_optimizer(profile, [model], mesh, compile)
        optimizer.rehearse(profile.accumulation_steps)
        rehearsed = called.copy()
        called.clear()
        optimizer.begin_step(profile.accumulation_steps)
        tokens = torch.zeros(1, profile.train.sequence_length, dtype=torch.int64)
        for _ in range(profile.accumulation_steps):
            output = model(tokens, torch.arange(tokens.numel()))
            (model.loss(output, tokens) if model.last else output).sum().backward()
        optimizer.step(1e-3, torch.zeros((), dtype=torch.bool))
    assert {name for name, *_ in called} >= {"assign", "square_norm", "clip", "update"}
    assert called <= rehearsed, called - rehearsed


def described(argument: Any) -> Any:
    """What a compiler knows of an argument."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, list | tuple):
        return tuple(map(described, argument))
    return type(argument) if isinstance(argument, float) else argument
