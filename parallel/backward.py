"""Which gradients the running backward pass of a custom autograd Function needs.

Zero-bubble schedules split backward into one pass for input gradients and one for weight gradients (arXiv 2401.10241). torch's
own operators skip what a pass does not need, but a custom Function's `ctx.needs_input_grad` is fixed in forward: without this
check it would compute and communicate everything twice.
"""

from __future__ import annotations

from typing import Any

import torch

from parallel.torch_internals import will_engine_execute_node


def needs_gradient(ctx: Any, index: int) -> bool:
    """Whether the running backward pass needs the gradient of a Function's tensor input (index among tensor inputs)."""
    if torch.compiler.is_compiling():
        return ctx.needs_input_grad[index]  # compiled graphs run full backward passes only
    node = ctx.next_functions[index][0]
    if node is None:
        return False
    try:
        return will_engine_execute_node(node)
    except RuntimeError:  # raised for leaves passed to `autograd.grad`
        return True
