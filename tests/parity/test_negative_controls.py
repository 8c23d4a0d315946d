"""Negative controls: the parity comparison detects deliberate faults."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.data.prefetch import Batch
from modeling.training.trainer import Trainer
from parallel import Axis, ShardedAdamW
from parallel.experts.router import Routed
from parallel.layout import layout_of
from tests.parity.harness import Case, differences, document_starts, one_process, run


def drop_an_all_reduce(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """One row-parallel layer returns its partial sum."""
    down = trainer.stages[0].layers["1"].mlp.down
    down.forward = lambda x, keys=None: F.linear(x, down.weight)


def swap_kv_heads(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """In one layer, the first and the second half of the tensor ranks swap KV heads."""
    qkv, axis = trainer.stages[0].layers["0"].attention.qkv, trainer.mesh.tensor
    layout = layout_of(qkv.weight)
    other = (axis.rank + axis.size // 2) % axis.size
    for box in layout.boxes("layers.0.attention.qkv.weight", other):
        if ".q." not in box.name:
            layout.initializer.fill(box.view(qkv.weight.detach()), box, trainer.profile.train.seed)


def count_replicas_twice(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """Both ranks that share a KV head count it fully in the gradient norm."""
    for bucket in optimizer.buckets:
        bucket.norm_weights[bucket.norm_weights == 0.5] = 1.0


def ignore_a_boundary(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """One context rank treats two documents as one."""
    if trainer.mesh.context.rank == 0:
        forward_backward = trainer.forward_backward

        def with_one_document(batch: Batch, scale: float, first: int, **options: float) -> Tensor:
            starts = document_starts(first, len(batch.tokens), ((5,),))
            return forward_backward(batch._replace(documents=starts), scale, first, **options)

        trainer.forward_backward = with_one_document


def forget_a_reduction(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """A rank keeps its own gradients of one block instead of their sum."""
    bucket = next(bucket for bucket in optimizer.buckets if not bucket.resident)
    take, add = bucket.take_gradients, bucket.add_sum
    own = []

    def take_gradients() -> Tensor:
        own.append(take())
        return own[-1]

    bucket.take_gradients = take_gradients
    bucket.add_sum = lambda total: add(bucket.local_shard(own[-1]))


def use_stale_weights(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """One block's weights are not gathered again after a step."""
    name = "layers.0.attention.qkv.weight"
    bucket = next(b for b in optimizer.buckets if any(slot.name == name for slot in b.slots))
    bucket.release = bucket.wait


def drop_an_expert(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """The last expert of each rank computes nothing in one layer."""
    down = trainer.experts[0].down.weight.detach()
    down[-trainer.profile.model.hidden_size :] = 0


def send_a_token_twice(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """One rank sends the second choice of its first token to the expert of the first choice too."""
    router = trainer.experts[0].router
    forward = router.forward

    def routed(x: Tensor, route: Callable[[Tensor], Tensor]) -> Routed:
        def route_twice(indices: Tensor) -> Tensor:
            indices = indices.clone()
            indices[0, 1] = indices[0, 0]
            return route(indices)

        return forward(x, route_twice)

    if trainer.mesh.rank == 0:
        router.forward = routed


def count_own_choices_only(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """Each context rank balances by the statistics of its own tokens."""
    for layer in trainer.experts.values():
        layer.mesh = copy.copy(layer.mesh)
        layer.mesh.context = Axis("context")


def ignore_the_load_of_a_rank(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """The selection biases of experts are updated by one rank's choices only."""
    if trainer.mesh.rank:
        for layer in trainer.experts.values():
            layer.router.selection_bias.register_hook(torch.zeros_like)


EXPERTS = Case("mixtral", data=2, expert=2)
FAULTS = {
    drop_an_expert: (EXPERTS, "losses, step 0"),
    send_a_token_twice: (EXPERTS, "norms, step 0"),
    ignore_the_load_of_a_rank: (
        Case("deepseek_v3", data=2, expert=2, balance="bias"),
        "gradients, layers.1.mlp.router.selection_bias",
    ),
    count_own_choices_only: (Case("mixtral", context=2, expert=2), "gradients, layers.0.mlp.router"),
    drop_an_all_reduce: (Case(tensor=2, sequence_parallel=False), "losses, step 0"),
    swap_kv_heads: (Case(tensor=4), "losses, step 0"),
    count_replicas_twice: (Case(tensor=4), "norms, step 0"),
    forget_a_reduction: (Case(data=2, sharding="fsdp"), "norms, step 0"),
    use_stale_weights: (Case(data=2, sharding="fsdp"), "losses, step 1"),
    ignore_a_boundary: (Case(context=2, documents=True), "losses, step 0"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_detected(fault, pool):
    case, expected = FAULTS[fault]
    found = differences(run(case, pool, fault), one_process(case.reference))
    assert any(difference.startswith(expected) for difference in found), found
