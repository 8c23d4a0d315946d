"""Whether the copies of the same weights on several ranks still have the same bits.

Norms on all tensor ranks, KV heads on some of them, an embedding on the first and last pipeline stage and everything over
`dp_replicate` (of experts: `expert_replicate`) are updated on each rank from equal sums by equal arithmetic. If a device computes
differently, its copies drift apart without any error. A checkpoint has one copy of each, so a resumed run starts from equal ones.

Cost: one pass over the replicated shards, and 4 bytes sent for each of their boxes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from parallel import collectives
from parallel.mesh import Axis, Mesh
from parallel.optimizer.buckets import Bucket


@torch.no_grad()
def differing_replicas(buckets: Sequence[Bucket], mesh: Mesh) -> list[str]:
    """Names of the weights whose copies differ, the same on every rank. Collective."""
    found = {box_name for axis in _axes(mesh) for box_name in _differing(buckets, mesh, axis)}
    if mesh.host is None:
        return sorted(found)
    everywhere: list[set[str]] = [set()] * mesh.size
    dist.all_gather_object(everywhere, found, group=mesh.host)
    return sorted(set().union(*everywhere))


def _axes(mesh: Mesh) -> list[Axis]:
    replicated = (mesh.tensor, mesh.kv_replica, mesh.embedding, mesh.dp_replicate, mesh.expert_replicate)
    axes = {axis.name: axis for axis in replicated}
    return [axis for axis in axes.values() if axis.size > 1]


def _differing(buckets: Sequence[Bucket], mesh: Mesh, axis: Axis) -> list[str]:
    names, sums = [], []
    for bucket in buckets:
        for box in bucket.boxes():
            replicated = {
                "tensor": box.replicas == mesh.tensor.size,
                "kv_replica": 1 < box.replicas < mesh.tensor.size,
                "embedding": axis in bucket.partial,
                "dp_replicate": bucket.replicate is mesh.dp_replicate,
                "expert_replicate": bucket.replicate is mesh.expert_replicate,
            }
            if replicated[axis.name]:
                names.append(box.name)
                # Of the bits, so that no difference is rounded away; wraps around.
                sums.append(box.view(bucket.master).view(torch.int32).sum(dtype=torch.int32))
    if not names:
        return []
    checksums = torch.stack(sums)
    highest = collectives.all_reduce_max(checksums, axis)
    lowest = ~collectives.all_reduce_max(~checksums, axis)
    differs = (highest != lowest).tolist()
    return [name for name, differ in zip(names, differs, strict=True) if differ]
