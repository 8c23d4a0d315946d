"""Rules for `parallel`: degrees, pipeline, sharding, and the batches and sequences that ranks divide.

Those of experts, such as a capacity with context parallelism, are in experts.py, those of FP8 in hyperparameters.py.
"""

from __future__ import annotations

from parallel.constraints import invalid_cuts, minimum_stages, supports_microbatches, valid_tensor_degrees
from profiles.errors import ProfileError
from profiles.schema import Profile
from profiles.sections.model_checks import neighbours


def check_tensor(profile: Profile) -> None:
    """Raise ProfileError if the tensor degree does not divide heads or widths."""
    model, tensor = profile.model, profile.parallel.tensor
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    valid = valid_tensor_degrees(heads, kv_heads)
    if tensor not in valid:
        if heads % tensor:
            reason = f"does not divide {heads} query heads"
        else:
            reason = f"neither divides {kv_heads} KV heads nor is a multiple of them"
        raise ProfileError("parallel.tensor", tensor, reason)
    if tensor not in model.tensor_degrees:
        reason = f"does not divide {model.linear_num_key_heads} key heads of linear attention, which are not replicated"
        raise ProfileError("parallel.tensor", tensor, reason, neighbours(tensor, model.tensor_degrees))
    for name, width in model.mlp_widths.items():
        if width % tensor:
            raise ProfileError("parallel.tensor", tensor, f"does not divide model.{name} {width}")


def check_pipeline(profile: Profile) -> None:
    """Raise ProfileError if stages outnumber layers, or the schedule or the cuts are not supported."""
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
            and profile.compile.possible
            and parallel.data_sharding == "fsdp"
        ):
            reason = f"{reason} fsdp within compiled graphs on neuron"
            raise ProfileError("parallel.data_sharding", "fsdp", reason, ["zero1", "none"])
    if cuts is not None and (problem := invalid_cuts(cuts, layers, ranks, parallel.schedule)):
        raise ProfileError("parallel.pipeline_cuts", cuts, problem, ["null"])


def check_microbatches(profile: Profile) -> None:
    """Raise ProfileError if the schedule does not support the number of microbatches."""
    ranks, schedule = profile.parallel.pipeline, profile.parallel.schedule
    count = profile.accumulation_steps
    if not supports_microbatches(schedule, ranks, count):
        reason = f"makes {count} microbatches per step, which schedule {schedule} on {ranks} ranks does not support"
        raise ProfileError("train.global_batch_size", profile.train.global_batch_size, reason)


def check_context(profile: Profile) -> None:
    """Raise ProfileError if ranks cannot divide a sequence, or it exceeds the model's positions."""
    parallel, train = profile.parallel, profile.train
    s, size = train.sequence_length, profile.micro_batch_rows
    if parallel.context > 1:
        parts = 2 * parallel.context
        _multiple("train.sequence_length", s, parts, f"each context rank holds 2 of {parts} equal parts")
        before = (profile.model.linear_conv_kernel_dim or 1) - 1
        if s // parts < before:
            reason = f"has parts of {s // parts} tokens; the convolution of linear attention reads {before} before each"
            raise ProfileError("train.sequence_length", s, reason, [before * parts])
    if parallel.sequence_parallel and size * s // parallel.context % parallel.tensor:
        parts = parallel.context * parallel.tensor * (2 if parallel.context > 1 else 1)
        reason = f"sequence parallelism divides it among {parallel.tensor} tensor ranks"
        _multiple("train.sequence_length", s, parts, reason)
    if s > (longest := profile.model.max_position_embeddings):
        reason = f"gpt has {longest} learned positions"
        if profile.model.family.rotary:  # inference takes the export's number as its limit
            reason = f"exceeds model.max_position_embeddings, {longest}; to extend the context, set it to {s}, and with "
            reason += "pretrained weights model.rope_scaling or a larger model.rope_theta"
        raise ProfileError("train.sequence_length", s, reason, [longest])


def check_data_parallel(profile: Profile) -> None:
    """Raise ProfileError if the number of processes is not a multiple of the degrees that split a model."""
    world, replica = profile.world_size, profile.model_parallel
    if world % replica == 0:
        return
    parallel, per_node = profile.parallel, profile.cluster.devices_per_node
    mesh = f"tensor {parallel.tensor} × pipeline {parallel.pipeline} × context {parallel.context} = {replica}"
    if profile.cluster.launcher == "local":
        raise ProfileError("cluster.devices_per_node", per_node, f"is not a multiple of {mesh}")
    reason = f"times {per_node} devices per node is {world} processes, not a multiple of {mesh}"
    raise ProfileError("cluster.nodes", profile.cluster.nodes, reason)


def check_sharding(profile: Profile) -> None:
    """Raise ProfileError for an invalid shard degree, or options that have no effect."""
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
    if parallel.keep_gathered is True and profile.cluster.device == "neuron" and profile.compile.possible:
        reason = "is not supported on neuron, where compiled blocks gather their weights in each microbatch"
        raise ProfileError("parallel.keep_gathered", True, reason, [False])


def check_batch(profile: Profile) -> None:
    """Raise ProfileError if the data-parallel ranks cannot divide the batch into microbatches."""
    train, replicas = profile.train, profile.data_parallel
    reason = f"micro_batch_size {train.micro_batch_size} × data-parallel degree {replicas} does not divide it"
    _multiple("train.global_batch_size", train.global_batch_size, train.micro_batch_size * replicas, reason)


def _multiple(key: str, value: int, of: int, reason: str) -> None:
    if value % of:
        raise ProfileError(key, value, reason)
