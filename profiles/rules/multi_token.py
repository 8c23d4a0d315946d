"""Rules for multi-token prediction: what it does not support, and keys without effect."""

from __future__ import annotations

from profiles.errors import ProfileError
from profiles.schema import Evaluate, Profile, Train

MODULES = "model.num_nextn_predict_layers"
KEYS = {  # that have an effect on modules only, with the fields of their sections
    **dict.fromkeys(("train.mtp_weight", "train.mtp_steps", "train.mtp_later_weight"), Train.model_fields),
    "evaluate.mtp": Evaluate.model_fields,
}


def check(profile: Profile) -> None:
    """Raise ProfileError for keys without effect, or modules that the run cannot train."""
    train, modules = profile.train, len(profile.model.prediction_layers)
    for key, fields in KEYS.items() if not modules else ():
        section, name = key.split(".")
        value, default = getattr(getattr(profile, section), name), fields[name].default
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
