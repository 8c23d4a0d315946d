"""Plan a topology for other hardware: the fastest that fits nodes with about the same peak compute.

Batch sizes, sequence length and schedule are kept, and so is the run's mathematics. If no topology fits, the nodes are doubled.
"""

from __future__ import annotations

import math
from typing import Any

from modeling.models.build import device_of
from modeling.planning.search import search
from parallel import device as devices
from profiles.check import with_value
from profiles.errors import ProfileError
from profiles.schema import Profile

HARDWARE = {"trn2": ("neuron", 64), "h200": ("cuda", 8)}  # accelerator: device type, and devices per node
DOUBLINGS = 4


def replan(profile: Profile, accelerator: str) -> dict[str, Any]:
    """The profile keys to set; None restores a key's default.

    Raises:
        ProfileError: no topology fits, or the profile is invalid on all.
    """
    device, per_node = HARDWARE[accelerator]
    fewest = _nodes(profile, accelerator)
    for nodes in (fewest * 2**n for n in range(DOUBLINGS)):
        cluster = {
            "cluster.launcher": "slurm" if nodes > 1 else "local",
            "cluster.nodes": nodes,
            "cluster.devices_per_node": per_node,
            "cluster.device": device,
            "cluster.accelerator": accelerator,
        }
        candidate = profile
        for key, value in cluster.items():
            candidate = with_value(candidate, key, value)
        found, rejected = search(candidate)
        if found:
            return cluster | found[0].overrides
    rules = (each.reason for each in rejected if each.reason != "memory")
    reason = next(rules, "no topology fits its memory")
    raise ProfileError("--hardware", accelerator, f"{reason}, on {fewest} to {nodes} nodes")


def _nodes(profile: Profile, accelerator: str) -> int:
    """The number of nodes, a power of two, whose peak is closest to that of the profile's cluster."""
    device, per_node = HARDWARE[accelerator]
    theirs = device_of(profile).peak("bf16")
    ours = devices.resolve(device, accelerator).peak("bf16")
    if theirs is None or ours is None:
        return 1
    ratio = theirs * profile.world_size / (ours * per_node)
    return 2 ** max(0, round(math.log2(ratio)))
