"""Rules for `compile`: backends and options that depend on the device."""

from __future__ import annotations

from profiles.errors import ProfileError
from profiles.schema import Profile

BACKENDS = {"cpu": ("inductor",), "cuda": ("inductor",), "neuron": ("neuron",)}


def check(profile: Profile) -> None:
    """Raise ProfileError for a backend or options that do not apply to the device."""
    compile, device = profile.compile, profile.cluster.device
    if compile.backend not in (None, *BACKENDS[device]):
        reason = f"does not support device {device}"
        raise ProfileError("compile.backend", compile.backend, reason, BACKENDS[device])
    parallel = profile.parallel
    if compile.async_tensor and (
        device != "cuda" or not compile.possible or parallel.tensor == 1 or not parallel.sequence_parallel
    ):
        reason = "needs compiled graphs on cuda, and sequence parallelism over more than one tensor rank"
        raise ProfileError("compile.async_tensor", True, reason, [False])
    if compile.async_tensor and parallel.overlap_chunks not in (None, 1):
        reason = "merges no products in chunks with collectives"
        raise ProfileError("compile.async_tensor", True, reason, [False])
    if compile.launcher == "slurm" and device == "cuda":
        reason = (
            "compiles on nodes without accelerators, and graphs for cuda are compiled on a node with a GPU"
        )
        raise ProfileError("compile.launcher", "slurm", reason, ["local"])
    if compile.flags is not None and device != "neuron":
        reason = f"only applies to device neuron; the device is {device}"
        raise ProfileError("compile.flags", compile.flags, reason, ["null"])
