"""Mixture of experts in place of an MLP: y = Σ over k experts of weight · down(act(gate x, up x)).

Experts are divided among the ranks of the expert axis, consecutive ones on a rank; tensor ranks split each expert like an
MLP, gate and up by rows, down by columns. Tokens are gathered over the tensor axis first, and outputs reduced last, so that
every tensor rank routes the same tokens:

    gather or copy (tensor) -> router -> experts, through the expert axis -> reduce or reduce-scatter (tensor)

Global tensors are single experts ("mlp.gate_up.3.gate.weight"), so checkpoints load at any expert degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from parallel import collectives
from parallel.experts import balance as balancing
from parallel.experts import dropless
from parallel.experts.balance import EXTRA, Balance
from parallel.experts.dropless import Update, start_experts
from parallel.experts.exchange import Routes
from parallel.experts.lora import ExpertUpdate
from parallel.experts.router import Router, Routing
from parallel.experts.slots import assign_slots, capacity, slotted_experts
from parallel.initialization import Constant, Normal
from parallel.layers.linear import check_divisible
from parallel.layers.tied import add
from parallel.layout import Initializer, Layout, Placement, Section, parameter
from parallel.mesh import Mesh


@dataclass(frozen=True)
class ExpertOptions:
    """A run's settings for experts, independent of the model family."""

    balance: Balance = field(default_factory=Balance)
    capacity_factor: float | None = None  # None: dropless
    keep_received: bool = False  # save received rows for backward; not in graphs, whose shapes are static
    repeats_choices: bool = (
        False  # train with the choices of the pass that counts them, so that the host waits once
    )


class ExpertLinear(nn.Module):
    """Weights and biases of one projection of this rank's experts, for the products of `MixtureOfExperts`.

    Args:
        weights, biases: sections of all experts, by global name within this module.
        partial_bias: whether the bias is replicated over tensor ranks, so that its gradients are partial sums.
        placed: dtype and device.

    Attributes:
        lora: low-rank updates of the weights, if any.
    """

    def __init__(
        self,
        weights: tuple[Section, ...],
        biases: tuple[Section, ...],
        mesh: Mesh,
        initializer: Initializer,
        partial_bias: bool,
        placed: Placement,
    ) -> None:
        super().__init__()
        ranks = mesh.expert.size if mesh.expert.size > 1 else None
        degree = mesh.tensor.size
        self.weight = parameter(Layout(weights, degree, initializer, (), ranks), **placed)
        self.bias: nn.Parameter | None = None
        self.lora: ExpertUpdate | None = None
        if biases:
            partial = ("tensor",) if partial_bias and degree > 1 else ()
            self.bias = parameter(Layout(biases, degree, Constant(0.0), partial, ranks), **placed)

    def update(self) -> Update | None:
        """The factors of the low-rank updates; None if there are none or they are switched off."""
        return self.lora.factors() if self.lora is not None and self.lora.enabled else None


@contextmanager
def counting_choices(layers: Iterable[MixtureOfExperts]) -> Iterator[None]:
    """Let forward passes in this block only count: they add their choices to the `load` of these layers."""
    layers = list(layers)
    dropless.counted.clear()
    for layer in layers:
        layer.counting = True
    try:
        yield
    finally:
        for layer in layers:
            layer.counting = False


class MixtureOfExperts(nn.Module):
    """Router and experts.

    Args:
        hidden: h.
        width: f, of one expert.
        routing: the family's.
        mesh: its expert axis divides the experts.
        bias: whether the experts' projections have biases.
        activation: one of `activations.ACTIVATIONS`.
        sequence_parallel: whether input and output are (b·s/(c·t), h).

    Attributes:
        options: how the run trains the experts.
        counting: whether forward passes only add their choices to `load`, for `global` balance.

    Raises:
        ValueError: the expert axis does not divide the experts, or the tensor axis an expert's width.
    """

    options = ExpertOptions()
    counting = False
    tally: Tensor
    load: Tensor

    def __init__(
        self,
        hidden: int,
        width: int,
        routing: Routing,
        mesh: Mesh,
        *,
        bias: bool = False,
        activation: str = "silu",
        sequence_parallel: bool = False,
        initializer: Initializer | None = None,
        output_initializer: Initializer | None = None,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__()
        check_divisible(self, "experts", routing.experts, mesh.expert)
        check_divisible(self, "width", width, mesh.tensor)
        self.mesh, self.routing, self.activation = mesh, routing, activation
        self.computes_once = mesh.expert.size > 1  # for activation checkpointing, which then keeps `Routes`
        self.sequence_parallel = sequence_parallel and mesh.tensor.size > 1
        initializer = initializer or Normal(0.02)
        self.router = Router(hidden, routing, mesh.tensor, initializer=initializer, **placed)
        count = routing.experts // mesh.expert.size
        local = range(mesh.expert.rank * count, (mesh.expert.rank + 1) * count)
        halves = [f"{expert}.{half}" for expert in local for half in ("gate", "up")]
        self.gate_up = ExpertLinear(
            tuple(Section(name, (width, hidden), 0) for name in halves),
            tuple(Section(name, (width,), 0) for name in halves if bias),
            *(mesh, initializer, False, placed),
        )
        self.down = ExpertLinear(
            tuple(Section(str(expert), (hidden, width), 1) for expert in local),
            tuple(Section(str(expert), (hidden,), None) for expert in local if bias),
            *(mesh, output_initializer or initializer, True, placed),
        )
        # Its gradient holds the statistics of a backward pass (balance.py), which `_count` adds to `statistics`; `load` is for
        # `global` balance.
        device = placed.get("device")
        tally = torch.zeros(routing.experts + EXTRA, device=device, requires_grad=True)
        tally.register_post_accumulate_grad_hook(self._count)
        self.statistics: Tensor | None = None  # since they were last taken
        self.add: Callable[[Tensor, Tensor], Tensor] = add
        self.register_buffer("tally", tally, persistent=False)
        self.register_buffer("load", torch.zeros(routing.experts, device=device), persistent=False)

    def _count(self, tally: Tensor) -> None:
        found: Any = tally.grad  # not None, in a hook that runs when it is complete
        tally.grad = None
        self.statistics = found if self.statistics is None else self.add(self.statistics, found)

    def forward(self, x: Tensor, length: int, padding: Tensor | None = None) -> Tensor:
        """x (b·s/c, h), or (b·s/(c·t), h) with sequence parallelism, to the same shape.

        Args:
            length: tokens of each sample on this context rank, s/c.
            padding: (b, s/c), true for padding, which no loss or statistic counts; None: there is none.
        """
        return self._start(x, length, padding)()

    def start(self, x: Tensor, length: int, padding: Tensor | None = None) -> Callable[[], Tensor]:
        """Start `forward`; returns a function that returns its result.

        What the caller computes before it calls that function, such as shared experts, runs beside the exchange of rows. On one
        expert rank, which exchanges none, the function computes everything.
        """
        if self.mesh.expert.size == 1:
            return lambda: self._start(x, length, padding)()
        # The gradients of a view are summed first, and then added to those of shared experts, as if these had come first.
        return self._start(x.view_as(x), length, padding)

    def _start(self, x: Tensor, length: int, padding: Tensor | None) -> Callable[[], Tensor]:
        axis = self.mesh.tensor
        x = (collectives.gather if self.sequence_parallel else collectives.copy)(x, axis)  # (b·s/c, h)
        experts = self._experts(x, length, padding)
        reduce = collectives.scatter_reduce if self.sequence_parallel else collectives.reduce
        return lambda: reduce(experts(), axis)  # of (b·s/c, h), a partial sum over the tensor axis

    def _experts(self, x: Tensor, length: int, padding: Tensor | None) -> Callable[[], Tensor]:
        experts, k = self.routing.experts, self.routing.top_k
        found: list[Routes] = []

        def route(indices: Tensor) -> Tensor:
            repeats = self.options.repeats_choices and (self.counting or torch.is_grad_enabled())
            layer = self.load if repeats and self.mesh.expert.size > 1 else None
            local = experts // self.mesh.expert.size
            indices, routes = dropless.route(indices, local, self.mesh.expert, layer, self.counting)
            found.append(routes)
            return indices

        slotted = self.options.capacity_factor is not None
        weights, indices, logits, scores = self.router(x, None if slotted else route)
        counts = balancing.count_choices(indices, experts, length, padding)  # (b, E)
        kept = None
        if self.options.capacity_factor is not None:
            limit = capacity(self.options.capacity_factor, length, k, experts)
            slot, kept = assign_slots(indices, experts, length, limit)
        if self.counting:
            self.load.add_(counts.sum(0))
        elif torch.is_grad_enabled():
            weights = self._record(weights, logits, scores, counts, kept, padding)
        # (E/n, 2f/t, h) and (E/n, h, f/t)
        gate_up = self.gate_up.weight.view(-1, 2 * self.down.weight.shape[1], x.shape[1])
        down = self.down.weight.view(len(gate_up), x.shape[1], -1)
        options: dict[str, Any] = {"activation": self.activation}
        options |= {"gate_up_update": self.gate_up.update(), "down_update": self.down.update()}
        if self.gate_up.bias is not None and self.down.bias is not None:
            options["gate_up_bias"] = self.gate_up.bias.view(len(gate_up), -1)
            # Every tensor rank adds its share of the bias, because the outputs are summed.
            options["down_bias"] = self.down.bias.view(len(gate_up), -1) / self.mesh.tensor.size
        if kept is None:
            options["keep"] = self.options.keep_received
            return start_experts(x, weights, found[0], gate_up, down, self.mesh.expert, **options)
        slots = experts * len(counts) * limit
        y = slotted_experts(x, weights, slot, kept, slots, gate_up, down, self.mesh.expert, **options)
        return lambda: y

    def _record(
        self,
        weights: Tensor,
        logits: Tensor,
        scores: Tensor,
        counts: Tensor,
        kept: Tensor | None,
        padding: Tensor | None,
    ) -> Tensor:
        balance, mesh = self.options.balance, self.mesh
        router = logits, scores, counts, self.load, self.routing.top_k
        found = balancing.losses(balance, *router, mesh.context, padding)
        loads = counts.sum(0)
        dropped = loads.new_zeros(())
        if kept is not None:
            lost = kept.logical_not()  # (b·s/c, k)
            dropped = (lost if padding is None else lost.masked_fill(padding.view(-1, 1), False)).sum()
        bias, padded = self.router.selection_bias, padding is not None
        statistics = self.tally, bias, loads, dropped
        return balancing.record(balance, weights, found, *statistics, mesh.tensor.size, padded)
