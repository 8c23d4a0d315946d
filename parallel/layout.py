"""Sharding layouts: each parameter's global tensors and the shard of them that a tensor rank holds.

A parameter carries a `Layout`, declared where its layer is defined: one or more `Section`s, global tensors whose local shards
are stacked along dim 0 ([q; k; v], [gate; up]). A section is split over the tensor axis along `dim` into t / replicas shards;
`replicas` neighbouring ranks hold the same shard, so tensor rank t holds shard t // replicas. In DTensor placements over the
tensor axis unfolded to (kv shard, kv replica):

    replicas = 1    (Shard(dim), Shard(dim))     Q, gate, up, columns of an output projection
    replicas = m    (Shard(dim), Replicate())    K and V with m replicas
    replicas = t    (Replicate(), Replicate())   norms

Global shapes are unpadded. Where the shards do not divide a size, every shard is ceil(size / shards) long and the last ones are
partly padding, which exists in local tensors only. Initialization, gradient norms, ZeRO-1, checkpoints, conversion and the
planner all read shards as `Box`es and define no sharding rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn

_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@dataclass(frozen=True)
class GlobalBox:
    """A rectangular part of a global tensor."""

    name: str  # of the global tensor
    shape: tuple[int, ...]  # of the global tensor, unpadded
    # offsets, sizes: of the box, in global coordinates
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def index(self) -> tuple[slice, ...]:
        """Index of this box in the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Box(GlobalBox):
    """The shard of a global tensor that a rank holds, and its position in the local tensor."""

    local_offsets: tuple[int, ...]  # of the shard in the local parameter
    replicas: int = 1  # number of tensor ranks that hold this shard
    replica: int = 0  # index of this rank among them; checkpoints save replica 0

    def view(self, local: Tensor) -> Tensor:
        """View of this shard in the local tensor."""
        for dim, (start, size) in enumerate(zip(self.local_offsets, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


class Placement(TypedDict, total=False):
    """Arguments of `parameter`, and of the layers that pass them on to it."""

    dtype: torch.dtype | None
    device: torch.device | str | None


class Initializer(Protocol):
    """Initial values of a global tensor, and its learning-rate multiplier, which depends on their scale."""

    @property
    def rate(self) -> float:
        """Learning-rate multiplier."""

    @property
    def matrix_rate(self) -> float:
        """Learning-rate multiplier of updates that are orthogonal matrices."""

    def fill(self, local: Tensor, box: GlobalBox, seed: int) -> None:
        """Write the values of the shard `box` into `local`, a view of that shard."""


@dataclass(frozen=True)
class Section:
    """One global tensor of a parameter; see the module docstring."""

    name: str  # within its layer ("q"); empty if the parameter is a single tensor
    shape: tuple[int, ...]  # global, unpadded
    dim: int | None  # dim that is split; None: every rank holds the full tensor
    replicas: int = 1  # number of neighbouring tensor ranks that hold the same shard

    def shard_length(self, degree: int) -> int:
        """Length of every rank's shard along `dim`, including padding."""
        assert self.dim is not None
        return math.ceil(self.shape[self.dim] / (degree // self.replicas))


@dataclass(frozen=True)
class Layout:
    """How one parameter is sharded over the tensor axis."""

    sections: tuple[Section, ...]  # stacked along dim 0 of the local tensor
    degree: int  # of the tensor axis
    initializer: Initializer  # of its global tensors
    # mesh axes over which each rank's gradient is a partial sum (DTensor's `Partial`) and must be reduced: "tensor" for
    # layers that see a rank's own tokens under sequence parallelism, "embedding" for a weight shared by the first and the
    # last pipeline stage
    partial_axes: tuple[str, ...] = ()
    # size of the expert axis, each rank of which holds different experts; None: not a parameter of experts, or every rank holds
    # all of them
    expert_ranks: int | None = None
    # step size of an update by the gradient's sign; the gradient norm excludes it. None: updated by AdamW
    sign_step: float | None = None
    # rows of each matrix of a head, in turn, if the rows of all sections are those of heads
    head_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for section in self.sections if self.head_rows else ():
            if section.shape[0] % sum(self.head_rows):
                heads = " + ".join(map(str, self.head_rows))
                raise ValueError(
                    f"Layout: head_rows {heads} do not divide the {section.shape[0]} rows of section {section.name!r}; "
                    "give the rows of one of its heads, or none"
                )

    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local parameter, the same on every rank."""
        shape = list(self.sections[0].shape)
        if self.sections[0].dim is not None:
            shape[self.sections[0].dim] = self.sections[0].shard_length(self.degree)
        return (sum(self.local_rows(section) for section in self.sections), *shape[1:])

    def local_rows(self, section: Section) -> int:
        """Rows of a section in the local tensor, including padding."""
        return section.shard_length(self.degree) if section.dim == 0 else section.shape[0]

    def boxes(self, parameter: str, rank: int) -> Iterator[Box]:
        """The shards that a tensor rank holds, section by section; omits shards that are only padding.

        Args:
            parameter: full name of the parameter; a section's name goes before its last component
                ("layers.0.attention.qkv.weight" with section "q": "layers.0.attention.qkv.q.weight").
            rank: along the tensor axis.
        """
        row = 0
        for section in self.sections:
            offsets, sizes = [0] * len(section.shape), list(section.shape)
            replicas = self.replicas(section)
            if section.dim is not None:
                length = section.shard_length(self.degree)
                start = rank // replicas * length
                offsets[section.dim] = min(start, section.shape[section.dim])
                sizes[section.dim] = min(length, section.shape[section.dim] - offsets[section.dim])
            if all(sizes):
                local = (row, *[0] * (len(sizes) - 1))
                name = global_name(parameter, section.name)
                yield Box(name, section.shape, tuple(offsets), tuple(sizes), local, replicas, rank % replicas)
            row += self.local_rows(section)

    @property
    def rate(self) -> float:
        """Multiplier of the optimizer's learning rate; weight decay per step does not depend on it."""
        return self.initializer.rate

    @property
    def matrix_rate(self) -> float:
        """Multiplier of the learning rate of updates that are orthogonal matrices."""
        return self.initializer.matrix_rate

    def replicas(self, section: Section) -> int:
        """Number of tensor ranks that hold the same shard of a section."""
        return self.degree if section.dim is None else section.replicas


def global_name(parameter: str, section: str) -> str:
    """Name of the global tensor of a parameter's section."""
    if not section:
        return parameter
    layer, _, last = parameter.rpartition(".")
    return ".".join(part for part in (layer, section, last) if part)


def parameter(
    layout: Layout, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Parameter:
    """Uninitialized local parameter with its layout as `.global_layout`; `initialize` fills it."""
    shape = layout.local_shape()
    result: Any  # torch does not know the attribute
    if _deferred.get():
        result = nn.Parameter(torch.empty((), dtype=dtype, device=device).expand(shape))
    else:
        result = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    result.global_layout = layout
    return result


@contextmanager
def deferred_parameters() -> Iterator[None]:
    """Create parameters in this block without memory, which an optimizer or `initialize` allocates later."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def is_deferred(parameter: nn.Parameter) -> bool:
    """Whether a parameter has no memory yet."""
    return parameter.untyped_storage().nbytes() < parameter.nbytes


def layout_of(parameter: nn.Parameter) -> Layout:
    """The layout that a parameter carries. Raises ValueError: it carries none."""
    layout = getattr(parameter, "global_layout", None)
    if layout is None:
        raise ValueError(
            f"parameter of shape {tuple(parameter.shape)} has no layout; create it with parallel.parameter"
        )
    return layout


def parameter_count(model: nn.Module) -> int:
    """Number of parameters of a model or pipeline stage, counting each global element once."""
    layouts = map(layout_of, model.parameters())
    return sum(
        math.prod(section.shape) * (layout.expert_ranks or 1)
        for layout in layouts
        for section in layout.sections
    )
