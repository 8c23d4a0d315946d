"""A cluster's links by level: over which the ranks of a mesh axis communicate, and how fast.

    chip       ranks on one chip, through its memory: tensor groups
    node       chips of one node, over NeuronLink or NVLink: groups that shard parameters
    network    nodes, over EFA or InfiniBand: replicas and pipeline stages

A group with several ranks per node sends between nodes over the links of all of them: a collective's ring enters and leaves each
node once, so its bandwidth is a device's share of the network times its ranks per node, limited by the links inside the node.
Messages between single ranks have a device's share alone: those of ring attention and of pipelines, of which the slowest decides,
and those of experts' all-to-all, of which a part stays inside the node.
"""

from __future__ import annotations

from modeling.models.build import device_of
from modeling.planning import calibration
from profiles.schema import Profile

# Shares of published bandwidths that large transfers reach. That of the network follows from AWS's published throughputs on trn1;
# those of GPUs are what NCCL's tests print for NVLink (360 of 450 GB/s on an H100) and for RDMA.
SHARES = {"chip": 0.6, "node": 0.6, "network": 0.3}
GPU_SHARES = {"chip": 0.8, "node": 0.8, "network": 0.9}


def level(profile: Profile, axis: str) -> str:
    """ "chip", "node" or "network": the slowest links between the ranks of a group."""
    stride, size = _span(profile, axis)
    chip = device_of(profile).chip
    if size == 1 or chip % (stride * size) == 0:
        return "chip"
    # Ranks are numbered node by node, so that a group whose size does not divide a node's may lie on two.
    if profile.cluster.nodes == 1 or profile.cluster.devices_per_node % (stride * size) == 0:
        return "node"
    return "network"


def bandwidth(profile: Profile, axis: str) -> float | None:
    """Bytes/s that one rank sends over an axis; None if the device's bandwidths are unknown."""
    device = device_of(profile)
    table = calibration.find(profile)
    measured = table.links if table else {}
    cluster, shares = profile.cluster, GPU_SHARES if device.architecture else SHARES
    network = cluster.network and cluster.network * 1e9 / 8 / cluster.devices_per_node
    published = {"chip": device.chip_link, "node": device.link, "network": network or device.network}
    speeds = {
        name: measured.get(name) or (speed and speed * shares[name]) for name, speed in published.items()
    }
    slowest = level(profile, axis)
    if device.chip == 1 and slowest == "chip":
        slowest = "node"
    if slowest != "network" or speeds["network"] is None:
        return speeds[slowest]
    stride, size = _span(profile, axis)
    ranks_per_node = max(1, min(size, profile.cluster.devices_per_node // stride))
    network, node = speeds["network"], speeds["node"] or speeds["network"]
    if axis == "expert":
        inside = (ranks_per_node - 1) / (size - 1)
        return 1 / (inside / node + (1 - inside) / network)
    # Messages to the next rank, unless K and V are gathered.
    if axis == "pipeline" or (axis == "context" and not device.compiles_operators):
        return network
    return min(node, network * ranks_per_node)


def _span(profile: Profile, axis: str) -> tuple[int, int]:
    """Distance between neighbouring ranks of an axis, and its size."""
    parallel = profile.parallel
    # "data": the ranks over which states are sharded; "replica": those that hold the same shard; also of experts
    shards, expert_shards = profile.shard_degree, profile.expert_shard_degree
    experts = parallel.tensor * parallel.expert
    return {
        "tensor": (1, parallel.tensor),
        "context": (parallel.tensor, parallel.context),
        "expert": (parallel.tensor, parallel.expert),
        "replica": (parallel.tensor * shards, profile.weight_replicas // shards),
        "expert_data": (experts, expert_shards),
        "expert_replica": (
            experts * expert_shards,
            profile.weight_replicas // parallel.expert // expert_shards,
        ),
        "data": (parallel.tensor, shards),
        "pipeline": (parallel.tensor * profile.weight_replicas, parallel.pipeline),
    }[axis]
