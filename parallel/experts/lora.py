"""LoRA of each expert's projections, y = W x + α/r · B A x, inside the grouped products.

With E/n experts on a rank and t tensor ranks, the factors are split like the weight, so that no further communication is needed:

    gate, up    A (r, h) on every rank, B by rows
    down        A (r, f) by columns, B (h, r) on every rank: a rank's output is a partial sum, as without an update

The gradient of a replicated factor is a partial sum over the tensor axis. Gate and up share A. Factors are multiplied like the
weights, by expert: 2 r (i + o) FLOPs per row, and B A is never computed.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from parallel.experts.dropless import Update
from parallel.layers.lora import ZERO, SwitchableUpdate, first_factor
from parallel.layout import Layout, Placement, Section, layout_of, parameter


class ExpertUpdate(SwitchableUpdate):
    """Updates of one projection of this rank's experts; global tensors "a.3.weight", "b.3.gate.weight".

    Args:
        weight: of the experts.
        rank: r of each expert.
        scale: α/r.
    """

    a: Any  # modules with a weight
    b: Any

    def __init__(self, weight: nn.Parameter, rank: int, scale: float) -> None:
        super().__init__()
        layout, self.scale = layout_of(weight), scale
        o, i = layout.sections[0].shape
        columns = layout.sections[0].dim == 1
        experts = dict.fromkeys(section.name.partition(".")[0] for section in layout.sections)
        self.experts, self.rank = len(experts), rank
        a = tuple(Section(expert, (rank, i), 1 if columns else None) for expert in experts)
        b = tuple(Section(section.name, (o, rank), None if columns else 0) for section in layout.sections)
        partial = ("tensor",) if layout.degree > 1 else ()
        placed: Placement = {"dtype": weight.dtype, "device": weight.device}
        self.a, self.b = nn.Module(), nn.Module()
        ranks = layout.expert_ranks
        first = Layout(a, layout.degree, first_factor(i), () if columns else partial, ranks)
        self.a.weight = parameter(first, **placed)
        self.b.weight = parameter(Layout(b, layout.degree, ZERO, partial if columns else (), ranks), **placed)

    def factors(self) -> Update:
        """A (E/n, r, i) and α/r · B (E/n, o, r), for this tensor rank's part of i or o."""
        a = self.a.weight.view(self.experts, self.rank, -1)
        return a, self.b.weight.view(self.experts, -1, self.rank) * self.scale
