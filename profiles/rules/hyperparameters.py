"""Rules for `train`: activation checkpointing, precision, optimizer and schedule."""

from __future__ import annotations

from parallel.constraints import FP8_MULTIPLE, minimum_stages
from profiles.errors import ProfileError
from profiles.recompute import AUTO
from profiles.schema import Profile
from profiles.sections import families

# FP8 recipes, with the accelerators that support them.
SCALED = ("h100", "h100_96", "h800", "h200", "b200")
FP8 = {"tensorwise": SCALED, "rowwise": SCALED, "mxfp8": ("b200", "trn3")}


def check_recompute(profile: Profile) -> None:
    """Raise ProfileError if `train.recompute` is a list without exactly one entry per pipeline stage."""
    value, parallel = profile.train.recompute, profile.parallel
    ranks, cuts = parallel.pipeline, parallel.pipeline_cuts
    stages = len(cuts) + 1 if cuts else minimum_stages(parallel.schedule, ranks)
    if not isinstance(value, str) and len(value) != stages:
        reason = f"has {len(value)} entries; the pipeline has {stages} stages"
        raise ProfileError("train.recompute", value, reason, [AUTO])


def check_precision(profile: Profile) -> None:
    """Raise ProfileError if the accelerator lacks the FP8 recipe or sizes are not multiples of its blocks."""
    train, cluster, model = profile.train, profile.cluster, profile.model
    if train.precision != "fp8":
        return
    if model.family.linear_attention != "none":
        reason = f"is not supported for model.architecture {model.architecture}, which has linear attention"
        raise ProfileError("train.precision", "fp8", reason, ["bf16"])
    supported = FP8[train.fp8_recipe]
    if cluster.accelerator not in supported:
        device = cluster.accelerator or f"a {cluster.device} device of unknown model (cluster.accelerator)"
        reason = f"with fp8_recipe {train.fp8_recipe} runs on {' and '.join(supported)}, not on {device}"
        others = [name for name, kinds in FP8.items() if cluster.accelerator in kinds]
        raise ProfileError(
            "train.precision", "fp8", reason, ["bf16", *(f"train.fp8_recipe={name}" for name in others)]
        )
    of = FP8_MULTIPLE[train.fp8_recipe]
    tensor, d = profile.parallel.tensor, model.head_dim
    tokens = profile.micro_batch_rows * train.sequence_length // profile.parallel.context
    sizes = {
        "model.hidden_size": model.hidden_size,
        f"model.intermediate_size over tensor {tensor}": model.intermediate_size // tensor,
        f"the width of the query heads over tensor {tensor}": model.num_attention_heads // tensor * d,
        f"the width of the KV heads over tensor {tensor}": max(1, model.num_key_value_heads // tensor) * d,
        "the tokens of a microbatch on a rank": tokens,
    }
    for name, size in sizes.items():
        if size % of:
            reason = f"needs multiples of {of} with fp8_recipe {train.fp8_recipe}; {name} is {size}"
            raise ProfileError("train.precision", "fp8", reason, ["bf16"])


def check_qk_clip(profile: Profile) -> None:
    """Raise ProfileError if QK-clip cannot bound the logits by scaling weights, or cannot record them."""
    model, value = profile.model, profile.train.qk_clip
    if value is None:
        return
    reason = None
    if model.qk_norm != "none":
        reason = "has no effect: queries and keys are normalized after their projections, whose scale the norms remove"
    elif model.clip_qkv is not None:
        reason = "cannot bound the logits: model.clip_qkv clips queries and keys, which are then not linear in their weights"
    elif profile.lora.rank:
        reason = "scales weights of queries and keys, which LoRA freezes"
    elif model.architecture not in families.OWN:
        reason = f"is not supported by plugins: {model.architecture} records no attention logits"
    if reason:
        raise ProfileError("train.qk_clip", value, reason, ["null"])


def check_schedule(profile: Profile) -> None:
    """Raise ProfileError for a contradictory length or learning-rate schedule."""
    train = profile.train
    if train.steps is not None and train.epochs is not None:
        reason = f"conflicts with train.steps {train.steps}; set one of them to null"
        raise ProfileError("train.epochs", train.epochs, reason, ["null"])
    if train.epochs is not None and any(source.weight for source in profile.data.sources):
        reason = "is undefined for weighted sources, which end at different times; set train.steps"
        raise ProfileError("train.epochs", train.epochs, reason, ["null"])
    if train.steps is None and train.epochs is None:
        raise ProfileError("train.steps", None, "is missing; set train.steps or train.epochs")
    left = train.steps
    for key in ("warmup_steps", "constant_steps", "minimum_rate_steps") if left is not None else ():
        if (length := getattr(train, key)) > left:
            reason = f"exceeds the {left} steps that train.steps {train.steps} leaves for it"
            raise ProfileError(f"train.{key}", length, reason, [left])
        left -= length
    if train.minimum_rate_steps and train.schedule == "constant":
        reason = "has no effect: train.schedule is constant"
        raise ProfileError("train.minimum_rate_steps", train.minimum_rate_steps, reason, [0])
    lowest, peak = train.minimum_learning_rate, train.learning_rate
    if lowest > peak:
        raise ProfileError("train.minimum_learning_rate", lowest, f"is above learning_rate {peak}", [peak])
