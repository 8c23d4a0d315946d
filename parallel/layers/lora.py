"""LoRA (arXiv 2106.09685): frozen linear layer plus trained low-rank update, y = W x + α/r · B A x.

A is (r, i), drawn like a layer's weights, and B (o, r) zero, so that training starts from the frozen layer. Over t tensor ranks:

    column-parallel W    u = x Aᵀ on a rank's own tokens, with A replicated; B is split by rows like W
    row-parallel W       u = Σ x_t A_tᵀ with A split by columns like W; B is replicated

so that ranks exchange tensors of width r for the update, and neither x nor y a second time.

One layer may hold several fused weights ([q; k; v]). They share one A, or have an A each: then the As are stacked, and each
section of B uses its own columns; the others stay zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from parallel.initialization import Constant, Normal
from parallel.layers.deferred import DeferrableLinear
from parallel.layout import layout_of
from parallel.random import Keys, dropout

ZERO = Constant(0.0)


class SwitchableUpdate(nn.Module):
    """Low-rank updates that `without_updates` can switch off.

    Attributes:
        enabled: whether they are added to the layer's output.
    """

    enabled = True


class LowRankUpdate(SwitchableUpdate):
    """α/r · B A dropout(x).

    Args:
        a, b: linear layers.
        rate: of dropout.
        site: number of the layer in its block, so that its dropout masks differ from those of other layers.
        columns: global indices of the features of x on this rank; None: x has all features, of this rank's tokens.
    """

    columns: Tensor | None

    def __init__(
        self,
        a: nn.Module,
        b: nn.Module,
        scale: float,
        rate: float = 0.0,
        site: int = 0,
        columns: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.a, self.b, self.scale, self.rate, self.site = a, b, scale, rate, site
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, x: Tensor, keys: Keys | None = None) -> Tensor:
        """The update of the layer's output; with the tokens' `keys`, with dropout."""
        if self.rate and keys is not None:
            own = keys.fold(self.site)
            rows = own.hidden if self.columns is None else own.attention.flatten()
            x = dropout(x, rows, self.rate, self.columns)
        return self.b(self.a(x)) * self.scale


def first_factor(in_features: int) -> Normal:
    """Initializer of A with the variance of PEFT's, which is uniform in ±1/√i."""
    return Normal(1 / math.sqrt(3 * in_features))


def attach(linear: nn.Module, update: LowRankUpdate) -> None:
    """Add an update to the output of a linear layer, as its submodule `lora`."""
    linear.lora = update
    linear.register_forward_hook(
        lambda module, inputs, y: y + module.lora(*inputs) if module.lora.enabled else y
    )


@contextmanager
def without_updates(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen layers alone in this block."""
    updates = [module for module in model.modules() if isinstance(module, SwitchableUpdate)]
    for update in updates:
        update.enabled = False
    try:
        yield
    finally:
        for update in updates:
            update.enabled = True


def keep_sections_apart(linear: DeferrableLinear, groups: Sequence[Sequence[str]], rank: int) -> None:
    """Mask the weight of B (o/t, groups · r): each section trains only its group's r columns, if any.

    The other columns are 0 and stay 0. A factor in the graph, as a hook on the gradient would be a program of its own.
    """
    layout, mask, row = layout_of(linear.weight), torch.zeros_like(linear.weight, requires_grad=False), 0
    for section in layout.sections:
        rows = layout.local_rows(section)
        for number, group in enumerate(groups):
            if section.name in group:
                mask[row : row + rows, number * rank : (number + 1) * rank] = 1
        row += rows
    linear.mask = mask
