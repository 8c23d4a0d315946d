"""Build a profile's device mesh, its pipeline partition, its pipeline stages and their optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import lru_cache, partial

import torch
from torch import nn

from modeling.models import qk_clip
from modeling.models.families import model_class
from modeling.models.flops import layer_multiply_adds
from modeling.models.language_model import AttentionLayer, LanguageModel
from modeling.models.lora import apply_lora
from parallel import Mesh, ShardedAdamW
from parallel import device as devices
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.attention import kernels
from parallel.attention.maxima import ScoreMaxima
from parallel.device import Device
from parallel.experts.balance import Balance
from parallel.experts.layer import ExpertOptions, MixtureOfExperts
from parallel.layers.deferred import DeferrableLinear
from parallel.layers.products import EXACT, Float8, Products
from parallel.layout import is_deferred
from parallel.optimizer.adamw import AdamW
from parallel.optimizer.arithmetic import Arithmetic, Compile
from parallel.optimizer.buckets import bucket_size
from parallel.optimizer.fsdp import gather_in_graph, gather_on_use
from parallel.optimizer.grouping import ChooseRule, EverywhereRule, WeightDecay
from parallel.optimizer.muon import Muon
from parallel.optimizer.rules import Rule
from parallel.pipeline.schedules import choose_extra_forwards, count_lanes, cut_layers
from profiles import recompute
from profiles.schema import Profile

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}  # of weights


def device_of(profile: Profile) -> Device:
    """The profile's device type, with the figures of its accelerator."""
    return devices.resolve(profile.cluster.device, profile.cluster.accelerator)


def build_mesh(profile: Profile, rank: int | None = None, timeout: timedelta | None = None) -> Mesh:
    """The run's device mesh of this process, or that of `rank` without process groups.

    Args:
        timeout: timeout of the process groups.
    """
    parallel = profile.parallel
    degrees = (parallel.pipeline, profile.data_parallel, parallel.context, parallel.tensor)
    device = device_of(profile)
    kernel = kernels.load(device.attention_kernel)
    return Mesh(
        *degrees,
        profile.kv_replication,
        profile.shard_degree,
        rank=rank,
        supports_reduction=device.supports_reduction,
        reduces_in_place=device.reduces_in_place,
        timeout=timeout,
        expert=parallel.expert,
        chunks=overlap_chunks(profile),
        operators=not device.compiles_operators,
        pipeline_lanes=count_lanes(parallel.pipeline) if parallel.schedule == "interleaved" else 1,
        shared_embedding=profile.model.shares_embedding,
        # Devices that compile operators exchange them over two other axes (parallel/optimizer/stacks.py).
        whole_matrices=profile.train.optimizer == "muon" and not device.compiles_operators,
        graph_kernel=kernel if device.compiles_operators else None,
        # as on the device also where its plan is made without one
        masks_by_flex=kernels.get_kernel(kernel).uses_flex,
    )


def overlap_chunks(profile: Profile) -> int | None:
    """Number of chunks of products that overlap with collectives; None: chosen by size."""
    by_size = device_of(profile).concurrent_collectives and not profile.compile.async_tensor
    return profile.parallel.overlap_chunks or (None if by_size else 1)


def partition_layers(profile: Profile) -> list[range]:
    """The layers of each pipeline stage, balanced to minimise the FLOPs of the slowest."""
    parallel = profile.parallel
    cuts = None if parallel.pipeline_cuts is None else tuple(parallel.pipeline_cuts)
    return [*_cut(tuple(layer_multiply_adds(profile)), parallel.pipeline, parallel.schedule, cuts)]


def layer_modes(profile: Profile) -> list[str]:
    """The mode of activation checkpointing of each layer; that of the last for multi-token prediction."""
    modes = recompute.layer_modes(profile.train.recompute, [*map(len, partition_layers(profile))])
    return [*modes, *modes[-1:] * len(profile.model.prediction_layers)]


@lru_cache(maxsize=1024)
def _cut(costs: tuple[int, ...], ranks: int, schedule: str, cuts: tuple[int, ...] | None) -> list[range]:
    return cut_layers(list(costs), ranks, schedule, cuts and list(cuts))


def extra_warmup_forwards(profile: Profile) -> int:
    """Extra 1F1B warm-up forwards on ranks before the last, where uneven stages make them worthwhile."""
    if profile.parallel.schedule != "1f1b":
        return 0
    costs = layer_multiply_adds(profile)
    stages = [sum(costs[layer] for layer in layers) for layers in partition_layers(profile)]
    return choose_extra_forwards(stages, profile.accumulation_steps)


def build_model(profile: Profile, mesh: Mesh, layers: range, device: torch.device) -> LanguageModel:
    """The pipeline stage that holds `layers`, uninitialized and without activation checkpointing."""
    model = model_class(profile.model.architecture)(
        profile.model,
        mesh,
        layers,
        sequence_parallel=profile.parallel.sequence_parallel,
        products=build_products(profile, device),
        dtype=DTYPES[profile.train.precision],
        device=device,
    )
    model.device = device_of(profile)
    for layer in experts_by_layer([model]).values():
        layer.options = build_expert_options(profile)
        if layer.routing.selection_bias:
            layer.router.move_selection_bias(profile.train.expert_bias_step)
    if profile.train.qk_clip is not None:
        for block in model.layers.values():
            heads = profile.model.num_attention_heads // mesh.tensor.size
            if isinstance(block.attention, AttentionLayer):
                block.attention.maxima = ScoreMaxima(heads, device)
    if profile.lora.rank:
        apply_lora(model, profile.lora, profile.model, mesh, profile.parallel.sequence_parallel)
    return model


def experts_by_layer(stages: Iterable[LanguageModel]) -> dict[int, MixtureOfExperts]:
    """The mixtures of experts of a rank's stages, by number of their layer."""
    layers = (item for stage in stages for item in stage.layers.items())
    return {int(number): block.mlp for number, block in layers if isinstance(block.mlp, MixtureOfExperts)}


def maxima_by_layer(stages: Iterable[LanguageModel]) -> dict[int, ScoreMaxima]:
    """The records of the largest attention scores of a rank's stages, by number of their layer."""
    layers = (item for stage in stages for item in stage.layers.items())
    found = {}
    for number, block in layers:
        if isinstance(block.attention, AttentionLayer) and block.attention.maxima is not None:
            found[int(number)] = block.attention.maxima
    return found


def build_expert_options(profile: Profile) -> ExpertOptions:
    """The training settings of experts."""
    train = profile.train
    balance = Balance(
        train.balance,
        train.expert_loss_coefficient,
        train.router_z_coefficient,
        samples=train.global_batch_size * profile.rows_per_sample,
        layers=profile.model.num_expert_layers,
    )
    keeps, repeats = not profile.compile.possible, repeats_choices(profile)
    return ExpertOptions(balance, train.capacity_factor, keep_received=keeps, repeats_choices=repeats)


def repeats_choices(profile: Profile) -> bool:
    """Whether training takes the choices of experts of the pass that counts them.

    Not with dropout, which changes them, nor with a capacity, with which no rank waits for the numbers of rows.
    """
    counted = profile.train.balance == "global" and profile.parallel.expert > 1
    return counted and profile.train.capacity_factor is None and not profile.has_dropout


def build_products(profile: Profile, device: torch.device) -> Products:
    """The layers' matrix products. CPUs emulate FP8, only in tests since profiles.check rejects it."""
    train = profile.train
    return Float8(train.fp8_recipe, emulated=device.type == "cpu") if train.precision == "fp8" else EXACT


def build_stage(profile: Profile, mesh: Mesh, layers: range, device: torch.device) -> LanguageModel:
    """The pipeline stage that holds `layers`, uninitialized, with the profile's activation checkpointing."""
    model = build_model(profile, mesh, layers, device)
    modes = layer_modes(profile)
    apply_activation_checkpointing(model.layers.values(), [modes[int(layer)] for layer in model.layers])
    if gathers_in_graph(profile):
        for block in model.layers.values():
            gather_in_graph(block)
    if defers_weight_gradients(profile):
        tokens = profile.micro_batch_rows * profile.train.sequence_length // profile.parallel.context
        for module in model.modules():
            if isinstance(module, DeferrableLinear):
                module.defer(tokens)
    return model


def defers_weight_gradients(profile: Profile) -> bool:
    """Whether layers defer weight gradients to a separate pass, as compiled backward cannot be split."""
    parallel = profile.parallel
    return parallel.schedule == "zero_bubble" and parallel.pipeline > 1 and profile.compile.possible


def gathers_in_graph(profile: Profile) -> bool:
    """Whether blocks gather weights in their graphs, for the compiler to schedule, rather than by hooks."""
    sharded = profile.parallel.data_sharding == "fsdp" and profile.compile.possible
    return sharded and device_of(profile).gathers_in_graph


def build_optimizer(
    profile: Profile, stages: Sequence[LanguageModel], mesh: Mesh, compile: Compile | None = None
) -> ShardedAdamW:
    """The optimizer of a rank's stages, with the profile's rules, settings and sharding.

    Args:
        stages: stages whose parameters have values, or none of which has memory, so that all are initialized here. Gets hooks
            that wait for updated weights before they are used, and with `fsdp` gather them.
        compile: compiles the optimizer's arithmetic, for devices that only run compiled programs.
    """
    deferred = any(is_deferred(parameter) for stage in stages for parameter in stage.parameters())
    train, keep_gathered = profile.train, profile.parallel.keep_gathered
    units = [stage.sharding_units(gathers_in_graph(profile)) for stage in stages]
    fsdp = profile.parallel.data_sharding == "fsdp"
    optimizer = ShardedAdamW(
        [named for stage in stages for named in stage.named_parameters()],
        mesh,
        rule=rule_of(profile),
        row_factors=None if train.qk_clip is None else partial(qk_clip.row_factors, profile.model),
        weight_decay=weight_decay_of(profile),
        clip=train.clip,
        gradient_dtype=DTYPES[train.gradient_dtype],
        bucket_size=optimizer_bucket_size(profile),
        units=[unit for stage in units for unit in stage] if fsdp else (),
        keep_gathered=keep_gathered,
        arithmetic=Arithmetic(compile),
        seed=train.seed if deferred else None,
    )
    for stage in units if fsdp else ():
        gather_on_use(stage, bool(keep_gathered))
    optimizer.gather_before_use([unit for stage in units for unit in stage])
    return optimizer


def rule_of(profile: Profile) -> ChooseRule:
    """The update rule of each parameter."""
    train = profile.train
    adamw = AdamW(train.betas, train.epsilon)
    if train.optimizer == "adamw":
        return EverywhereRule(adamw)
    dtype = DTYPES[train.newton_schulz_dtype]
    muon = Muon(train.muon_momentum, train.muon_coefficients, dtype, train.muon_heads)

    def choose(name: str, parameter: nn.Parameter) -> Rule:
        return muon if is_block_matrix(name, parameter) else adamw

    return choose


def is_block_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a block.

    Except routers and gates of experts, which classify, the filters of convolutions, and LoRA's factors.
    """
    parts = name.split(".")
    return (
        parts[0] == "layers"
        and parameter.dim() > 1
        and not {"router", "shared_gate", "convolution", "lora"} & {*parts}
    )


def weight_decay_of(profile: Profile) -> WeightDecay:
    return WeightDecay(profile.train.weight_decay, profile.train.norm_weight_decay)


def optimizer_bucket_size(profile: Profile) -> int:
    """Minimum number of elements of the optimizer's buckets."""
    return bucket_size(profile.shard_degree, device_of(profile))
