"""Device mesh: ranks over pipeline × data × context × tensor, slowest first; a process group per axis.

    rank = ((pipeline · D + data) · C + context) · T + tensor

The ranks of a tensor group are neighbours, on one node where the degree allows. If there are fewer KV heads than tensor ranks,
the tensor axis unfolds to (kv shard, kv replica): with m replicas, tensor rank t is shard t // m, replica t % m. Further axes:

    dp_shard      `shard_degree` neighbouring ranks of data × context, over which optimizer states (ZeRO-1) and parameters (FSDP)
                  are sharded
    dp_replicate  the ranks of data × context that hold the same shard
    expert        `expert` neighbouring ranks of data × context, among which the experts of each layer are divided
    expert_shard, expert_replicate
                  of the ranks that hold the same experts, those over which the experts' states are sharded, and those that hold
                  the same shard; the same as dp_shard and dp_replicate if `expert` is 1
    matrix, expert_matrix
                  dp_shard × tensor and expert_shard × tensor: the ranks that hold parts of the same matrices
    embedding     the first and the last pipeline stage, which may share a weight
    world         all ranks

Device tensors are communicated over the axes' groups, host data (objects, float64 numbers) over `host`, a CPU group of all ranks,
because a device's backend does not accept host tensors.

Process groups are created in the same order on every rank and registered under the axis's name: a compiled graph refers to
"tensor", never to the group of ranks 8 to 15, so ranks share compiled graphs. A group costs connections and device memory, so
axes over which nothing is communicated have none: `data`, which only divides samples, `embedding` without a shared weight, and
`matrix` unless the optimizer sends whole matrices over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel import device as devices
from parallel.constraints import expert_shard_degree
from parallel.torch_internals import register_process_group
from parallel.torch_internals import resolve_process_group as resolve
from parallel.torch_internals import unregister_process_group as unregister

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as seen by one rank."""

    name: str  # also the name of its registered process group
    size: int = 1  # degree
    # this process's rank along the axis. Must not become a constant in a model's graph, as it differs between ranks.
    rank: int = 0
    ranks: tuple[int, ...] = (0,)  # global ranks along the axis, in order
    # process group; None if size is 1, for `data`, and in a mesh without process groups
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    supports_reduction: bool = True  # whether to use the backend's own reductions (collectives.py)
    # number of chunks to split a product into to overlap it with a collective; None: chosen by size (layers/overlap.py)
    chunks: int | None = 1
    # tensor axis: whether products in chunks are opaque operators (layers/overlap.py); not where each operator is compiled
    operators: bool = True
    # context axis: name of the attention kernel to call in the graph (attention/gathered.py); None: ring attention
    graph_kernel: str | None = None
    # context axis: whether masks run as FlexAttention (attention/flex.py); None: as the tensors' device does
    masks_by_flex: bool | None = None


class Mesh:
    """Device mesh of one rank, with an `Axis` for each attribute from `pipeline` to `world`.

    On ranks of the middle pipeline stages, `embedding` has size 1. `data` has no process group.

    Args:
        pipeline, data, context, tensor: degrees; their product is the world size.
        kv_replicas: number of neighbouring tensor ranks that hold the same KV head; divides `tensor`.
        shard_degree: size of `dp_shard`; divides data × context. None: data × context.
        expert: size of `expert`; divides data × context.
        rank: rank to plan for: the mesh then has ranks and sizes but no process groups (for planning, conversion and tests);
            None: this process's, with groups if torch.distributed is initialized.
        supports_reduction, reduces_in_place: see `Device`.
        timeout: of the process groups; torch's default differs between the default group and new ones.
        chunks, operators: see `Axis`; of the tensor axis.
        graph_kernel, masks_by_flex: see `Axis`; of the context axis.
        pipeline_lanes: number of process groups of each pipeline (pipeline/runtime.py).
        shared_embedding: whether the first and the last pipeline stage share a weight; if not, `embedding` has size 1.
        whole_matrices: whether an optimizer of matrices communicates over `matrix` and `expert_matrix`, which otherwise do not
            exist (optimizer/stacks.py).

    Raises:
        ValueError: a degree below 1, replicas that do not divide the tensor degree, a shard or expert degree that does not
            divide data × context, a rank outside the world, or a different world size.
    """

    def __init__(
        self,
        pipeline: int = 1,
        data: int = 1,
        context: int = 1,
        tensor: int = 1,
        kv_replicas: int = 1,
        shard_degree: int | None = None,
        rank: int | None = None,
        supports_reduction: bool = False,
        reduces_in_place: bool = False,
        timeout: timedelta | None = None,
        expert: int = 1,
        chunks: int | None = 1,
        operators: bool = True,
        pipeline_lanes: int = 1,
        shared_embedding: bool = True,
        graph_kernel: str | None = None,
        masks_by_flex: bool | None = None,
        whole_matrices: bool = False,
    ) -> None:
        self.shape = dict(zip(AXES, (pipeline, data, context, tensor), strict=True))
        for name, size in self.shape.items():
            if size < 1:
                raise ValueError(f"mesh: {name} = {size}; a degree must be at least 1")
        if kv_replicas < 1 or tensor % kv_replicas:
            raise ValueError(f"mesh: kv_replicas = {kv_replicas} does not divide the tensor degree {tensor}")
        self.weight_replicas = data * context
        self.shard_degree = self.weight_replicas if shard_degree is None else shard_degree
        self.expert_degree = expert
        for name, degree in (("shard_degree", self.shard_degree), ("expert", expert)):
            if degree < 1 or self.weight_replicas % degree:
                raise ValueError(
                    f"mesh: {name} = {degree} does not divide data × context = {self.weight_replicas}"
                )
        self.size = math.prod(self.shape.values())
        self.kv_replicas = kv_replicas
        planned = rank is not None or not dist.is_initialized()
        self.rank = (rank or 0) if planned else dist.get_rank()
        if not planned and dist.get_world_size() != self.size:
            degrees = " × ".join(f"{name} {size}" for name, size in self.shape.items())
            raise ValueError(
                f"mesh: {degrees} needs {self.size} ranks, the world size is {dist.get_world_size()}"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(f"mesh: rank {self.rank} is outside a world of size {self.size}")
        self.shared_embedding, self.whole_matrices = shared_embedding, whole_matrices
        self.reduces_in_place = reduces_in_place
        self._registered: list[str] = []
        lanes = [f"pipeline_{lane}" for lane in range(1, pipeline_lanes)]
        for name, groups in self._groups(lanes).items():
            setattr(self, name, self._axis(name, groups, planned, supports_reduction, timeout))
        self.pipeline_lanes = [getattr(self, name).group for name in ("pipeline", *lanes)]
        self.tensor = replace(self.tensor, chunks=chunks, operators=operators)
        self.context = replace(self.context, graph_kernel=graph_kernel, masks_by_flex=masks_by_flex)
        if expert == 1:
            self.expert = Axis("expert", ranks=(self.rank,))
            self.expert_shard, self.expert_replicate = self.dp_shard, self.dp_replicate
            if whole_matrices:
                self.expert_matrix = self.matrix
        self.host = None if planned or self.size == 1 else _host_group(timeout)
        if self.host is not None:
            # A barrier: a rank that closed the mesh before another has connected would break that rank's connection.
            # Not dist.barrier, which allocates memory on the device to which the default group is bound.
            dist.all_reduce(torch.zeros(1), group=self.host)

    pipeline: Axis
    data: Axis
    context: Axis
    tensor: Axis
    kv_replica: Axis
    dp_shard: Axis
    dp_replicate: Axis
    expert: Axis
    expert_shard: Axis
    expert_replicate: Axis
    matrix: Axis
    expert_matrix: Axis
    embedding: Axis
    world: Axis
    host: dist.ProcessGroup | None  # of all ranks, for host data; None if there is only one rank

    def _groups(self, lanes: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
        """Global ranks of every group of every axis, in the order in which all ranks create the groups.

        `embedding` is the last, because torch names groups after their ranks and the number of groups that a rank has already.
        """
        grid = torch.arange(self.size).view(*self.shape.values())
        unfolded = grid.view(*grid.shape[:-1], -1, self.kv_replicas)
        groups = {name: list(_lines(grid, [dim])) for dim, name in enumerate(AXES)}
        groups |= dict.fromkeys(lanes, groups["pipeline"])
        groups["kv_replica"] = list(_lines(unfolded, [4]))
        shards = grid.view(grid.shape[0], -1, self.shard_degree, grid.shape[-1])
        groups["dp_shard"] = list(_lines(shards, [2]))
        groups["dp_replicate"] = list(_lines(shards, [1]))
        if self.whole_matrices:
            groups["matrix"] = list(_lines(shards, [2, 3]))
        if self.expert_degree > 1:
            groups |= self._expert_groups(grid)
        groups["world"] = [tuple(range(self.size))]
        shared = self.shared_embedding and self.shape["pipeline"] > 1
        groups["embedding"] = list(_lines(grid[[0, -1]], [0])) if shared else []
        return groups

    def _expert_groups(self, grid: torch.Tensor) -> dict[str, list[tuple[int, ...]]]:
        """Global ranks of every group of the expert axes."""
        shards = expert_shard_degree(self.shard_degree, self.expert_degree, self.weight_replicas)
        ranks = grid.view(grid.shape[0], -1, shards, self.expert_degree, grid.shape[-1])
        whole = {"expert_matrix": list(_lines(ranks, [2, 4]))} if self.whole_matrices else {}
        return {
            "expert": list(_lines(ranks, [3])),
            "expert_shard": list(_lines(ranks, [2])),
            "expert_replicate": list(_lines(ranks, [1])),
            **whole,
        }

    def _axis(
        self,
        name: str,
        groups: list[tuple[int, ...]],
        planned: bool,
        supports_reduction: bool,
        timeout: timedelta | None,
    ) -> Axis:
        ranks = next((group for group in groups if self.rank in group), (self.rank,))
        group = None
        if not planned and name != "data" and any(len(members) > 1 for members in groups):
            group = dist.group.WORLD if name == "world" else _create_groups(name, groups, timeout)
            if group is not None:
                register_process_group(name, group)
                devices.register_replica_groups(name, groups)
                self._registered.append(name)
        return Axis(name, len(ranks), ranks.index(self.rank), ranks, group, supports_reduction)

    def close(self) -> None:
        """Unregister and destroy the process groups, so that this process can create another mesh."""
        for name in self._registered:
            axis: Axis = getattr(self, name)
            unregister(name)
            devices.register_replica_groups(name, None)
            if name != "world" and axis.group is not None:
                dist.destroy_process_group(axis.group)
        self._registered.clear()
        if self.host is not None and self.host is not dist.group.WORLD:
            dist.destroy_process_group(self.host)
        self.host = None


def _create_groups(
    axis: str, groups: Sequence[Sequence[int]], timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """Create the disjoint groups of an axis and return this rank's, if there is one.

    This is collective over the world. Where torch can split the world's communicator, one split makes all groups. Else torch
    would split it for each group, with all ranks taking part: 240 times instead of 4 for DeepSeek-V3 on 512 GPUs.
    """
    if _splits_world():
        split = [list(ranks) for ranks in groups]
        return dist.split_group(split_ranks=split, timeout=timeout, group_desc=axis)
    created = [dist.new_group(list(ranks), timeout=timeout, group_desc=axis) for ranks in groups]
    return next((group for group in created if isinstance(group, dist.ProcessGroup)), None)


def _splits_world() -> bool:
    """Whether torch can split the default group: its communicator exists, its backend can split it."""
    world = dist.group.WORLD
    device = None if world is None else world.bound_device_id
    if world is None or device is None or not torch.accelerator.is_available():
        return False
    return world._get_backend(device).supports_splitting


def _host_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """A group of all ranks that supports CPU tensors: the default one if its backend does."""
    world = dist.group.WORLD
    if world is not None and torch.device("cpu") in world._device_types:
        return world
    return dist.new_group(backend="gloo", timeout=timeout)


def registered_axis(name: str, size: int) -> Axis:
    """The axis with this registered name, for custom operators: a graph may pass them a name but no rank.

    Its `supports_reduction` is unknown and left at the default.
    """
    if size == 1:
        return Axis(name)
    group = resolve(name)
    return Axis(name, group.size(), group.rank(), tuple(dist.get_process_group_ranks(group)), group)


def _lines(grid: torch.Tensor, dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Tuples of ranks that differ only along `dims`, in row-major order of the remaining dims."""
    rest = [dim for dim in range(grid.dim()) if dim not in dims]
    flat = grid.permute(*rest, *dims).flatten(len(rest))
    return map(tuple, flat.reshape(-1, flat.shape[-1]).tolist())
