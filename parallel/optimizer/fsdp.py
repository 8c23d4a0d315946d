"""FSDP (arXiv 2304.11277; stage 3 of ZeRO, arXiv 1910.02054): parameters are gathered when a part of the model needs them.

The model is divided into units: the embedding, each block, the head. A unit's matrices are one bucket, of which each of d ranks
keeps a shard; vectors (norms, biases) stay resident as in ZeRO-1, they are small. In a step with m microbatches:

    forward    a block's weights are gathered when the block before it starts, and released when it ends
    backward   the same in reverse order; the gradients, complete with the block's backward, are reduce-scattered while the next
               block runs, and added to a float32 shard
    embedding, head   gathered once a step
    with `keep_gathered`   blocks too, and gradients are reduced once a step

Elements sent by a rank for n parameters of blocks: 3m·n(d-1)/d, or 2n(d-1)/d with `keep_gathered`. Bytes per parameter in bf16:
16/d with float32 gradients, and at most two blocks' weights and gradients in full.

Collectives run asynchronously: on cuda on the process group's own stream, so they overlap with the blocks' kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel.optimizer.buckets import Bucket


@dataclass
class Unit:
    """A part of a model whose matrices are gathered together."""

    users: tuple[nn.Module, ...]  # modules before whose forward passes the weights are gathered
    prefixes: tuple[str, ...]  # of its parameters' names
    block: bool = False  # whether its only user is its own module, so that the weights can be released after its forward
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


def gather_on_use(units: Sequence[Unit], keep: bool) -> None:
    """Register hooks that gather the weights of a stage's units for forward and backward, and prefetch the next unit's.

    Args:
        units: in the order of forward.
        keep: whether the weights of blocks stay gathered until the optimizer releases them.
    """
    for number, unit in enumerate(units):
        before, after = units[number - 1 : number] if number else (), units[number + 1 : number + 2]
        # The last block before the head starts backward right after its forward.
        last = bool(after) and not after[0].block
        for user in unit.users:
            user.register_forward_pre_hook(_before_forward(unit, after))
        if unit.block and not keep:
            unit.users[0].register_forward_hook(_after_forward(unit, before, last))


def _before_forward(unit: Unit, following: Sequence[Unit]) -> Any:
    def hook(module: nn.Module, inputs: Any) -> None:
        unit.gather()
        for other in following:
            other.start_gather()

    return hook


def _after_forward(unit: Unit, previous: Sequence[Unit], last: bool) -> Any:
    def before_backward(gradient: Tensor) -> None:
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
