"""Replicated weights: detect copies that no longer have the same bits, and synchronize them.

Norms on all tensor ranks, KV heads on some of them, an embedding on the first and last pipeline stage and everything over
`dp_replicate` (of experts: `expert_replicate`) are updated on each rank by the same arithmetic on the same sums. If a device
computes differently, its copies drift apart without any error. A checkpoint has one copy of each, so a resumed run starts from
equal ones.

    ReplicaCheck          a checksum for each bucket that has copies, compared by one all-reduce per axis of 16 bytes per bucket;
                          reads the buckets' master weights once; the host never waits
    differing_replicas    which weights differ, and by how much; the host waits
    synchronize_replicas  copies the first rank's weights and states; moves their bytes once for each axis
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import collectives
from parallel.mesh import Axis, Mesh
from parallel.optimizer.arithmetic import Arithmetic, differ, halves, join_halves
from parallel.optimizer.buckets import Bucket, ShardBox


class ReplicaCheck:
    """Counts the buckets whose copies differ, on the device.

    Args:
        arithmetic: the functions that it computes with.

    Attributes:
        none: a count of 0.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self._checked: list[tuple[Axis, list[Bucket], list[Tensor]]] = []
        self.none = torch.zeros(1, device=buckets[0].master.device)
        for axis in _axes(mesh):
            held = [bucket for bucket in buckets if _has_copies(bucket, mesh, axis)]
            if held:
                self._checked.append((axis, held, [_checksum_weights(bucket, mesh, axis) for bucket in held]))

    @torch.no_grad()
    def count(self) -> Tensor:
        """Number of this rank's buckets whose copies differ, (1) float32. Collective."""
        if not self._checked:
            return self.none
        highest = [
            collectives.all_reduce_max(self._checksums(buckets, weights), axis)
            for axis, buckets, weights in self._checked
        ]
        return self.arithmetic.count_differing(highest)

    @torch.no_grad()
    def rehearse(self) -> None:
        """Run the computations of `count` without its collectives, so that all of them are compiled."""
        if self._checked:
            highest = [self._checksums(buckets, weights) for _, buckets, weights in self._checked]
            self.arithmetic.count_differing(highest)

    def _checksums(self, buckets: list[Bucket], weights: list[Tensor]) -> Tensor:
        return self.arithmetic.checksums([bucket.master for bucket in buckets], weights)


@torch.no_grad()
def differing_replicas(buckets: Sequence[Bucket], mesh: Mesh) -> dict[str, float]:
    """Largest difference of each weight whose copies differ, by name; the same on every rank. Collective."""
    found: dict[str, float] = {}
    for axis in _axes(mesh):
        _add_largest(found, _differing(buckets, mesh, axis))
    if mesh.host is None:
        return found
    everywhere: list[dict[str, float]] = [{}] * mesh.size
    dist.all_gather_object(everywhere, found, group=mesh.host)
    for other in everywhere:
        _add_largest(found, other)
    return dict(sorted(found.items()))


@torch.no_grad()
def synchronize_replicas(buckets: Sequence[Bucket], mesh: Mesh) -> None:
    """Replace the weights and states of each copy with those of the first rank that has one. Collective.

    Parameters follow at the next update, or by `ShardedAdamW.gather_parameters`.
    """
    for axis in _axes(mesh):
        for bucket, box in _replicated(buckets, mesh, axis):
            for state in bucket.states.values():
                bits = box.view(state).view(torch.int32)
                parts = halves(bits.flatten())
                lowest = torch.full_like(parts, -torch.inf)
                first = collectives.all_reduce_max(lowest if axis.rank else parts, axis)
                bits.copy_(join_halves(first).view_as(bits))


def _axes(mesh: Mesh) -> list[Axis]:
    """Axes over which some weights are replicated."""
    replicated = (mesh.tensor, mesh.kv_replica, mesh.embedding, mesh.dp_replicate, mesh.expert_replicate)
    axes = {axis.name: axis for axis in replicated}
    return [axis for axis in axes.values() if axis.size > 1]


def _is_replicated(bucket: Bucket, replicas: int, mesh: Mesh, axis: Axis) -> bool:
    """Whether a box of a bucket, of which `replicas` tensor ranks have a copy, is replicated over an axis."""
    return {
        "tensor": replicas == mesh.tensor.size,
        "kv_replica": 1 < replicas < mesh.tensor.size,
        "embedding": axis in bucket.partial,
        "dp_replicate": bucket.replicate is mesh.dp_replicate,
        "expert_replicate": bucket.replicate is mesh.expert_replicate,
    }[axis.name]


def _has_copies(bucket: Bucket, mesh: Mesh, axis: Axis) -> bool:
    # Decided by the parameters, not by this rank's shard of them: graphs do not depend on the rank.
    return any(_is_replicated(bucket, box.replicas, mesh, axis) for box in bucket.parameter_boxes())


def _checksum_weights(bucket: Bucket, mesh: Mesh, axis: Axis) -> Tensor:
    """Weights of the shard's blocks: 0 without copies, else distinct odd numbers, against cancellation."""
    copied = bucket.block_weights(lambda box: _is_replicated(bucket, box.replicas, mesh, axis))
    weights = torch.arange(1, 2 * len(copied), 2) * copied.bool()
    return weights.to(torch.int32).to(bucket.master.device)


def _replicated(buckets: Sequence[Bucket], mesh: Mesh, axis: Axis) -> list[tuple[Bucket, ShardBox]]:
    """Boxes in this rank's shards that other ranks of an axis have too, in the same order on each."""
    return [
        (bucket, box)
        for bucket in buckets
        for box in bucket.boxes()
        if _is_replicated(bucket, box.replicas, mesh, axis)
    ]


def _differing(buckets: Sequence[Bucket], mesh: Mesh, axis: Axis) -> dict[str, float]:
    """Largest difference of each weight whose copies on the ranks of an axis do not have the same bits."""
    boxes = [(box.name, box.view(bucket.master)) for bucket, box in _replicated(buckets, mesh, axis)]
    found: dict[str, float] = {}
    if not boxes:
        return found
    # Sums of the bits, so that no difference is rounded away; they wrap around.
    parts = halves(torch.stack([values.view(torch.int32).sum(dtype=torch.int32) for _, values in boxes]))
    differing = differ(collectives.all_reduce_max(torch.cat((parts, -parts)), axis)).tolist()
    for (name, values), differs in zip(boxes, differing, strict=True):
        if differs:
            highest_value = collectives.all_reduce_max(values, axis)
            spread = highest_value + collectives.all_reduce_max(-values, axis)
            _add_largest(found, {name: spread.max().item()})
    return found


def _add_largest(found: dict[str, float], other: dict[str, float]) -> None:
    """Add the entries of `other`, or the larger of two."""
    for name, value in other.items():
        found[name] = max(value, found.get(name, value))
