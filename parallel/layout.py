"""The one truth about sharding: what each parameter is globally, and which piece of it a rank holds.

A parameter carries a `Layout`, declared where its layer is defined. It is one or more `Section`s, global tensors whose
local pieces are stacked along dim 0 ([q; k; v], [gate; up]). A section is split over the tensor axis along `dim` into
t / replicas pieces; `replicas` neighbouring ranks hold the same piece, so that rank t holds piece t // replicas. In the
vocabulary of torch.distributed.tensor, over the unfolded tensor axis (kv shard, kv replica):

    replicas = 1    (Shard(dim), Shard(dim))     Q, gate, up, columns of an output projection
    replicas = m    (Shard(dim), Replicate())    K and V with m replicas
    replicas = t    (Replicate(), Replicate())   norms

Global shapes are unpadded. Where a size does not divide, every piece is ceil(size / shards) long and the last ones are
partly padding, which exists in local tensors alone. Initialization, norms, ZeRO-1, checkpoints, conversion and the planner
all read pieces as `Box`es, and none has rules of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

if TYPE_CHECKING:
    from parallel.initialization import Initializer


@dataclass(frozen=True)
class Box:
    """A piece of a global tensor and where it lies in a local one.

    Attributes:
        name: of the global tensor.
        shape: of the global tensor, unpadded.
        offsets, sizes: the piece, in global coordinates.
        local_offsets: where it begins in the local parameter.
        replicas: how many tensor ranks hold this very piece.
        replica: which of them this one is; piece 0 is the one that is saved.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    replicas: int = 1
    replica: int = 0

    def of(self, local: Tensor) -> Tensor:
        """The view of this piece in the local tensor."""
        for dim, (start, size) in enumerate(zip(self.local_offsets, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local

    def index(self) -> tuple[slice, ...]:
        """The piece as an index into the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Section:
    """One global tensor in a parameter; see the module's text.

    Attributes:
        name: of the part within its layer ("q"), empty where the parameter is one tensor.
        shape: global and unpadded.
        dim: the dim that is split, None where every rank holds all.
        replicas: how many neighbouring tensor ranks hold the same piece.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    replicas: int = 1

    def piece(self, degree: int) -> int:
        """Length of every rank's piece along `dim`, padding included."""
        assert self.dim is not None
        return math.ceil(self.shape[self.dim] / (degree // self.replicas))


@dataclass(frozen=True)
class Layout:
    """How one parameter lies on the tensor axis.

    Attributes:
        sections: stacked along dim 0 of the local tensor.
        degree: of the tensor axis.
        initializer: what its global tensors start as.
        partial: axes of the mesh along which each rank's gradient is only its own part and must be summed (DTensor's
            Partial): "tensor" for what works on a rank's own tokens under sequence parallelism, "ends" for a weight
            that the first and the last pipeline stage share.
    """

    sections: tuple[Section, ...]
    degree: int
    initializer: Initializer
    partial: tuple[str, ...] = ()

    def placements(self, section: Section) -> tuple[Placement, Placement]:
        """Over (kv shard, kv replica), in DTensor's vocabulary."""
        if section.dim is None:
            return Replicate(), Replicate()
        return Shard(section.dim), Replicate() if section.replicas > 1 else Shard(section.dim)

    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local parameter, the same on every rank."""
        shape = list(self.sections[0].shape)
        if self.sections[0].dim is not None:
            shape[self.sections[0].dim] = self.sections[0].piece(self.degree)
        return (sum(self.height(section) for section in self.sections), *shape[1:])

    def height(self, section: Section) -> int:
        """Rows that a section takes in the local tensor."""
        return section.piece(self.degree) if section.dim == 0 else section.shape[0]

    def boxes(self, parameter: str, rank: int) -> Iterator[Box]:
        """The pieces of global tensors that this tensor rank holds, section by section, none of padding alone.

        Args:
            parameter: the parameter's full name; a section's name is put before its last word
                ("layers.0.attention.qkv.weight" with section "q" is "layers.0.attention.qkv.q.weight").
            rank: place along the tensor axis.
        """
        row = 0
        for section in self.sections:
            offsets, sizes = [0] * len(section.shape), list(section.shape)
            replicas = self.replicas(section)
            height = self.height(section)
            if section.dim is not None:
                piece = section.piece(self.degree)
                start = rank // replicas * piece
                offsets[section.dim] = min(start, section.shape[section.dim])
                sizes[section.dim] = min(piece, section.shape[section.dim] - offsets[section.dim])
            if all(sizes):
                local = (row, *[0] * (len(sizes) - 1))
                name = global_name(parameter, section.name)
                yield Box(name, section.shape, tuple(offsets), tuple(sizes), local, replicas, rank % replicas)
            row += height

    def replicas(self, section: Section) -> int:
        """How many ranks of the tensor axis hold the same piece of a section."""
        return self.degree if section.dim is None else section.replicas

    def global_numel(self) -> int:
        """Elements of its global tensors, each once."""
        return sum(math.prod(section.shape) for section in self.sections)


def global_name(parameter: str, section: str) -> str:
    """The global tensor's name for a section of a parameter."""
    if not section:
        return parameter
    layer, _, word = parameter.rpartition(".")
    return ".".join(part for part in (layer, section, word) if part)


def parameter(
    layout: Layout, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Parameter:
    """An empty local parameter that carries its layout as `.global_layout`; `initialize` fills it."""
    made = nn.Parameter(torch.empty(layout.local_shape(), dtype=dtype, device=device))
    made.global_layout = layout
    return made


def layout_of(parameter: nn.Parameter) -> Layout:
    """The layout that a parameter carries.

    Raises:
        ValueError: it has none, so nobody knows how it is spread.
    """
    layout = getattr(parameter, "global_layout", None)
    if layout is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} carries no layout: make it with parallel.parameter"
        )
    return layout


def parameter_count(model: nn.Module) -> int:
    """Parameters of the model, each global element once (of one pipeline stage, where the model is one)."""
    return sum(layout_of(p).global_numel() for p in model.parameters())
