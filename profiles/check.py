"""The rules between a profile's sections, and the files that it names: all that can be refused without a device."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from parallel.constraints import (
    invalid_cuts,
    minimum_stages_per_rank,
    supports_microbatches,
    valid_tensor_degrees,
)
from profiles import functions, sources
from profiles.errors import ProfileError
from profiles.model import LARGEST, neighbours
from profiles.schema import Profile

CPU_PROCESSES = 16
FARTHEST = 1024  # steps from a value that its nearest valid ones are looked for
ACCELERATORS = {"cpu": (), "cuda": ("h100", "h200"), "neuron": ("trn1", "trn2", "trn3")}
# Accelerators that runs are planned and checkpoints converted for, with the reason and what trains instead.
PLANNED_ONLY = {
    "trn1": (
        "native PyTorch does not train on it, nor does AWS's older stack since SDK 2.30",
        ["trn2", "trn3"],
    )
}
BACKENDS = {"cpu": ("inductor",), "cuda": ("inductor",), "neuron": ("neuron",)}
# Options of sbatch that the launcher sets itself, or that have a key of their own.
OWN_OPTIONS = {
    *(
        "array",
        "chdir",
        "comment",
        "dependency",
        "error",
        "export",
        "input",
        "job-name",
        "no-requeue",
        "nodes",
    ),
    *("ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "wait", "wrap"),
    *("account", "constraint", "exclusive", "partition", "time"),
}
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def check(profile: Profile) -> None:
    """Refuse what cannot work.

    Raises:
        ProfileError: the first such thing.
    """
    for rule in (*TOPOLOGY, _trace, _schedule, _vocabulary, _files, _compile, sources.check):
        try:
            rule(profile)
        except ProfileError as error:
            if rule in CURES and not error.choices:
                choices = _cures(profile, rule, error.key)
                raise ProfileError(error.key, error.value, error.reason, choices) from None
            raise


def passes(profile: Profile, rules: Iterable[Callable[[Profile], None]] | None = None) -> bool:
    """Whether a profile can be spread over its cluster as it says: those rules, or all that look at degrees and batches."""
    try:
        for rule in TOPOLOGY if rules is None else rules:
            rule(profile)
    except ProfileError:
        return False
    return True


def value_of(profile: Profile, key: str) -> Any:
    """What a profile says under `section.name`."""
    section, name = key.split(".")
    return getattr(getattr(profile, section), name)


def changed(profile: Profile, key: str, value: Any) -> Profile:
    """The profile with one key (`section.name`) of another value."""
    section, name = key.split(".")
    part = getattr(profile, section).model_copy(update={name: value})
    return profile.model_copy(update={section: part})


def check_start(profile: Profile) -> None:
    """Refuse what can be planned on this machine but not started from it.

    Raises:
        ProfileError: the first such thing.
    """
    cluster = profile.cluster
    if cluster.accelerator in PLANNED_ONLY:
        raise ProfileError("cluster.accelerator", cluster.accelerator, *PLANNED_ONLY[cluster.accelerator])
    if cluster.launcher == "slurm" and shutil.which("sbatch") is None:
        raise ProfileError("cluster.launcher", "slurm", "this machine has no sbatch", ["local"])
    functions.check(profile)


def _cluster(profile: Profile) -> None:
    cluster = profile.cluster
    if cluster.accelerator is not None and cluster.accelerator not in ACCELERATORS[cluster.device]:
        reason = f"is no model of device {cluster.device}"
        valid = ACCELERATORS[cluster.device] or ["null"]
        raise ProfileError("cluster.accelerator", cluster.accelerator, reason, valid)
    if cluster.launcher == "local" and cluster.nodes > 1:
        raise ProfileError("cluster.nodes", cluster.nodes, "the local launcher is for one node", [1])
    if cluster.launcher == "local" and cluster.device == "cpu" and cluster.devices_per_node > CPU_PROCESSES:
        reason = f"more than {CPU_PROCESSES} processes on one machine's CPU"
        raise ProfileError("cluster.devices_per_node", cluster.devices_per_node, reason, [CPU_PROCESSES])
    limit = cluster.time and seconds(cluster.time)
    if limit and cluster.time_left >= limit:
        reason = f"leaves nothing of cluster.time {cluster.time} to train in"
        raise ProfileError("cluster.time_left", cluster.time_left, reason, [limit - 1])
    for number, option in enumerate(cluster.slurm):
        name = option.removeprefix("--").partition("=")[0]
        if name in OWN_OPTIONS:
            keys = [f"cluster.{name}"] if hasattr(cluster, name) else []
            raise ProfileError(f"cluster.slurm.{number}", option, f"the launcher sets --{name} itself", keys)


def seconds(time: str) -> int:
    """A time limit as Slurm takes it, which rounds up to minutes; 0: none.

    minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
    """
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, more = (*parts, 0, 0)[:3]
    elif len(parts) < 3:
        hours, minutes, more = (0, *parts, 0)[:3]
    else:
        hours, minutes, more = parts
    return 60 * (int(days or 0) * 1440 + hours * 60 + minutes + (more + 59) // 60)


def _trace(profile: Profile) -> None:
    trace = profile.cluster.trace
    if trace and trace[0] > trace[1]:
        raise ProfileError("cluster.trace", list(trace), "ends before it begins", [list(reversed(trace))])


def _tensor(profile: Profile) -> None:
    model, tensor = profile.model, profile.parallel.tensor
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    valid = valid_tensor_degrees(heads, kv_heads)
    if tensor not in valid:
        if heads % tensor:
            reason = f"does not divide {heads} query heads"
        else:
            reason = f"neither divides {kv_heads} KV heads nor is a multiple of them"
        raise ProfileError("parallel.tensor", tensor, reason, neighbours(tensor, valid))
    if model.intermediate_size % tensor:
        fitting = [t for t in valid if model.intermediate_size % t == 0]
        reason = f"does not divide model.intermediate_size {model.intermediate_size}"
        raise ProfileError("parallel.tensor", tensor, reason, neighbours(tensor, fitting))
    given, derived = profile.parallel.kv_replication, profile.kv_replication
    if given not in (None, derived):
        reason = f"tensor {tensor} over {kv_heads} KV heads makes it {derived}"
        raise ProfileError("parallel.kv_replication", given, reason, [derived])


def _pipeline(profile: Profile) -> None:
    layers, parallel = profile.model.num_hidden_layers, profile.parallel
    ranks, cuts = parallel.pipeline, parallel.pipeline_cuts
    stages = ranks * minimum_stages_per_rank(parallel.schedule, ranks)
    if ranks > layers:
        raise ProfileError(
            "parallel.pipeline", ranks, f"more stages than the model's {layers} layers", [layers]
        )
    if stages > layers:
        reason = f"has 2 stages or more a rank, and {stages} are more than the model's {layers} layers"
        raise ProfileError("parallel.schedule", parallel.schedule, reason, ["1f1b", "zero_bubble"])
    if parallel.schedule == "zero_bubble" and ranks > 1:
        reason = "parallel.schedule zero_bubble splits backward in two, which does not work with"
        if profile.compile.enabled:
            raise ProfileError("compile.enabled", True, f"{reason} compiled graphs", [False])
        if profile.train.recompute != "none":
            reason = f"{reason} recomputation"
            raise ProfileError("train.recompute", profile.train.recompute, reason, ["none"])
    if cuts is not None and (reason := invalid_cuts(cuts, layers, ranks, parallel.schedule)):
        raise ProfileError("parallel.pipeline_cuts", cuts, reason, ["null"])


def _microbatches(profile: Profile) -> None:
    ranks, schedule = profile.parallel.pipeline, profile.parallel.schedule
    count = profile.accumulation_steps
    if not supports_microbatches(schedule, ranks, count):
        reason = (
            f"makes {count} microbatches a step, which schedule {schedule} on {ranks} ranks does not take"
        )
        raise ProfileError("train.global_batch_size", profile.train.global_batch_size, reason)


def _context(profile: Profile) -> None:
    parallel, train = profile.parallel, profile.train
    s, size = train.sequence_length, train.micro_batch_size
    if parallel.context > 1:
        parts = 2 * parallel.context
        _multiple("train.sequence_length", s, parts, f"every context rank has 2 of {parts} equal parts of it")
    if parallel.sequence_parallel and size * s // parallel.context % parallel.tensor:
        parts = parallel.context * parallel.tensor * (2 if parallel.context > 1 else 1)
        reason = f"sequence parallelism splits it over {parallel.tensor} tensor ranks"
        _multiple("train.sequence_length", s, parts, reason)
    if profile.model.architecture == "gpt" and s > profile.model.max_position_embeddings:
        longest = profile.model.max_position_embeddings
        raise ProfileError("train.sequence_length", s, f"gpt has {longest} learned positions", [longest])


def _data_parallel(profile: Profile) -> None:
    world, copy = profile.world_size, profile.model_parallel
    if world % copy == 0:
        return
    cluster, parallel = profile.cluster, profile.parallel
    degrees = f"tensor {parallel.tensor} × pipeline {parallel.pipeline} × context {parallel.context} = {copy}"
    if cluster.launcher == "local":
        raise ProfileError(
            "cluster.devices_per_node", cluster.devices_per_node, f"is no multiple of {degrees}"
        )
    reason = (
        f"with {cluster.devices_per_node} devices on each that is {world} processes, no multiple of {degrees}"
    )
    raise ProfileError("cluster.nodes", cluster.nodes, reason)


def _batch(profile: Profile) -> None:
    train, copies = profile.train, profile.data_parallel
    reason = f"micro_batch_size {train.micro_batch_size} × data-parallel degree {copies} does not divide it"
    _multiple("train.global_batch_size", train.global_batch_size, train.micro_batch_size * copies, reason)


def _recompute(profile: Profile) -> None:
    train = profile.train
    if train.recompute_layers is not None and train.recompute == "none":
        reason = "says of how many layers, but train.recompute is none"
        raise ProfileError("train.recompute_layers", train.recompute_layers, reason, ["null"])


def _schedule(profile: Profile) -> None:
    train = profile.train
    if train.steps is not None and train.epochs is not None:
        reason = f"and train.steps {train.steps} say two things; set the other to null"
        raise ProfileError("train.epochs", train.epochs, reason, ["null"])
    if train.epochs is not None and any(source.weight for source in profile.data.sources):
        reason = "is not defined for sources with weights, which end at different times; give train.steps"
        raise ProfileError("train.epochs", train.epochs, reason, ["null"])
    if train.steps is None and train.epochs is None:
        raise ProfileError("train.steps", None, "is missing: give train.steps or train.epochs")
    if train.steps is not None and train.warmup_steps + train.constant_steps > train.steps:
        key = "warmup_steps" if train.warmup_steps > train.steps else "constant_steps"
        reason = f"warm-up and constant steps together are more than train.steps {train.steps}"
        raise ProfileError(
            f"train.{key}",
            getattr(train, key),
            reason,
            [train.steps - (train.warmup_steps if key == "constant_steps" else 0)],
        )
    if train.minimum_learning_rate > train.learning_rate:
        reason = f"is above learning_rate {train.learning_rate}"
        raise ProfileError(
            "train.minimum_learning_rate", train.minimum_learning_rate, reason, [train.learning_rate]
        )


def _vocabulary(profile: Profile) -> None:
    size, room = profile.tokenizer.vocabulary_size, profile.model.vocab_size
    if profile.tokenizer.source == "train" and size is None:
        reason = "is missing: a tokenizer that is trained needs its size"
        raise ProfileError("tokenizer.vocabulary_size", None, reason, [room])
    if size is not None and size > room:
        raise ProfileError(
            "tokenizer.vocabulary_size", size, f"is larger than model.vocab_size {room}", [room]
        )


def _files(profile: Profile) -> None:
    if profile.tokenizer.source != "train":
        _folder_or_repository("tokenizer.source", profile.tokenizer.source)
    if profile.init.from_ is not None:
        _folder_or_repository("init.from", profile.init.from_)


def _compile(profile: Profile) -> None:
    compile, device = profile.compile, profile.cluster.device
    if compile.backend not in (None, *BACKENDS[device]):
        reason = f"does not compile for device {device}"
        raise ProfileError("compile.backend", compile.backend, reason, BACKENDS[device])
    if compile.flags is not None and device != "neuron":
        reason = f"are the Neuron compiler's, and the device is {device}"
        raise ProfileError("compile.flags", compile.flags, reason, ["null"])


def _folder_or_repository(key: str, source: str) -> None:
    """Whether a hub or a bucket has it is found out when it is fetched."""
    if "://" in source or Path(source).expanduser().is_dir():
        return
    if source.startswith((".", "~")) or not REPOSITORY.fullmatch(source):
        raise ProfileError(key, source, "there is no such folder, and a hub repository is named org/name")


def _multiple(key: str, value: int, of: int, reason: str) -> None:
    if value % of:
        raise ProfileError(key, value, reason)


# The rules that look at degrees, batches and the cluster, in order.
TOPOLOGY = (_cluster, _tensor, _pipeline, _context, _data_parallel, _batch, _microbatches, _recompute)
# By rule, what else than the refused key may be changed to keep it.
CURES: dict[Callable[[Profile], None], tuple[str, ...]] = {
    _context: ("parallel.context",),
    _data_parallel: ("parallel.pipeline", "parallel.context", "parallel.tensor"),
    _batch: (),
    _microbatches: (),
}


def _cures(profile: Profile, rule: Callable[[Profile], None], key: str) -> list[Any]:
    """Values of the refused key, and `key=value` of others, with which a profile passes; one that breaks more rules, this one."""
    for rules in (TOPOLOGY, TOPOLOGY[: TOPOLOGY.index(rule) + 1]):
        found = [
            value if each == key else f"{each}={value}"
            for each in (key, *CURES[rule])
            for value in _nearest(profile, each, rules)
        ]
        if found:
            return found
    return []


def _nearest(profile: Profile, key: str, rules: Sequence[Callable[[Profile], None]]) -> list[int]:
    """The values of a key next to its own, below and above, with which a profile keeps these rules."""
    value = value_of(profile, key)
    step = {
        "train.global_batch_size": profile.train.micro_batch_size * max(1, profile.data_parallel),
        "train.sequence_length": 2 * profile.parallel.context if profile.parallel.context > 1 else 1,
    }.get(key, 1)
    here = value // step
    below = range(here - (value % step == 0), max(0, here - FARTHEST), -1)
    above = range(here + 1, min(here + FARTHEST, LARGEST // step + 1))
    found = (
        next((n * step for n in way if passes(changed(profile, key, n * step), rules)), None)
        for way in (below, above)
    )
    return [each for each in found if each]
