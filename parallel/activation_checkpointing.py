"""Activation checkpointing: what backward needs is computed again instead of kept (arXiv 1604.06174).

    none        everything is kept
    selective   of a block, its input and the results of its projections are kept (reduced ones, where they are reduced); norms,
                rotation, the attention core and activation × gate are computed again (arXiv 2205.05198, section 5)
    full        a block's input alone is kept, and its forward is computed again: a third more work

Where blocks are compiled, the recomputation is in the block's graph, and what it does not need (collectives whose result
feeds a kept projection alone) falls out of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallel.layers import RowParallelLinear

MODES = ("none", "selective", "full")


def recompute(blocks: Iterable[nn.Module], mode: str, count: int | None = None) -> None:
    """Set how the blocks' activations are kept; before they are compiled.

    Args:
        mode: one of MODES.
        count: how many blocks, from the first on, this applies to; all by default.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"recompute = {mode!r} is not one of {', '.join(MODES)}")
    if mode == "none":
        return
    # Where blocks are compiled it asks each run to make sure that none writes in place; none does.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for number, block in enumerate(blocks):
        if count is None or number < count:
            contexts: dict[str, Any] = {}
            if mode == "selective":
                policy = partial(_policy, _reduced(block))
                contexts["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
            block.forward = _checkpointed(block.forward, contexts)


def _checkpointed(forward: Any, contexts: dict[str, Any]) -> Any:
    @wraps(forward)
    def again(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        # Dropout's masks depend on no generator (random.py), so there is no state to keep.
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)

    return again


_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)


def _reduced(block: nn.Module) -> frozenset[tuple[int, ...]]:
    """Shapes of the right-hand sides of products that are reduced at once: b·s × h before, and a t-th of it after.

    Where a column layer's weight is of such a shape by chance, its product is computed again.
    """
    rows = (layer for layer in block.modules() if isinstance(layer, RowParallelLinear))
    return frozenset(tuple(row.weight.t().shape) for row in rows if row.axis.size > 1 and row.axis.reduces)


def _policy(
    reduced: frozenset[tuple[int, ...]], context: Any, operator: Any, *arguments: Any, **named: Any
) -> CheckpointPolicy:
    kept = operator in _KEPT
    if operator is torch.ops.aten.mm.default and tuple(arguments[1].shape) in reduced:
        kept = False
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
