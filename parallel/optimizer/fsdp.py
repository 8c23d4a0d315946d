"""FSDP (arXiv 2304.11277; ZeRO stage 3, arXiv 1910.02054): parameters are gathered when needed.

The model is divided into units: the embedding, each block, the head. A unit's matrices are one bucket, of which each of d ranks
keeps a shard; vectors (norms, biases) are small and stay resident, as in ZeRO-1. In a step with m microbatches:

    forward    a block's weights are gathered when the block before it starts, and released when it ends
    backward   the same in reverse order; the gradients, complete with the block's backward, are reduce-scattered while the next
               block runs, and added to a float32 shard
    embedding, head   gathered once per step
    with `keep_gathered`   blocks too, and gradients are reduced once per step

Elements sent by a rank for n parameters of blocks: 3m·n(d-1)/d, or 2n(d-1)/d with `keep_gathered`. Bytes per parameter in bf16:
16/d with float32 gradients, and at most two blocks' weights and gradients in full.

Two ways to run the same sharding:

    gather_on_use     hooks outside compiled code start asynchronous collectives, which run on the process group's own stream
    gather_in_graph   a block's forward gathers its weights by functional collectives, which a compiler schedules with the rest of
                      the block's graph: gathered again in its backward graph, which ends with the reduce-scatter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from parallel import collectives
from parallel.mesh import Axis
from parallel.optimizer.buckets import Bucket


@dataclass
class Unit:
    """A part of a model whose matrices are gathered together."""

    users: tuple[nn.Module, ...]  # modules before whose forward passes the weights are gathered
    prefixes: tuple[str, ...]  # of its parameters' names
    block: bool = False  # whether its only user is its own module, so that the weights can be released after its forward
    in_graph: bool = False  # whether its module gathers the weights itself (`gather_in_graph`)
    buckets: list[Bucket] = field(default_factory=list)  # set by the optimizer

    def holds(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter belongs to this unit."""
        return parameter.dim() > 1 and name.startswith(self.prefixes)

    def start_gather(self) -> None:
        for bucket in self.buckets:
            bucket.start_gather()

    def gather(self) -> None:
        self.start_gather()
        for bucket in self.buckets:
            bucket.wait()

    def release(self) -> None:
        for bucket in self.buckets:
            bucket.release()

    def release_frozen(self) -> None:
        """Release frozen weights, which no gradient releases, once the unit's backward has ended."""
        for bucket in self.buckets:
            if bucket.frozen and self.block:
                bucket.release()


def gather_on_use(units: Sequence[Unit], keep: bool) -> None:
    """Register hooks that gather a unit's weights for forward and backward and prefetch the next unit's.

    Args:
        units: of a stage, in the order of forward.
        keep: whether the weights of blocks stay gathered until the optimizer releases them.
    """
    for number, unit in enumerate(units):
        before, after = units[number - 1 : number] if number else (), units[number + 1 : number + 2]
        # The last block before the head starts backward right after its forward.
        last = bool(after) and not after[0].block
        if unit.in_graph:
            _bind(unit)
            continue
        for user in unit.users:
            user.register_forward_pre_hook(_before_forward(unit, after))
        if unit.block and not keep:
            unit.users[0].register_forward_hook(_after_forward(unit, before, after, last))


def _before_forward(unit: Unit, following: Sequence[Unit]) -> Any:
    def hook(module: nn.Module, inputs: Any) -> None:
        unit.gather()
        for other in following:
            other.start_gather()

    return hook


def _after_forward(unit: Unit, previous: Sequence[Unit], following: Sequence[Unit], last: bool) -> Any:
    def before_backward(gradient: Tensor) -> None:
        for other in following:
            other.release_frozen()
        unit.gather()
        for other in previous:
            other.start_gather()

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        trains = torch.is_grad_enabled() and output.requires_grad
        if trains:
            output.register_hook(before_backward)
        if not (trains and last):
            unit.release()

    return hook


def gather_in_graph(block: nn.Module) -> None:
    """Let a block's forward gather its weights, once the optimizer has sharded them.

    Call it after applying activation checkpointing and before compiling the block.
    """
    owner: Any = block  # for torch, attributes of a module are tensors and modules
    forward = block.forward
    owner.gathers = []  # functions that gather a bucket, and the module and attribute of each parameter in it

    @wraps(forward)
    def gathered(*inputs: Any) -> Any:
        for shard, gather, attributes in owner.gathers:
            # The backward graph gathers again instead of saving what forward gathered.
            weights = checkpoint(gather, shard, use_reentrant=False, preserve_rng_state=False)
            for weight, (module, name) in zip(weights, attributes, strict=True):
                setattr(module, name, weight)
        output = forward(*inputs)
        # Otherwise a graph would return the weights. Eager recomputation still reads them.
        if torch.compiler.is_compiling():
            for _, _, attributes in owner.gathers:
                for module, name in attributes:
                    setattr(module, name, None)
        return output

    owner.forward = gathered


def _bind(unit: Unit) -> None:
    """Replace parameters of a block that gathers in its graph with shards, which receive the gradients."""
    block: Any  # for torch, attributes of a module are tensors and modules
    (block,) = unit.users
    owners = {id(p): (module, name) for module in block.modules() for name, p in module._parameters.items()}
    for number, bucket in enumerate(unit.buckets):
        shard = nn.Parameter(bucket.master, requires_grad=not bucket.frozen)
        block.register_parameter(f"shard_{number}", shard)
        if not bucket.frozen:
            bucket.gather_in_graph(shard)
        attributes = []
        for slot in bucket.slots:
            module, name = owners[id(slot.parameter)]
            delattr(module, name)
            setattr(module, name, None)
            attributes.append((module, name))
        dtype, wide = bucket.values.dtype, bucket.gradient_dtype
        gather = partial(_gather, axis=bucket.axis, dtype=dtype, wide=wide, parts=bucket.parts())
        block.gathers.append((shard, gather, attributes))


class _GatherWeights(Function):
    """Float32 shard (p) -> weights (n·p) in `dtype`; the gradient is reduce-scattered in `wide`."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
        ctx.axis, ctx.wide = axis, wide
        return collectives.all_gather(shard.to(dtype), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.reduce_scatter(grad.to(ctx.wide), ctx.axis).float(), None, None, None


def _gather(
    shard: Tensor,
    axis: Axis,
    dtype: torch.dtype,
    wide: torch.dtype,
    parts: Sequence[tuple[int, torch.Size | None]],
) -> list[Tensor]:
    """The weights of a bucket, from its `parts`."""
    flat = _GatherWeights.apply(shard, axis, dtype, wide).split([size for size, _ in parts])
    return [x.view(shape) for x, (_, shape) in zip(flat, parts, strict=True) if shape is not None]
