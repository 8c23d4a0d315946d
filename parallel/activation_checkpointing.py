"""Activation checkpointing (arXiv 1604.06174): recompute activations in backward to save memory.

    none        saves all activations
    selective   saves a block's input, its projections' outputs, after their reduction or exchange if they have one, and
                attention's output with its log-sum-exp; recomputes what is cheap: norms, rotary embedding, activation × gate. No
                matrix product, attention, ring communication or exchange of experts with a capacity runs twice, except in eager
                mode products whose reduced or exchanged output is saved
    full        saves a block's input only and recomputes its forward pass: a third more compute

Operators whose outputs `selective` saves are registered where they are defined (`always_save`) or annotated where they are called
(`saving_outputs`). `full` saves those that make the host wait (`computed_once`).

In compiled blocks the recomputation is part of the block's graph, and dead code elimination removes what backward does not
need, such as collectives that feed only a saved projection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallel.constraints import RECOMPUTE_MODES as MODES
from parallel.host_products import ONEDNN_PRODUCTS
from parallel.torch_internals import WRAP_LOGGER, all_reduce, reduce_scatter_tensor

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, *ONEDNN_PRODUCTS)
_saved: set[Any] = {*_PRODUCTS, all_reduce.default, reduce_scatter_tensor.default}
_saved_in_full: set[Any] = set()
_thread = threading.local()  # its `results`: of `computed_once` in the running forward pass or recomputation
_RECOMPUTE_PRODUCTS = "recompute_products"
_SAVE_OUTPUTS = "save_outputs"


def apply_activation_checkpointing(blocks: Iterable[nn.Module], modes: str | Sequence[str]) -> None:
    """Wrap the forward passes of blocks in activation checkpointing; call it before they are compiled.

    Args:
        modes: one of MODES, or one for each block; stored as the block's `checkpointing`.

    Raises:
        ValueError: unknown mode, or modes and blocks differ in number.
    """
    blocks = [*blocks]
    modes = [modes] * len(blocks) if isinstance(modes, str) else modes
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"recompute = {mode!r} is not one of {', '.join(MODES)}")
    # torch warns about in-place operations, of which the blocks have none, once per compiled block.
    logging.getLogger(WRAP_LOGGER).setLevel(logging.ERROR)
    selective, full = (
        {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
        for policy in (_policy, _full_policy)
    )
    eager: dict[str, Any] = {"context_fn": _Results.contexts}
    block: Any  # for torch, attributes of a module are tensors and modules
    for block, mode in zip(blocks, modes, strict=True):
        block.checkpointing = mode
        if mode != "none":
            once = any(getattr(module, "computes_once", False) for module in block.modules())
            contexts = (selective, selective) if mode == "selective" else (full, eager) if once else ({}, {})
            block.forward = _checkpointed(block.forward, *contexts)


def always_save(*operators: Any, in_full: bool = False) -> None:
    """Register operators whose outputs `selective` always saves, because they are costly to recompute.

    Args:
        operators: overloads or higher-order operators.
        in_full: whether `full` saves them, too, in blocks with modules whose `computes_once` is true. They are called by
            `computed_once`.
    """
    _saved.update(operators)
    if in_full:
        _saved_in_full.update(operators)


def computed_once(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator registered with `in_full`; recomputation returns the results of the forward pass."""
    results = None if torch.compiler.is_compiling() else getattr(_thread, "results", None)
    return operator(*arguments) if results is None else results.next(operator, arguments)


def repeats_computed_once() -> bool:
    """Whether this thread recomputes a block that calls `computed_once`."""
    results = getattr(_thread, "results", None)
    return results is not None and results.recomputes


def recomputing_products() -> AbstractContextManager[None]:
    """Within this block, `selective` recomputes matrix products, because their reduced output is saved."""
    return traceback.annotate({_RECOMPUTE_PRODUCTS: True})


def saving_outputs() -> AbstractContextManager[None]:
    """Within this block, `selective` saves each operator's output: its inputs are costly to recompute.

    In compiled transformer blocks only outputs that the block's own output depends on: torch's partitioner recomputes the others
    anyway.
    """
    return traceback.annotate({_SAVE_OUTPUTS: True})


class _Results:
    """Results of `computed_once` in a forward pass, which recomputation takes in the same order."""

    def __init__(self, results: list[Any], recomputes: bool) -> None:
        self.results, self.recomputes = results, recomputes

    @classmethod
    def contexts(cls) -> tuple[_Results, _Results]:
        """Contexts of the forward pass and of the recomputation, for `torch.utils.checkpoint`."""
        results: list[Any] = []
        return cls(results, False), cls(results, True)

    def __enter__(self) -> None:
        self.outer, self.following = getattr(_thread, "results", None), iter(self.results)
        _thread.results = self

    def __exit__(self, *_: object) -> None:
        _thread.results = self.outer

    def next(self, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self.recomputes:
            self.results.append(operator(*arguments))
            return self.results[-1]
        return next(self.following)


def _checkpointed(
    forward: Callable[..., Any], compiled: dict[str, Any], eager: dict[str, Any]
) -> Callable[..., Any]:
    @wraps(forward)
    def checkpointed(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        contexts = compiled if torch.compiler.is_compiling() else eager
        # Dropout masks are stateless (random.py), so there is no RNG state to preserve.
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)

    return checkpointed


def _policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    annotations = traceback.current_meta.get("custom", {})
    saved = operator in _saved and not (operator in _PRODUCTS and _RECOMPUTE_PRODUCTS in annotations)
    saved |= _SAVE_OUTPUTS in annotations
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _full_policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _saved_in_full else CheckpointPolicy.PREFER_RECOMPUTE
