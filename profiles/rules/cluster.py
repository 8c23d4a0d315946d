"""Rules for `cluster`: accelerators, time limits, and what can be trained rather than only planned."""

from __future__ import annotations

from profiles.errors import ProfileError
from profiles.schema import Profile

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
