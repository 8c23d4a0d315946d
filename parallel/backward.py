"""What a custom Function is asked for in a backward pass that wants only part of the gradients.

Zero-bubble schedules run backward in two halves, one for the inputs' gradients and one for the weights' (arXiv 2401.10241).
torch's own operations compute in each half what it asks for; a custom Function's `ctx.needs_input_grad` is that of the forward
pass, and without asking it would compute, and communicate, everything twice.
"""

from __future__ import annotations

from typing import Any

import torch


def wanted(ctx: Any, index: int) -> bool:
    """Whether the running backward pass wants the gradient of a Function's tensor input, counted among the tensors."""
    if torch.compiler.is_compiling():
        return ctx.needs_input_grad[index]  # a compiled graph serves whole backward passes only
    node = ctx.next_functions[index][0]
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # said of leaves that `autograd.grad` was asked for
        return True
