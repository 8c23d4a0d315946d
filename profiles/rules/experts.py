"""Rules for models with experts: their degree, capacity and load balancing."""

from __future__ import annotations

from parallel.constraints import valid_expert_degrees
from profiles.errors import ProfileError
from profiles.schema import Profile
from profiles.sections.model_checks import neighbours


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
