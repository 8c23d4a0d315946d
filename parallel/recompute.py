"""Activation checkpointing: what backward needs is computed again instead of kept (arXiv 1604.06174).

    none        everything is kept
    selective   of a block, its input and the results of its projections and their reductions are kept; norms, rotation, the
                attention core and activation × gate are computed again (arXiv 2205.05198, section 5)
    full        a block's input alone is kept, and its forward is computed again: a third more work

Where blocks are compiled, the recomputation is in the block's graph, and what it does not need (collectives whose result
feeds a kept projection alone) falls out of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
    contexts = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if mode == "selective" else {}
    )
    for number, block in enumerate(blocks):
        if count is None or number < count:
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


def _policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
