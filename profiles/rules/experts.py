"""Rules for models with experts (degree, capacity, load balancing) or multi-token prediction."""

from __future__ import annotations

from operator import attrgetter

from parallel.constraints import valid_expert_degrees
from profiles.errors import ProfileError
from profiles.schema import Evaluate, Profile, Train
from profiles.sections.model_checks import neighbours

MODULES = "model.num_nextn_predict_layers"
KEYS = {  # that have an effect on modules only, with the fields of their sections
    **dict.fromkeys(("train.mtp_weight", "train.mtp_steps", "train.mtp_later_weight"), Train.model_fields),
    "evaluate.mtp": Evaluate.model_fields,
}


def check(profile: Profile) -> None:
    """Raise ProfileError for an invalid expert degree, or options that experts do not support or need."""
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
    if train.balance == "bias" and not model.family.selection_bias:
        reason = f"adjusts a bias in the selection of experts, which exports of {model.architecture} have no tensor for"
        raise ProfileError("train.balance", "bias", reason, ["sequence", "global", "none"])
    if train.balance != "bias" and train.balance_bias_rate is not None:
        reason = f"has no effect with train.balance {train.balance}"
        raise ProfileError("train.balance_bias_rate", train.balance_bias_rate, reason, ["null"])
    if train.capacity_factor is not None and parallel.context > 1:
        reason = "counts tokens of complete samples, which parallel.context divides"
        raise ProfileError("train.capacity_factor", train.capacity_factor, reason, ["null"])


def check_static_shapes(profile: Profile) -> None:
    """Raise ProfileError if shapes depend on the data on a device that only compiles static ones."""
    experts, capacity = profile.model.num_experts, profile.train.capacity_factor
    if experts is not None and capacity is None and profile.cluster.device == "neuron":
        reason = "is missing: without it shapes depend on the data, but neuron compiles only static shapes"
        raise ProfileError("train.capacity_factor", None, reason, [1.25])


def check_multi_token(profile: Profile) -> None:
    """Raise ProfileError for keys without effect, or modules that the run cannot train."""
    train, modules = profile.train, len(profile.model.prediction_layers)
    for key, fields in KEYS.items() if not modules else ():
        value, default = attrgetter(key)(profile), fields[key.partition(".")[2]].default
        if value != default:
            reason = f"has no effect: {MODULES} is {profile.model.num_nextn_predict_layers or 'null'}"
            raise ProfileError(key, value, reason, ["null" if default is None else default])
    if not modules:
        return
    if train.mtp_later_weight is not None and train.mtp_steps is None:
        reason = "has no effect: train.mtp_steps, after which it applies, is null"
        raise ProfileError("train.mtp_later_weight", train.mtp_later_weight, reason, ["null"])
    for reason, broken in {
        "LoRA, which trains no new predictions": bool(profile.lora.rank),
        f"objective.kind {profile.objective.kind}, whose loss is not of tokens": profile.objective.traits.pairs,
        "train.loss, as modules have cross-entropy": train.loss is not None,
        "cluster.device neuron": profile.cluster.device == "neuron",
    }.items():
        if broken:
            reason = f"is not supported with {reason}; without modules, those of init.from are left out"
            raise ProfileError(MODULES, modules, reason, ["null"])
