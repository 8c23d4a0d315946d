"""The mesh: how the ranks of a run are numbered over pipeline x data x context x tensor, slowest first.

    rank = ((pipeline · D + data) · C + context) · T + tensor

so the ranks of one tensor group are neighbours and sit on one node wherever the degree allows. Where KV heads are fewer
than tensor ranks, the tensor axis unfolds into (kv shard, kv replica): with m replicas, tensor rank t is shard t // m,
replica t % m. Three further axes: `zero` = data x context, over which gradients are summed and optimizer
states sharded; `ends`, the first and last pipeline stage, which may share a weight; and `world`.

Every axis has a process group, created in the same order on every rank and registered under the axis's own name, the same
on every rank: a compiled graph names "tensor", never "the group of ranks 8 to 15", so ranks share their graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as one rank sees it.

    Attributes:
        name: also the name its process group is registered under.
        size: degree.
        rank: this process's place along the axis. Never a constant in a model's graph: it differs between ranks.
        ranks: the global ranks along the axis, in order.
        group: the process group; None where size is 1 or the mesh is only planned.
        reduces: whether the backend's own reductions are used (collectives.py).
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    reduces: bool = True


class Mesh:
    """Axes `pipeline`, `data`, `context`, `tensor`, `kv_replica`, `zero`, `ends` and `world`, for one rank.

    On a stage between the ends, `ends` is of size 1.

    Args:
        pipeline, data, context, tensor: degrees; their product is the world size.
        kv_replicas: how many neighbouring tensor ranks hold the same KV head; divides `tensor`.
        rank: which rank to see it as; by default this process's own, with process groups. Given, the mesh is only planned:
            it has places and sizes but no groups (for planning, conversion and tests).
        reduces: see `Device.reduces`.

    Raises:
        ValueError: a degree below 1, replicas that do not divide the tensor degree, a world of another size.
    """

    def __init__(
        self,
        pipeline: int = 1,
        data: int = 1,
        context: int = 1,
        tensor: int = 1,
        kv_replicas: int = 1,
        rank: int | None = None,
        reduces: bool = False,
    ) -> None:
        self.shape = dict(zip(AXES, (pipeline, data, context, tensor), strict=True))
        for name, size in self.shape.items():
            if size < 1:
                raise ValueError(f"mesh: {name} = {size}, a degree is at least 1")
        if kv_replicas < 1 or tensor % kv_replicas:
            raise ValueError(f"mesh: kv_replicas = {kv_replicas} does not divide the tensor degree {tensor}")
        self.size = math.prod(self.shape.values())
        self.kv_replicas = kv_replicas
        planned = rank is not None or not dist.is_initialized()
        self.rank = (rank or 0) if planned else dist.get_rank()
        if not planned and dist.get_world_size() != self.size:
            degrees = " x ".join(f"{name} {size}" for name, size in self.shape.items())
            raise ValueError(
                f"mesh: {degrees} needs {self.size} ranks, the world has {dist.get_world_size()}"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"mesh: rank {self.rank} is not in a world of {self.size}")
        self._registered: list[str] = []
        for name, groups in self._groups().items():
            setattr(self, name, self._axis(name, groups, planned, reduces))
        if not planned and self.size > 1:
            # A rank that is done with the mesh before another has connected would close the line on it.
            dist.barrier()

    pipeline: Axis
    data: Axis
    context: Axis
    tensor: Axis
    kv_replica: Axis
    zero: Axis
    ends: Axis
    world: Axis

    def _groups(self) -> dict[str, list[tuple[int, ...]]]:
        """Every group of every axis as tuples of global ranks, in the one order all ranks create them in."""
        grid = torch.arange(self.size).view(*self.shape.values())
        unfolded = grid.view(*grid.shape[:-1], -1, self.kv_replicas)
        groups = {name: list(_lines(grid, [dim])) for dim, name in enumerate(AXES)}
        groups["kv_replica"] = list(_lines(unfolded, [4]))
        groups["zero"] = list(_lines(grid, [1, 2]))
        groups["ends"] = list(_lines(grid[[0, -1]], [0])) if self.shape["pipeline"] > 1 else []
        groups["world"] = [tuple(range(self.size))]
        return groups

    def _axis(self, name: str, groups: list[tuple[int, ...]], planned: bool, reduces: bool) -> Axis:
        ranks = next((group for group in groups if self.rank in group), (self.rank,))
        group = None
        if not planned and any(len(members) > 1 for members in groups):
            # Every rank takes part in making every group, its own or not.
            made = [
                dist.group.WORLD if name == "world" else dist.new_group(list(members)) for members in groups
            ]
            if ranks in groups:
                group = made[groups.index(ranks)]
                _register_process_group(name, group)
                self._registered.append(name)
        return Axis(name, len(ranks), ranks.index(self.rank), ranks, group, reduces)

    def coordinates(self) -> dict[str, int]:
        """This rank's place along the four axes."""
        return {name: getattr(self, name).rank for name in AXES}

    def close(self) -> None:
        """Give the registered names and groups back, so that another mesh can be made in this process."""
        for name in self._registered:
            axis: Axis = getattr(self, name)
            _unregister_process_group(name)
            if name != "world" and axis.group is not None:
                dist.destroy_process_group(axis.group)
        self._registered.clear()


def registered(name: str, size: int) -> Axis:
    """The axis of this name as this rank sees it, for operators: a graph may hand them a name, but no rank.

    `reduces` is not known here.
    """
    if size == 1:
        return Axis(name)
    group = _resolve_process_group(name)
    return Axis(name, group.size(), group.rank(), tuple(dist.get_process_group_ranks(group)), group)


def _lines(grid: torch.Tensor, dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The tuples of ranks that differ along `dims` alone, in row-major order of the remaining dims."""
    rest = [dim for dim in range(grid.dim()) if dim not in dims]
    flat = grid.permute(*rest, *dims).flatten(len(rest))
    for place in product(*(range(grid.shape[dim]) for dim in rest)):
        yield tuple(flat[place].tolist())
