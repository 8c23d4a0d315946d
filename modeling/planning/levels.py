"""Levels of a cluster's network: over which links the ranks of a mesh axis communicate, and how fast.

    chip       ranks on one chip, through its memory: tensor groups
    node       chips of one node, over NeuronLink or NVLink: groups that shard parameters
    network    nodes, over EFA or InfiniBand: replicas and pipeline stages

A group with several ranks per node sends between nodes over the links of all of them: a ring enters and leaves each node once,
so its bandwidth is a device's share of the network times its ranks per node, limited by the links inside the node.
"""

from __future__ import annotations

from modeling.models.build import device_of
from modeling.planning import calibration
from profiles.schema import Profile

# Shares of published bandwidths that large transfers reach; that of the network follows from AWS's published throughputs on trn1.
SHARES = {"chip": 0.6, "node": 0.6, "network": 0.3}


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
    """Bytes/s that one rank sends to the next of its group; None if the device's bandwidths are unknown."""
    device = device_of(profile)
    table = calibration.find(profile)
    measured = table.links if table else {}
    published = {"chip": device.chip_link, "node": device.link, "network": device.network}
    speeds = {
        name: measured.get(name) or (speed and speed * SHARES[name]) for name, speed in published.items()
    }
    slowest = level(profile, axis)
    if device.chip == 1 and slowest == "chip":
        slowest = "node"
    if slowest != "network" or speeds["network"] is None:
        return speeds[slowest]
    stride, size = _span(profile, axis)
    ranks_per_node = max(1, min(size, profile.cluster.devices_per_node // stride))
    return min(speeds["node"] or speeds["network"], speeds["network"] * ranks_per_node)


def _span(profile: Profile, axis: str) -> tuple[int, int]:
    """Distance between neighbouring ranks of an axis, and its size."""
    parallel = profile.parallel
    # "data": the ranks over which states are sharded; "replica": those that hold the same shard
    shards = profile.shard_degree
    return {
        "tensor": (1, parallel.tensor),
        "context": (parallel.tensor, parallel.context),
        "expert": (parallel.tensor, parallel.expert),
        "replica": (parallel.tensor * shards, profile.weight_replicas // shards),
        "data": (parallel.tensor, shards),
        "pipeline": (parallel.tensor * profile.weight_replicas, parallel.pipeline),
    }[axis]
