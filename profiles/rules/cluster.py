"""Rules for `cluster` and `compile`: accelerators, launchers, backends, and what can only be planned."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

from profiles import plugins
from profiles.errors import ProfileError, install_command
from profiles.schema import Profile

LAUNCHERS = ("local", "slurm", "kubernetes")  # Trainshed's own
LAUNCHER_GROUP = "trainshed.launchers"  # of entry points
BACKENDS = {"cpu": ("inductor",), "cuda": ("inductor",), "neuron": ("neuron",)}
CPU_PROCESSES = 16
ACCELERATORS = {
    "cpu": (),
    "cuda": ("a100", "h100", "h100_96", "h800", "h200", "b200"),
    "neuron": ("trn1", "trn2", "trn3"),
}
# Accelerators that can be planned and converted for but not trained on: the reason, and alternatives.
TRN1 = "native PyTorch does not train on it, nor does AWS's older stack since SDK 2.30"
PLANNED_ONLY = {"trn1": (TRN1, ["trn2", "trn3"])}
# sbatch options that the launcher sets itself or that have a profile key.
LAUNCHER_OPTIONS = {
    *("array", "chdir", "comment", "dependency", "error", "export", "input", "job-name", "no-requeue"),
    *("ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "wait", "wrap"),
    *("account", "constraint", "exclusive", "nodes", "partition", "time"),
}


def check(profile: Profile) -> None:
    """Raise ProfileError if accelerator, launcher, time limit or sbatch options do not fit together."""
    cluster = profile.cluster
    if cluster.accelerator is not None and cluster.accelerator not in ACCELERATORS[cluster.device]:
        reason = f"is not an accelerator of device {cluster.device}"
        valid = ACCELERATORS[cluster.device] or ["null"]
        raise ProfileError("cluster.accelerator", cluster.accelerator, reason, valid)
    if cluster.launcher == "local" and cluster.nodes > 1:
        raise ProfileError("cluster.nodes", cluster.nodes, "the local launcher runs on one node", [1])
    if cluster.launcher == "local" and cluster.device == "cpu" and cluster.devices_per_node > CPU_PROCESSES:
        reason = f"is more than {CPU_PROCESSES} processes, the limit on one machine's CPU"
        raise ProfileError("cluster.devices_per_node", cluster.devices_per_node, reason)
    limit = cluster.time and time_limit_seconds(cluster.time)
    if limit and cluster.time_left >= limit:
        reason = f"leaves no time to train within cluster.time {cluster.time}"
        raise ProfileError("cluster.time_left", cluster.time_left, reason, [limit - 1])
    for number, option in enumerate(cluster.slurm):
        name = option.removeprefix("--").partition("=")[0]
        if name in LAUNCHER_OPTIONS:
            keys = [f"cluster.{name}"] if hasattr(cluster, name) else []
            raise ProfileError(f"cluster.slurm.{number}", option, f"the launcher sets --{name}", keys)


def check_trace(profile: Profile) -> None:
    """Raise ProfileError if the traced steps end before they begin, or begin after the last step."""
    trace, steps = profile.cluster.trace, profile.train.steps
    if trace and trace[0] > trace[1]:
        raise ProfileError("cluster.trace", list(trace), "ends before it begins", [list(reversed(trace))])
    if trace and steps is not None and trace[0] > steps:
        last_steps = [max(1, steps - (trace[1] - trace[0])), steps]
        reason = f"begins after the last step, train.steps = {steps}"
        raise ProfileError("cluster.trace", list(trace), reason, [last_steps])


def check_trainable(profile: Profile) -> None:
    """Raise ProfileError for an accelerator or a precision that can only be planned."""
    cluster = profile.cluster
    if cluster.accelerator in PLANNED_ONLY:
        raise ProfileError("cluster.accelerator", cluster.accelerator, *PLANNED_ONLY[cluster.accelerator])
    if profile.train.precision == "fp8" and cluster.device == "neuron":
        reason = f"can only be planned on {cluster.accelerator}: native PyTorch has no MXFP8 product for it"
        raise ProfileError("train.precision", "fp8", reason, ["bf16"])
    if profile.train.precision == "fp8" and profile.model.num_experts is not None:
        reason = "can only be planned for a model with experts, whose products have no FP8 kernel here"
        raise ProfileError("train.precision", "fp8", reason, ["bf16"])


def time_limit_seconds(time: str) -> int:
    """Seconds of a Slurm time limit, rounded up to minutes as Slurm does; 0: no limit.

    Formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
    """
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, rest_seconds = (*parts, 0, 0)[:3]
    elif len(parts) < 3:
        hours, minutes, rest_seconds = (0, *parts, 0)[:3]
    else:
        hours, minutes, rest_seconds = parts
    return 60 * (int(days or 0) * 1440 + hours * 60 + minutes + (rest_seconds + 59) // 60)


def check_launcher(profile: Profile) -> None:
    """Raise ProfileError for an unknown launcher or incomplete settings of the Kubernetes launcher."""
    cluster = profile.cluster
    if cluster.launcher not in LAUNCHERS:
        plugins.find(LAUNCHER_GROUP, cluster.launcher, "cluster.launcher", LAUNCHERS)
    if cluster.launcher == "kubernetes":
        settings = cluster.kubernetes
        for key in ("image", "claim", "mount"):
            if getattr(settings, key) is None:
                raise ProfileError(
                    f"cluster.kubernetes.{key}", None, "is missing: the Kubernetes launcher needs it"
                )
        if cluster.device == "neuron" and not settings.resources:
            reason = "is empty; list the devices that a Pod requests"
            raise ProfileError("cluster.kubernetes.resources", [], reason, ["[aws.amazon.com/neuron=16]"])


def check_launcher_installed(profile: Profile) -> None:
    """Raise ProfileError unless this machine has what the launcher calls: sbatch or the Kubernetes client."""
    if profile.cluster.launcher == "slurm" and shutil.which("sbatch") is None:
        raise ProfileError("cluster.launcher", "slurm", "sbatch is not on this machine's PATH", ["local"])
    if profile.cluster.launcher == "kubernetes" and find_spec("kubernetes") is None:
        reason = f"its client is not installed; install it with: {install_command('kubernetes')}"
        raise ProfileError("cluster.launcher", "kubernetes", reason)


def check_compilation(profile: Profile) -> None:
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
