"""Bytes that a rank holds, by kind: parameters, gradients, optimizer states, activations, buffers.

The plan and the traced plan both count bytes here; planner.py lists what each kind includes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import nn

from modeling.models import qk_clip
from modeling.models.build import (
    DTYPES,
    device_of,
    extra_warmup_forwards,
    optimizer_bucket_size,
    partition_layers,
    repeats_choices,
    rule_of,
    weight_decay_of,
)
from modeling.models.language_model import LanguageModel
from modeling.planning.stage_costs import CostCache, LayerCosts, counts_choices
from parallel.layout import layout_of
from parallel.optimizer.buckets import IN_FLIGHT, Group, Named, Slot, pack
from parallel.optimizer.grouping import group_parameters
from parallel.optimizer.muon import Muon
from parallel.optimizer.rules import Rule
from parallel.optimizer.stacks import stack_sizes
from parallel.pipeline.schedules import in_flight
from profiles.schema import Profile


class PlannedBucket(NamedTuple):
    """A bucket of parameters, gradients and states (parallel/optimizer/buckets.py)."""

    size: int  # elements, padding included
    resident: bool  # whether parameters and gradients stay in memory; with FSDP, those of matrices do not
    block: bool  # whether it holds a block's matrices, which FSDP gathers for each microbatch
    shards: int  # ranks over which its states are sharded
    replicas: int  # ranks that hold the same shard
    experts: bool  # whether it holds experts that other ranks do not have
    rule: Rule | None  # that updates it; None if frozen
    multiply_adds: int = 0  # of matrix products in an update, all shards and tensor ranks together
    unit: int | None = None  # number of the unit that FSDP gathers it with; None if it is resident
    exchanged: int = 0  # bytes for all owners of matrices, this rank included, and back
    # of an update of matrices in compiled programs: those between tensor ranks, `exchanged` being those between shards
    relayed: int = 0
    # of an update of matrices in compiled programs: the most bytes at the same time, and bytes of indices
    stacked: int = 0
    indices: int = 0
    scaled: bool = False  # whether QK-clip multiplies its weights after their update

    @property
    def frozen(self) -> bool:
        """Whether it has neither gradients nor states."""
        return self.rule is None

    @property
    def states(self) -> int:
        """Float32 values per weight besides the master weight."""
        return 0 if self.rule is None else len(self.rule.states)

    @classmethod
    def of(
        cls,
        profile: Profile,
        members: Sequence[tuple[str, nn.Parameter]],
        rule: Rule | None = None,
        unit: int | None = None,
    ) -> PlannedBucket:
        holders, shards = profile.weight_replicas, profile.shard_degree
        experts = layout_of(members[0][1]).expert_ranks is not None
        if experts:
            holders, shards = holders // profile.parallel.expert, profile.expert_shard_degree
        _, size = _pack(profile, members, shards)
        block, frozen = members[0][0].startswith("layers."), not members[0][1].requires_grad
        rule = None if frozen else rule
        products = sum(rule.multiply_adds(layout_of(each)) for _, each in members) if rule else 0
        exchanged = size // shards * rule.exchanged if rule else 0
        replicas = holders // shards
        clips = rule is not None and profile.train.qk_clip is not None
        scaled = clips and any(qk_clip.is_scaled(name) for name, _ in members)
        held = size, unit is None, block, shards, replicas, experts
        return cls(*held, rule, products, unit, exchanged, scaled=scaled)


def plan_buckets(profile: Profile, stages: Sequence[LanguageModel]) -> list[PlannedBucket]:
    """The optimizer's buckets over a rank's stages (`build_optimizer`)."""
    fsdp = profile.parallel.data_sharding == "fsdp"
    units = [unit for stage in stages for unit in stage.sharding_units()] if fsdp else []
    named = [item for stage in stages for item in stage.named_parameters()]
    groups = group_parameters(
        named, units, weight_decay_of(profile), optimizer_bucket_size(profile), rule_of(profile)
    )
    units_of: list[tuple[int | None, Group]] = [
        (unit, group) for unit, (_, members) in enumerate(groups.sharded) for group in members
    ]
    units_of += [(None, group) for group in groups.resident]
    trained = [PlannedBucket.of(profile, group.members, group.rule, unit) for unit, group in units_of]
    if device_of(profile).compiles_operators:
        trained = _with_stacks(profile, trained, [group.members for _, group in units_of], named)
    return [*trained, *(PlannedBucket.of(profile, members) for members in [groups.frozen] if members)]


class _Packing(NamedTuple):
    """Where a bucket has its parameters (`parallel.optimizer.matrices.Packing`)."""

    slots: list[Slot]
    length: int


def _pack(profile: Profile, members: Sequence[Named], shards: int) -> tuple[list[int], int]:
    """Starts of a bucket's parameters, and its size."""
    dtypes = members[0][1].dtype, DTYPES[profile.train.gradient_dtype]
    return pack([parameter.numel() for _, parameter in members], shards, *dtypes)


def _with_stacks(
    profile: Profile,
    buckets: Sequence[PlannedBucket],
    members: Sequence[Sequence[Named]],
    named: Sequence[Named],
) -> list[PlannedBucket]:
    """The buckets of a device that updates all matrices of an axis at once (parallel/optimizer/stacks.py).

    The first of them has what all need.
    """
    found, tensor = [*buckets], profile.parallel.tensor
    order = {name: position for position, (name, _) in enumerate(named)}
    axes: dict[tuple[Muon, int, bool], list[int]] = {}
    for number, bucket in enumerate(buckets):
        if isinstance(bucket.rule, Muon):
            axes.setdefault((bucket.rule, bucket.shards, bucket.experts), []).append(number)
            found[number] = bucket._replace(exchanged=0, multiply_adds=0)
    for (rule, shards, _), numbers in axes.items():
        packings = []
        # In the order of their updates, by which matrices are dealt.
        for number in sorted(numbers, key=lambda number: min(order[name] for name, _ in members[number])):
            starts, size = _pack(profile, members[number], shards)
            # Stages may share a module, and so the names of its parameters.
            slots = [
                Slot(f"{number}.{start}", parameter, start)
                for (_, parameter), start in zip(members[number], starts, strict=True)
            ]
            packings.append(_Packing(slots, size // shards))
        sizes, width = stack_sizes(packings, shards, tensor, rule.heads), rule.dtype.itemsize
        found[numbers[0]] = found[numbers[0]]._replace(
            exchanged=width * (sizes.sent + sizes.relayed_back),
            relayed=width * (sizes.relayed + sizes.returned),
            multiply_adds=shards * tensor * sum(count * rule.cost((r, c)) for count, r, c in sizes.shapes),
            stacked=width * sizes.peak,
            indices=sizes.index_bytes,
        )
    return found


def bucket_planner(profile: Profile, costs: CostCache | None = None) -> Callable[..., list[PlannedBucket]]:
    """`plan_buckets` of stages given one by one, once for all that share their stages.

    Args:
        costs: cache of other plans, whose buckets are reused.
    """
    known: CostCache = {} if costs is None else costs
    setting = (
        profile.parallel.data_sharding,
        profile.weight_replicas,
        profile.shard_degree,
        profile.expert_shard_degree,
        profile.train.model_dump_json(exclude={"micro_batch_size", "recompute"}),
    )

    def buckets(*stages: LanguageModel) -> list[PlannedBucket]:
        # Modules of a cache live as long as it does, so that their identities stay theirs.
        key = ("buckets", *setting, *map(id, stages))
        if key not in known:
            known[key] = plan_buckets(profile, stages)
        found: list[PlannedBucket] = known[key]
        return found

    return buckets


def least_bytes(profile: Profile) -> float:
    """Bytes of parameters, gradients and optimizer states that the fullest rank needs at least.

    They follow from the profile, without building the model.
    """
    model, parallel, train = profile.model, profile.parallel, profile.train
    experts, chosen = model.num_experts or 0, model.num_experts_per_tok or 0
    routed = (model.parameters - model.active_parameters) * experts / max(1, experts - chosen)
    width = DTYPES[train.precision].itemsize
    if profile.lora.rank:
        per_parameter = per_expert = float(width) if parallel.data_sharding != "fsdp" else 0.0
    else:
        # At least one float32 state (Muon's momentum), and master weights unless the parameters are their own.
        gradient, states = DTYPES[train.gradient_dtype].itemsize, 4 if train.precision == "float32" else 8
        resident = width + gradient if parallel.data_sharding != "fsdp" else 0
        sharded = states if parallel.data_sharding != "fsdp" else gradient + 8
        if parallel.data_sharding == "none":
            resident, sharded = resident + states, 0
        per_parameter = resident + sharded / profile.shard_degree
        per_expert = resident + sharded / profile.expert_shard_degree
    ranks = parallel.tensor * parallel.pipeline
    return ((model.parameters - routed) * per_parameter + routed * per_expert / parallel.expert) / ranks


def state_bytes(profile: Profile, buckets: Sequence[PlannedBucket]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states between steps."""
    settings = profile.train
    width = DTYPES[settings.precision].itemsize
    frozen = [bucket for bucket in buckets if bucket.frozen]
    frozen_elements = sum(bucket.size // (1 if bucket.resident else bucket.shards) for bucket in frozen)
    buckets = [bucket for bucket in buckets if not bucket.frozen]
    resident = sum(bucket.size for bucket in buckets if bucket.resident)
    sharded = sum(bucket.size // bucket.shards for bucket in buckets if not bucket.resident)
    # float32 parameters that stay in memory are their own master weights.
    shares_master = settings.precision == "float32"
    states = sum(
        bucket.size // bucket.shards * (bucket.states + (not (bucket.resident and shares_master)))
        for bucket in buckets
    )
    if profile.copies_reference:  # sharded like the model: matrices with FSDP, else nothing
        frozen_elements += resident + sharded
    indices = sum(bucket.indices for bucket in buckets)
    return {
        "parameters": (resident + frozen_elements) * width,
        "gradients": (resident + sharded) * DTYPES[settings.gradient_dtype].itemsize,
        "optimizer": states * 4 + indices,
    }


def communication_bytes(profile: Profile, buckets: Sequence[PlannedBucket]) -> dict[str, int]:
    """Bytes of gradients and weights that a rank sends per step: in its shard groups, to its replicas.

    Gradients are reduce-scattered and weights all-gathered over the shards; FSDP does so for blocks in every microbatch, with
    weights in each of `weight_passes`. Each shard of the gradients is all-reduced over its replicas. Matrices that are updated as
    wholes are sent to their owners and back.
    """
    train, keeps = profile.train, profile.parallel.keep_gathered
    weight, gradient = DTYPES[train.precision].itemsize, DTYPES[train.gradient_dtype].itemsize
    communication = dict.fromkeys(("data", "replica", "expert_data", "expert_replica"), 0)
    passes = weight_passes(profile)
    frozen_passes = passes + profile.scores_pairs_in_step  # the base model is the reference model
    for bucket in buckets:
        shards, replicas = ("expert_data", "expert_replica") if bucket.experts else ("data", "replica")
        if bucket.frozen:
            if not bucket.resident:
                gathered = frozen_passes * profile.accumulation_steps if bucket.block and not keeps else 1
                sent = bucket.size * gathered * weight
                communication[shards] += sent * (bucket.shards - 1) // bucket.shards
            continue
        gathered = scattered = 1  # times per step
        if not bucket.resident and not keeps:
            scattered = profile.accumulation_steps
            gathered = passes * scattered if bucket.block else 1
        if profile.copies_reference and not bucket.resident:  # for the reference model's forward pass
            gathered += scattered if bucket.block else 1
        tensor = profile.parallel.tensor
        owners = bucket.shards if bucket.relayed else bucket.shards * tensor
        to_owners = shards if bucket.shards > 1 else "tensor"
        for axis, size, ranks in ((to_owners, bucket.exchanged, owners), ("tensor", bucket.relayed, tensor)):
            if size:
                communication[axis] = communication.get(axis, 0) + size * (ranks - 1) // ranks
        exchanged = bucket.size * (gathered * weight + scattered * gradient)
        communication[shards] += exchanged * (bucket.shards - 1) // bucket.shards
        reduced = 2 * bucket.size * gradient // bucket.shards
        communication[replicas] += reduced * (bucket.replicas - 1) // bucket.replicas
    return communication


def weight_passes(profile: Profile) -> int:
    """Passes of a microbatch over trained weights: forward, backward, and one that counts choices."""
    return 2 + counts_choices(profile)


def microbatches_in_flight(profile: Profile) -> list[float]:
    """Maximum number of microbatches whose activations each pipeline rank holds.

    With k stages per rank, each stage's activations count as 1/k.
    """
    schedule, ranks, count = profile.parallel.schedule, profile.parallel.pipeline, profile.accumulation_steps
    stages, extra = len(partition_layers(profile)) // ranks, extra_warmup_forwards(profile)
    return [
        in_flight(schedule, ranks, rank, count, stages_per_rank=stages, extra_forwards=extra)
        for rank in range(ranks)
    ]


def rank_bytes(
    profile: Profile, working: int, microbatches: float, hidden_bytes: int, buckets: Sequence[PlannedBucket]
) -> dict[str, int]:
    """Bytes of a pipeline rank by kind; arguments as for `activation_bytes`."""
    activations = activation_bytes(profile, working, microbatches, hidden_bytes, buckets)
    return state_bytes(profile, buckets) | {"activations": activations}


def eager_working_bytes(stages: Sequence[Sequence[LayerCosts]], microbatches: float) -> int:
    """Peak bytes of eager layers: activations saved by microbatches in flight, a layer's working memory.

    Args:
        stages: the layers of each of the rank's stages.
        microbatches: number of microbatches in flight.
    """
    saved = [sum(layer.saved for layer in stage) for stage in stages]
    return math.ceil(microbatches * sum(saved)) - max(saved) + max(map(_stage_peak, stages))


def _stage_peak(stage: Sequence[LayerCosts]) -> int:
    """Peak bytes of one microbatch's forward and backward through a stage."""
    before, peak = 0, 0
    for layer in stage:
        peak = max(peak, before + layer.forward_peak, before + layer.backward_peak)
        before += layer.saved
    return peak


def activation_bytes(
    profile: Profile, working: int, microbatches: float, hidden_bytes: int, buckets: Sequence[PlannedBucket]
) -> int:
    """Peak bytes besides parameters, gradients and optimizer states.

    Args:
        working: peak bytes of activations and of the layers' working memory.
        microbatches: number of microbatches in flight.
        hidden_bytes: bytes of a microbatch's hidden states between stages.
        buckets: result of `plan_buckets`.
    """
    working += _gathered_bytes(profile, [bucket for bucket in buckets if not bucket.resident])
    resident = [bucket for bucket in buckets if bucket.resident and not bucket.frozen]
    exchanged = _exchanged_bytes(profile, resident)
    if len(resident) > IN_FLIGHT:  # the first buckets are exchanged while backward runs
        working += exchanged
    peak = max(working, exchanged, sum(bucket.stacked for bucket in buckets))
    if profile.parallel.pipeline > 1:
        from parallel.pipeline.runtime import SENDS_IN_FLIGHT  # imports slowly; only pipelines need it

        # Stage inputs in flight, and messages: one being received and some being sent, each way.
        peak += math.ceil(microbatches + 2 + SENDS_IN_FLIGHT) * hidden_bytes
    # int64 token ids of the step's samples, and the tokens and targets sliced from them.
    samples = profile.accumulation_steps * profile.micro_batch_rows
    return peak + 3 * 8 * profile.train.sequence_length // profile.parallel.context * samples


def choice_bytes(profile: Profile, stages: Iterable[Iterable[int]]) -> int:
    """Bytes of a step's choices of experts that training takes from the pass that counts them."""
    if not repeats_choices(profile):
        return 0
    model, held = profile.model, {layer for stage in stages for layer in stage}
    if model.num_hidden_layers - 1 in held:
        held.update(model.prediction_layers)
    tokens = profile.micro_batch_rows * profile.train.sequence_length // profile.parallel.context
    choices = profile.accumulation_steps * tokens * (model.num_experts_per_tok or 0)
    return 2 * sum(map(model.has_experts, held)) * choices


def _exchanged_bytes(profile: Profile, buckets: Sequence[PlannedBucket]) -> int:
    """Bytes of the gradient buckets that are reduced over data × context at the same time."""
    if profile.weight_replicas == 1:
        return 0
    device = device_of(profile)
    width = DTYPES[profile.train.gradient_dtype].itemsize
    copies = 0 if device.supports_reduction else 1  # of the complete bucket, besides the shard
    # In place, only sums over replicas need memory.
    exchanged = [b for b in buckets if (b.replicas if device.reduces_in_place else b.shards * b.replicas) > 1]
    sizes = sorted(bucket.size * (1 / bucket.shards + copies) for bucket in exchanged)
    return math.ceil(sum(sizes[-IN_FLIGHT:]) * width)


def _gathered_bytes(profile: Profile, buckets: Sequence[PlannedBucket]) -> int:
    """Bytes of FSDP's gathered weights and of gradients that are not scattered yet.

    Weights: of the running block and the next one, and of embedding and head during the entire step. Gradients: of the running
    unit and the one being scattered. With `keep_gathered`, everything during the entire step.
    """
    train = profile.train
    weight, gradient = DTYPES[train.precision].itemsize, DTYPES[train.gradient_dtype].itemsize
    trained = _unit_sizes(bucket for bucket in buckets if not bucket.frozen)
    if profile.parallel.keep_gathered:
        return sum(bucket.size for bucket in buckets) * weight + sum(trained) * gradient
    blocks = _unit_sizes(bucket for bucket in buckets if bucket.block)
    rest = sum(bucket.size for bucket in buckets if not bucket.block)
    return (rest + sum(blocks[-2:])) * weight + sum(trained[-2:]) * gradient


def _unit_sizes(buckets: Iterable[PlannedBucket]) -> list[int]:
    """Elements of each unit's buckets, in ascending order."""
    sizes: Counter[int | None] = Counter()
    for bucket in buckets:
        sizes[bucket.unit] += bucket.size
    return sorted(sizes.values())
