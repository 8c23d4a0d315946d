"""Autograd Function helpers: which gradients a backward pass needs; gradients passed to a function.

Zero-bubble schedules split backward into one pass for input gradients and one for weight gradients (arXiv 2401.10241). torch's
own operators skip what a pass does not need, but a custom Function's `ctx.needs_input_grad` is fixed in forward: without this
check it would compute and communicate everything twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel.torch_internals import will_engine_execute_node


def needs_gradient(ctx: Any, index: int) -> bool:
    """Whether the running backward pass needs the gradient of a Function's `index`-th tensor input."""
    if torch.compiler.is_compiling():
        return ctx.needs_input_grad[index]  # compiled graphs run full backward passes only
    node = ctx.next_functions[index][0]
    if node is None:
        return False
    try:
        return will_engine_execute_node(node)
    except RuntimeError:  # raised for leaves passed to `autograd.grad`
        return True


def divert_gradient(x: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
    """Return a view of x whose gradient is passed to `receive` and not to x."""
    return _Diverted.apply(x, receive)


class _Diverted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.receive(grad)
        return None, None
