"""Validation rules across a profile's sections, and for local files before a run; needs no device.

`check` runs the rules in order. An error offers only choices with which the profile satisfies the other rules too; if a rule
cannot compute its valid values, the nearest ones are found by trial.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from parallel.constraints import (
    invalid_cuts,
    minimum_stages,
    supports_microbatches,
    valid_expert_degrees,
    valid_tensor_degrees,
)
from profiles import user_functions
from profiles.errors import ProfileError
from profiles.rules import data_sources, hyperparameters, launchers, objectives, trackers
from profiles.schema import Profile
from profiles.sections.base import MAX_SIZE
from profiles.sections.model import neighbours

Rule = Callable[[Profile], None]  # raises ProfileError
CPU_PROCESSES = 16
SEARCH_STEPS = 1024  # of the search for valid values below and above an invalid one
ACCELERATORS = {"cpu": (), "cuda": ("h100", "h200", "b200"), "neuron": ("trn1", "trn2", "trn3")}
# Accelerators that can be planned and converted for but not trained on: the reason, and alternatives.
TRN1 = "native PyTorch does not train on it, nor does AWS's older stack since SDK 2.30"
PLANNED_ONLY = {"trn1": (TRN1, ["trn2", "trn3"])}
BACKENDS = {"cpu": ("inductor",), "cuda": ("inductor",), "neuron": ("neuron",)}
# sbatch options that the launcher sets itself or that have a profile key.
LAUNCHER_OPTIONS = {
    *("array", "chdir", "comment", "dependency", "error", "export", "input", "job-name", "no-requeue"),
    *("ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "wait", "wrap"),
    *("account", "constraint", "exclusive", "nodes", "partition", "time"),
}
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
RUN = "run:"  # prefix of a source that is a run's export: run:NAME


def check(profile: Profile) -> None:
    """Check that a profile can be planned.

    Raises:
        ProfileError: the first broken topology rule, as later ones depend on it, and every other broken rule.
    """
    errors = []
    if broken := _broken(profile, TOPOLOGY):
        rule, error = broken
        errors.append(error.with_choices(_topology_choices(profile, rule, error)))
    for rule in INDEPENDENT:
        if broken := _broken(profile, [rule]):
            errors.append(broken[1])
    if errors:
        raise errors[0].along_with(errors[1:])


def _broken(profile: Profile, rules: Iterable[Rule]) -> tuple[Rule, ProfileError] | None:
    """The first of these rules that a profile breaks, and how."""
    for rule in rules:
        try:
            rule(profile)
        except ProfileError as error:
            return rule, error
    return None


def passes(profile: Profile, rules: Iterable[Rule] | None = None) -> bool:
    """Whether a profile satisfies rules; by default those for parallel degrees, batch sizes and cluster."""
    return _broken(profile, TOPOLOGY if rules is None else rules) is None


def get_value(profile: Profile, key: str) -> Any:
    """The value of `section.name`."""
    section, name = key.split(".")
    return getattr(getattr(profile, section), name)


def with_value(profile: Profile, key: str, value: Any) -> Profile:
    """A copy of the profile with another value of `section.name`."""
    section, name = key.split(".")
    return profile.model_copy(update={section: getattr(profile, section).model_copy(update={name: value})})


def check_start(profile: Profile) -> None:
    """Check that a run can start from this machine with its local files, which planning does not need.

    Raises:
        ProfileError: every reason why it cannot.
    """
    errors = [broken[1] for rule in START if (broken := _broken(profile, [rule]))]
    if errors:
        raise errors[0].along_with(errors[1:])


def _trainable(profile: Profile) -> None:
    cluster = profile.cluster
    if cluster.accelerator in PLANNED_ONLY:
        raise ProfileError("cluster.accelerator", cluster.accelerator, *PLANNED_ONLY[cluster.accelerator])
    if profile.train.precision == "fp8" and cluster.device == "neuron":
        reason = f"can only be planned on {cluster.accelerator}: native PyTorch has no MXFP8 product for it"
        raise ProfileError("train.precision", "fp8", reason, ["bf16"])


def _static_shapes(profile: Profile) -> None:
    experts, capacity = profile.model.num_experts, profile.train.capacity_factor
    if experts is not None and capacity is None and profile.cluster.device == "neuron":
        reason = "is missing: without it shapes depend on the data, but neuron compiles only static shapes"
        raise ProfileError("train.capacity_factor", None, reason, [1.25])


def _launcher(profile: Profile) -> None:
    if profile.cluster.launcher == "slurm" and shutil.which("sbatch") is None:
        raise ProfileError("cluster.launcher", "slurm", "sbatch is not on this machine's PATH", ["local"])


def _cluster(profile: Profile) -> None:
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
        raise ProfileError("parallel.tensor", tensor, reason)
    for name, width in model.mlp_widths.items():
        if width % tensor:
            raise ProfileError("parallel.tensor", tensor, f"does not divide model.{name} {width}")
    given, derived = profile.parallel.kv_replication, profile.kv_replication
    if given not in (None, derived):
        reason = f"tensor {tensor} over {kv_heads} KV heads makes it {derived}"
        raise ProfileError("parallel.kv_replication", given, reason, [derived])


def _pipeline(profile: Profile) -> None:
    layers, parallel = profile.model.num_hidden_layers, profile.parallel
    ranks, cuts = parallel.pipeline, parallel.pipeline_cuts
    stages = minimum_stages(parallel.schedule, ranks)
    if ranks > layers:
        raise ProfileError("parallel.pipeline", ranks, f"is more than the model's {layers} layers")
    if stages > layers:
        reason = f"needs at least 2 stages per rank, and {stages} are more than the model's {layers} layers"
        raise ProfileError("parallel.schedule", parallel.schedule, reason, ["1f1b", "zero_bubble"])
    if parallel.schedule == "zero_bubble" and ranks > 1:
        reason = "parallel.schedule zero_bubble splits the backward pass and does not support"
        if profile.train.recompute != "none":
            reason = f"{reason} activation checkpointing"
            raise ProfileError("train.recompute", profile.train.recompute, reason, ["none"])
        if (
            profile.cluster.device == "neuron"
            and profile.compile.enabled
            and parallel.data_sharding == "fsdp"
        ):
            reason = f"{reason} fsdp within compiled graphs on neuron"
            raise ProfileError("parallel.data_sharding", "fsdp", reason, ["zero1", "none"])
    if cuts is not None and (reason := invalid_cuts(cuts, layers, ranks, parallel.schedule)):
        raise ProfileError("parallel.pipeline_cuts", cuts, reason, ["null"])


def _microbatches(profile: Profile) -> None:
    ranks, schedule = profile.parallel.pipeline, profile.parallel.schedule
    count = profile.accumulation_steps
    if not supports_microbatches(schedule, ranks, count):
        reason = f"makes {count} microbatches per step, which schedule {schedule} on {ranks} ranks does not support"
        raise ProfileError("train.global_batch_size", profile.train.global_batch_size, reason)


def _context(profile: Profile) -> None:
    parallel, train = profile.parallel, profile.train
    s, size = train.sequence_length, profile.micro_batch_rows
    if parallel.context > 1:
        parts = 2 * parallel.context
        _multiple("train.sequence_length", s, parts, f"each context rank holds 2 of {parts} equal parts")
    if parallel.sequence_parallel and size * s // parallel.context % parallel.tensor:
        parts = parallel.context * parallel.tensor * (2 if parallel.context > 1 else 1)
        reason = f"sequence parallelism divides it among {parallel.tensor} tensor ranks"
        _multiple("train.sequence_length", s, parts, reason)
    if profile.model.architecture == "gpt" and s > profile.model.max_position_embeddings:
        longest = profile.model.max_position_embeddings
        raise ProfileError("train.sequence_length", s, f"gpt has {longest} learned positions", [longest])


def _data_parallel(profile: Profile) -> None:
    world, replica = profile.world_size, profile.model_parallel
    if world % replica == 0:
        return
    parallel, per_node = profile.parallel, profile.cluster.devices_per_node
    mesh = f"tensor {parallel.tensor} × pipeline {parallel.pipeline} × context {parallel.context} = {replica}"
    if profile.cluster.launcher == "local":
        raise ProfileError("cluster.devices_per_node", per_node, f"is not a multiple of {mesh}")
    reason = f"times {per_node} devices per node is {world} processes, not a multiple of {mesh}"
    raise ProfileError("cluster.nodes", profile.cluster.nodes, reason)


def _sharding(profile: Profile) -> None:
    parallel, ranks = profile.parallel, profile.weight_replicas
    sharding, degree = parallel.data_sharding, parallel.shard_degree
    if degree is not None and sharding == "none":
        reason = "has no effect: parallel.data_sharding is none"
        raise ProfileError("parallel.shard_degree", degree, reason, ["null"])
    if degree is not None and ranks % degree:
        raise ProfileError("parallel.shard_degree", degree, f"does not divide data × context = {ranks} ranks")
    if parallel.overlap_chunks is not None and (parallel.tensor == 1 or not parallel.sequence_parallel):
        reason = "has no effect without sequence parallelism over more than one tensor rank"
        raise ProfileError("parallel.overlap_chunks", parallel.overlap_chunks, reason, ["null"])
    if parallel.keep_gathered and sharding != "fsdp":
        reason = f"has no effect: parallel.data_sharding is {sharding}"
        raise ProfileError("parallel.keep_gathered", parallel.keep_gathered, reason, [False])
    if parallel.keep_gathered is True and profile.cluster.device == "neuron" and profile.compile.enabled:
        reason = "is not supported on neuron, where compiled blocks gather their weights in each microbatch"
        raise ProfileError("parallel.keep_gathered", True, reason, [False])


def _experts(profile: Profile) -> None:
    model, parallel, train = profile.model, profile.parallel, profile.train
    degree, experts = parallel.expert, model.num_experts
    if experts is None:
        reason = f"has no effect: {model.architecture} has no experts"
        if degree > 1:
            raise ProfileError("parallel.expert", degree, reason, [1])
        if train.capacity_factor is not None:
            raise ProfileError("train.capacity_factor", train.capacity_factor, reason, ["null"])
        if train.balance == "bias":
            raise ProfileError("train.balance", "bias", reason, ["sequence"])
        return
    ranks = profile.weight_replicas
    valid = valid_expert_degrees(experts, ranks)
    if degree not in valid:
        reason = f"does not divide {experts} experts"
        if ranks % degree:
            reason = f"does not divide data × context = {ranks} ranks"
        raise ProfileError("parallel.expert", degree, reason, neighbours(degree, valid))
    if parallel.schedule == "zero_bubble" and parallel.pipeline > 1:
        reason = "splits the backward pass, which would count the load of experts twice"
        raise ProfileError("parallel.schedule", "zero_bubble", reason, ["1f1b", "interleaved"])
    if train.precision == "fp8":
        raise ProfileError("train.precision", "fp8", "does not support experts", ["bf16"])
    if train.balance == "bias" and not model.family.selection_bias:
        reason = f"adjusts a bias in the selection of experts, which exports of {model.architecture} have no tensor for"
        raise ProfileError("train.balance", "bias", reason, ["sequence", "global", "none"])
    if train.balance != "bias" and train.balance_bias_rate is not None:
        reason = f"has no effect with train.balance {train.balance}"
        raise ProfileError("train.balance_bias_rate", train.balance_bias_rate, reason, ["null"])
    if train.capacity_factor is not None and parallel.context > 1:
        reason = "counts tokens of complete samples, which parallel.context divides"
        raise ProfileError("train.capacity_factor", train.capacity_factor, reason, ["null"])


def _batch(profile: Profile) -> None:
    train, replicas = profile.train, profile.data_parallel
    reason = f"micro_batch_size {train.micro_batch_size} × data-parallel degree {replicas} does not divide it"
    _multiple("train.global_batch_size", train.global_batch_size, train.micro_batch_size * replicas, reason)


def _vocabulary(profile: Profile) -> None:
    size, embeddings = profile.tokenizer.vocabulary_size, profile.model.vocab_size
    if profile.tokenizer.source == "train" and size is None:
        reason = "is missing; training a tokenizer needs its size"
        raise ProfileError("tokenizer.vocabulary_size", None, reason, [embeddings])
    if size is not None and size > embeddings:
        reason = f"is larger than model.vocab_size {embeddings}"
        raise ProfileError("tokenizer.vocabulary_size", size, reason, [embeddings])


def _tokenizer_folder(profile: Profile) -> None:
    if profile.tokenizer.source != "train":
        _folder_or_repository("tokenizer.source", profile.tokenizer.source)


def _initial_weights(profile: Profile) -> None:
    if profile.init.from_ is not None:
        _folder_or_repository("init.from", profile.init.from_)


def _compile(profile: Profile) -> None:
    compile, device = profile.compile, profile.cluster.device
    if compile.backend not in (None, *BACKENDS[device]):
        reason = f"does not support device {device}"
        raise ProfileError("compile.backend", compile.backend, reason, BACKENDS[device])
    parallel = profile.parallel
    if compile.async_tensor and (
        device != "cuda" or not compile.enabled or parallel.tensor == 1 or not parallel.sequence_parallel
    ):
        reason = "needs compiled graphs on cuda, and sequence parallelism over more than one tensor rank"
        raise ProfileError("compile.async_tensor", True, reason, [False])
    if compile.flags is not None and device != "neuron":
        reason = f"only applies to device neuron; the device is {device}"
        raise ProfileError("compile.flags", compile.flags, reason, ["null"])


def _folder_or_repository(key: str, source: str) -> None:
    """Check that a source is a folder or a possible hub repository; remote ones are checked when fetched."""
    if "://" in source or source.startswith(RUN) or Path(source).expanduser().is_dir():
        return
    if source.startswith((".", "~")) or not REPOSITORY.fullmatch(source):
        raise ProfileError(key, source, "there is no such folder; a hub repository has the form org/name")


def _multiple(key: str, value: int, of: int, reason: str) -> None:
    if value % of:
        raise ProfileError(key, value, reason)


# Rules for parallel degrees, batch sizes and the cluster, in order.
TOPOLOGY = (
    _cluster,
    _tensor,
    _pipeline,
    _context,
    _data_parallel,
    _sharding,
    _experts,
    _batch,
    _microbatches,
    hyperparameters.check_recompute,
)
INDEPENDENT = (
    _trace,
    hyperparameters.check_precision,
    hyperparameters.check_schedule,
    _vocabulary,
    _compile,
    data_sources.check,
    data_sources.check_schedule,
    objectives.check,
    trackers.check,
    launchers.check,
)
# Rules for starting a run: hardware, launcher, and files on this machine.
START = (
    _trainable,
    _static_shapes,
    _launcher,
    objectives.check_start,
    _tokenizer_folder,
    _initial_weights,
    data_sources.check_files,
    user_functions.check,
    trackers.check_installed,
    launchers.check_installed,
)
# Keys whose nearest valid values are searched, with keys that may be changed instead.
SEARCHED: dict[str, tuple[str, ...]] = {
    "parallel.tensor": (),
    "parallel.pipeline": (),
    "parallel.shard_degree": (),
    "train.sequence_length": ("parallel.context",),
    "train.global_batch_size": (),
    "cluster.devices_per_node": ("parallel.pipeline", "parallel.context", "parallel.tensor"),
    "cluster.nodes": ("parallel.pipeline", "parallel.context", "parallel.tensor"),
}


def _topology_choices(profile: Profile, rule: Rule, error: ProfileError) -> list[Any]:
    """Values of the invalid key, and `key=value` for others, with which all topology rules hold.

    If no single change is enough: changes that satisfy the rules up to this one, each with the next change it requires.
    """
    if found := list(_candidates(profile, error, TOPOLOGY)):
        return [text for text, _ in found]
    pairs = []
    for text, changed in _candidates(profile, error, TOPOLOGY[: TOPOLOGY.index(rule) + 1]):
        _, further = _broken(changed, TOPOLOGY)
        for second, _ in list(_candidates(changed, further, TOPOLOGY))[:1]:
            pairs.append(f"{text} with {second if '=' in str(second) else f'{further.key}={second}'}")
    return pairs


def _candidates(
    profile: Profile, error: ProfileError, rules: Sequence[Rule]
) -> Iterator[tuple[Any, Profile]]:
    """Changes that satisfy the rules, nearest first, and the changed profiles."""
    if error.choices or error.key not in SEARCHED:
        offered = [(error.key, choice) for choice in error.choices]
    else:
        keys = (error.key, *SEARCHED[error.key])
        offered = [(key, value) for key in keys for value in _nearest(profile, key, rules)]
    for key, choice in offered:
        if key.count(".") != 1:  # an entry of a list
            yield choice, profile
            continue
        changed = with_value(profile, key, None if choice == "null" else choice)
        if passes(changed, rules):
            yield (choice if key == error.key else f"{key}={choice}"), changed


def _nearest(profile: Profile, key: str, rules: Sequence[Rule]) -> list[int]:
    """The nearest values of a key, below and above its own, that satisfy the rules."""
    value = get_value(profile, key)
    step = {
        "train.global_batch_size": profile.train.micro_batch_size * max(1, profile.data_parallel),
        "train.sequence_length": 2 * profile.parallel.context if profile.parallel.context > 1 else 1,
    }.get(key, 1)
    multiple = value // step
    below = range(multiple - (value % step == 0), max(0, multiple - SEARCH_STEPS), -1)
    above = range(multiple + 1, min(multiple + SEARCH_STEPS, MAX_SIZE // step + 1))
    found = (
        next((n * step for n in direction if passes(with_value(profile, key, n * step), rules)), None)
        for direction in (below, above)
    )
    return [nearest for nearest in found if nearest]
