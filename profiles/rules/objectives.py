"""Rules of `objective` and `lora`: keys of each kind, and what fine-tuning needs and does not support."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from profiles.errors import ProfileError, closest
from profiles.files import state_files
from profiles.local_paths import local_path, searched
from profiles.schema import Objective, Profile, Source
from profiles.sections.objective import LORA_LAYERS, LORA_PROJECTIONS, PAIR_METRICS, TEMPLATES

RISE = "validation_rise"  # of the loss over that of the initial weights


def check(profile: Profile) -> None:
    """Check that the objective and LoRA can be planned. Raises ProfileError for the first broken rule."""
    _objective(profile)
    _data(profile)
    _gate(profile)
    _lora(profile)


def check_start(profile: Profile) -> None:
    """Raise ProfileError if initial weights or the chat template are missing, or the gate needs them.

    Planning needs neither. A chain sets `init.from` of later stages, so the gate is not checked before.
    """
    template = profile.objective.template
    if template is not None and template not in TEMPLATES and not state_files.is_file(local_path(template)):
        reason = "is neither a chat template's name nor a file" + searched(template)
        raise ProfileError("objective.template", template, reason, closest(template, TEMPLATES))
    if profile.init.from_ is None and (profile.objective.traits.needs_reference or profile.lora.rank):
        needs = f"{profile.objective.kind} needs a trained model as its reference"
        if profile.lora.rank:
            needs = "LoRA trains updates of pretrained weights"
        raise ProfileError("init.from", None, f"is missing: {needs}")
    if profile.fine_tunes and profile.init.from_ is not None:
        return
    for number, condition in enumerate(profile.evaluate.gate):
        if _value_of(condition) == RISE:
            reason = (
                f"{RISE} needs the loss of the initial weights, which only fine-tuning from init.from evaluates; "
                "PROFILE:evaluate.gate sets it for one profile of a chain"
            )
            raise ProfileError(f"evaluate.gate.{number}", condition, reason, ["validation_loss"])


def _objective(profile: Profile) -> None:
    objective = profile.objective
    for name, field in Objective.model_fields.items():
        value, default = getattr(objective, name), field.default
        if value != default and name != "kind" and name not in objective.traits.keys:
            reason = f"has no effect: objective.kind is {objective.kind}"
            raise ProfileError(f"objective.{name}", value, reason, ["null" if default is None else default])
    if objective.label_smoothing and objective.loss != "sigmoid":
        reason = f"is not defined for objective.loss {objective.loss}"
        raise ProfileError("objective.label_smoothing", objective.label_smoothing, reason, [0.0])
    s, prompt = profile.train.sequence_length, objective.maximum_prompt_length
    if prompt is not None and prompt >= s:
        reason = f"leaves no room for an answer: train.sequence_length is {s}"
        raise ProfileError("objective.maximum_prompt_length", prompt, reason, [max(1, s // 2)])


def _data(profile: Profile) -> None:
    kind, data = profile.objective.kind, profile.data
    if not profile.objective.traits.reads_records:
        return
    check_records(data.sources, "data.sources", kind)
    for name, off in (("shuffle_tokens", None), ("deduplicate", False), ("minimum_length", 0)):
        if getattr(data, name):
            reason = f"is not supported with objective.kind {kind}"
            raise ProfileError(f"data.{name}", getattr(data, name), reason, ["null" if off is None else off])
    if profile.tokenizer.source == "train":
        reason = f"is not supported with objective.kind {kind}; name the tokenizer of the model"
        raise ProfileError("tokenizer.source", "train", reason)
    if profile.objective.traits.pairs:
        own = f"conflicts with objective.kind {kind}, which has its own"
        if profile.train.loss is not None:
            raise ProfileError("train.loss", profile.train.loss, own, ["null"])
        if profile.evaluate.metrics:
            raise ProfileError("evaluate.metrics", profile.evaluate.metrics, own, ["[]"])


def check_records(sources: Sequence[Source], listed: str, kind: str) -> None:
    """Check that the sources that the key `listed` lists have records. Raises ProfileError."""
    for number, source in enumerate(sources):
        key = f"{listed}.{number}"
        if source.kind in ("tokens", "megatron"):
            reason = f"has no records for objective.kind {kind}"
            raise ProfileError(f"{key}.kind", source.kind, reason, ["files", "hub"])
        if source.lines:
            reason = f"reads plain text; objective.kind {kind} needs records"
            raise ProfileError(f"{key}.lines", True, reason, [False])
        if source.weight is not None:
            reason = f"is not supported with objective.kind {kind}"
            raise ProfileError(f"{key}.weight", source.weight, reason, ["null"])


def _gate(profile: Profile) -> None:
    """Check that each condition of the gate names a value of the final evaluation."""
    metrics = ["perplexity", *(name.partition(":")[2] for name in profile.evaluate.metrics)]
    if profile.objective.traits.pairs:
        metrics = [*PAIR_METRICS]
    known = ["validation_loss", RISE, *metrics]
    for number, condition in enumerate(profile.evaluate.gate):
        name = _value_of(condition)
        if name not in known:
            reason = f"{name} is not a result of the evaluation with objective.kind {profile.objective.kind}"
            choices = difflib.get_close_matches(name, known, 3, 0.4) or known
            raise ProfileError(f"evaluate.gate.{number}", condition, reason, choices)


def _value_of(condition: str) -> str:
    """The value that a condition of the gate bounds."""
    return re.split(r"\W", condition, maxsplit=1)[0]


def _lora(profile: Profile) -> None:
    lora = profile.lora
    if not lora.rank:
        return
    model = profile.model
    if model.family.linear_attention != "none":
        reason = f"is not supported for model.architecture {model.architecture}, which has linear attention"
        raise ProfileError("lora.rank", lora.rank, reason, ["null"])
    latent = [target for target in lora.targets if LORA_LAYERS[target] == "qkv"]
    if model.kv_lora_rank is not None and latent:
        reason = f"names {latent[0]}, but model.architecture {model.architecture} has no q, k and v projections of hidden states"
        fitting = [target for target in lora.targets if target not in latent]
        raise ProfileError("lora.targets", lora.targets, reason, [fitting or [*LORA_PROJECTIONS][1:]])
    together: list[str] = []
    if model.architecture in ("gpt", "dbrx") or model.family.is_fused("attention.qkv"):
        together += LORA_PROJECTIONS["qkv"]
    if model.family.mlp_matrices == 2:
        together.append("gate_proj")
    if model.num_experts or model.family.is_fused("mlp.gate_up"):
        together += LORA_PROJECTIONS["gate_up"]
    if apart := [target for target in lora.targets if target in together]:
        reason = f"names {apart[0]}, part of a weight that model.architecture {model.architecture} has as one"
        if model.num_experts and LORA_LAYERS[apart[0]] == "gate_up":
            reason = f"names {apart[0]}, but an expert's gate and up are one product, whose updates share the first factor"
        whole_layers = (LORA_LAYERS[target] if target in apart else target for target in lora.targets)
        raise ProfileError("lora.targets", lora.targets, reason, [[*dict.fromkeys(whole_layers)]])
    experts = [target for target in lora.targets if LORA_LAYERS[target] in ("gate_up", "down")]
    if model.num_experts and experts and lora.dropout:
        reason = f"is not supported with {experts[0]} of experts: their updates multiply the experts' inputs without dropout"
        raise ProfileError("lora.dropout", lora.dropout, reason, [0.0])
    if profile.parallel.schedule == "zero_bubble" and profile.parallel.pipeline > 1:
        reason = "splits the backward pass and does not support frozen weights"
        raise ProfileError("parallel.schedule", "zero_bubble", reason, ["1f1b", "interleaved"])
    for whole, parts in LORA_PROJECTIONS.items():
        if whole in lora.targets and (both := [part for part in parts if part in lora.targets]):
            reason = f"names {both[0]} twice: {whole} contains it"
            fitting = [target for target in lora.targets if target not in parts]
            raise ProfileError("lora.targets", lora.targets, reason, [fitting])
