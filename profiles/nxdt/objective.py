"""Fine-tuning: `model_alignment_strategy` and the initial weights."""

from __future__ import annotations

from typing import Any

from profiles.nxdt.translation import Effect, Translation
from profiles.sections.families import NXD_SHARDS

STRATEGIES = ("model_alignment_strategy", "data.alignment_strategy")  # the latter before SDK 2.22
KINDS = ("dpo", "orpo", "sft")  # if a config names several, NxD Training takes the first
TARGETS = {  # NxD's names of layers: ours; Hugging Face's names are the same in both
    "qkv_proj": "qkv",
    "gate_up_proj": "gate_up",
    **{name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")},
}
LOSSES = ("sigmoid", "hinge", "ipo")
TRUNCATIONS = ("keep_start", "keep_end")
KEPT = "the adapter is saved separately, and exported both as an adapter and merged"


def kind(translation: Translation) -> str:
    """The objective's kind: sft, dpo or orpo if the config names a strategy, else pretrain."""
    section = strategy(translation)
    # An empty strategy counts if it is the only one.
    for named in (translation.has_section, translation.theirs.__contains__):
        for name in KINDS:
            if named(f"{section}.{name}"):
                return name
    return "sft" if translation.flag("data.use_sft_style_data_module", False) else "pretrain"


def strategy(translation: Translation) -> str:
    """The section of the strategy, which moved between releases."""
    return next((name for name in STRATEGIES if translation.has_section(name)), STRATEGIES[0])


def translate(translation: Translation) -> None:
    """Set the objective, LoRA and the initial weights."""
    objective = kind(translation)
    translation.ours["objective.kind"] = objective
    if objective != "pretrain":
        # NxD Training begins each record with BOS, and TRL, which tokenizes its pairs, each prompt.
        translation.ours["data.prepend_bos"] = True
    if objective == "sft":
        _sft(translation)
    elif objective == "dpo":
        _dpo(translation)
    elif objective == "orpo":
        key = f"{strategy(translation)}.orpo.beta"
        translation.translate(key, {"objective.beta": float(translation.number(key, 0.1))})
    if objective in ("dpo", "orpo"):
        _lengths(translation, f"{strategy(translation)}.{objective}")
    for name in (*KINDS, "peft"):
        empty = f"{strategy(translation)}.{name}"
        translation.report(empty, Effect.HARMLESS, "has no keys")
    if translation.has_section(f"{strategy(translation)}.peft"):
        _lora(translation)
    _initial_weights(translation, objective)


def _sft(translation: Translation) -> None:
    key = f"{strategy(translation)}.sft.packing"
    packing = translation.flag(key, translation.flag("data.packing", False))
    values: dict[str, Any] = {
        "objective.packing": packing,
        "objective.too_long": "drop" if packing else "truncate",
    }
    note = (
        "attention stays within a record and the loss counts only completions; in NxD Training's packed samples attention "
        "crosses records, and the loss counts prompts too"
    )
    for name in (key, "data.packing"):
        translation.translate(
            name, values, note if packing else "", Effect.DIFFERS if packing else Effect.TRANSLATED
        )
    translation.report("data.use_sft_style_data_module", Effect.HARMLESS, "see objective.kind")
    for name in ("dataset_name", "prompt_name", "subset_name"):
        if translation.has(f"data.{name}"):
            note = "promptsource templates are not supported; apply them to the data first"
            translation.report(f"data.{name}", Effect.ERROR, note)


def _dpo(translation: Translation) -> None:
    key = f"{strategy(translation)}.dpo"
    translation.translate(
        f"{key}.kl_beta", {"objective.beta": float(translation.number(f"{key}.kl_beta", 0.01))}
    )
    loss = translation.get(f"{key}.loss_type", "sigmoid")
    if loss in LOSSES:
        note, effect = "", Effect.TRANSLATED
        if loss != "sigmoid":
            note = "NxD Training does not read it, and always has sigmoid; set sigmoid to reproduce its runs"
            effect = Effect.DIFFERS
        translation.translate(f"{key}.loss_type", {"objective.loss": loss}, note, effect)
    else:
        translation.report(
            f"{key}.loss_type", Effect.ERROR, f"has no equivalent; Trainshed has {', '.join(LOSSES)}"
        )
    note = "a separate cached step computes the reference's log-probabilities"
    translation.report(f"{key}.precompute_ref_log_probs", Effect.HARMLESS, note)


def _lengths(translation: Translation, section: str) -> None:
    """Prompt length and truncation of records that are too long, as in TRL, which NxD Training uses."""
    names = ("max_prompt_length", "max_dpo_prompt_length")  # the latter before SDK 2.22
    key = next(
        (f"{section}.{name}" for name in names if translation.has(f"{section}.{name}")),
        f"{section}.{names[0]}",
    )
    translation.translate(key, {"objective.maximum_prompt_length": translation.integer(key, 2048)})
    end = translation.get(f"{section}.truncation_mode", "keep_start")
    if end in TRUNCATIONS:
        translation.translate(f"{section}.truncation_mode", {"objective.truncation": end})
    else:
        note = f"has no equivalent; Trainshed has {' and '.join(TRUNCATIONS)}"
        translation.report(f"{section}.truncation_mode", Effect.ERROR, note)


def _lora(translation: Translation) -> None:
    section = f"{strategy(translation)}.peft"
    translation.translate(
        f"{section}.lora_rank", {"lora.rank": translation.integer(f"{section}.lora_rank", 16)}
    )
    translation.translate(
        f"{section}.lora_alpha", {"lora.alpha": float(translation.number(f"{section}.lora_alpha", 32))}
    )
    translation.translate(
        f"{section}.lora_dropout",
        {"lora.dropout": float(translation.number(f"{section}.lora_dropout", 0.05))},
    )
    targets = translation.get(f"{section}.target_modules", ["qkv_proj"])
    targets = targets if isinstance(targets, list) else [targets]
    if unknown := [name for name in map(str, targets) if name not in TARGETS]:
        translation.report(
            f"{section}.target_modules", Effect.ERROR, f"{unknown[0]} is not one of {', '.join(TARGETS)}"
        )
    else:
        translation.translate(
            f"{section}.target_modules", {"lora.targets": [TARGETS[name] for name in targets]}
        )
    if translation.ours.get("model.num_experts"):
        _lora_of_experts(translation, targets)
    if translation.get(f"{section}.lora_bias", "none") == "none":
        translation.report(f"{section}.lora_bias", Effect.HARMLESS, "no biases are trained")
    else:
        translation.report(f"{section}.lora_bias", Effect.ERROR, "is not supported: LoRA trains no biases")
    if translation.flag(f"{section}.load_lora_from_ckpt", False):
        note = "merge the adapter into the model, and set init.from to the result"
        translation.report(f"{section}.load_lora_from_ckpt", Effect.ERROR, f"is not supported; {note}")
    translation.report(f"{section}.load_lora_from_ckpt", Effect.HARMLESS, "starts a new adapter")
    for name in (
        "lora_verbose",
        "save_lora_base",
        "merge_lora",
        "save_lora_config_adapter",
        "merge_sharded_lora",
    ):
        translation.report(f"{section}.{name}", Effect.HARMLESS, KEPT)


def _initial_weights(translation: Translation, objective: str) -> None:
    key, only = "exp_manager.resume_from_checkpoint", "model.weight_init_only"
    path = translation.path(key)
    translation.report(only, Effect.HARMLESS, "init.from has weights alone")
    if path is None:
        translation.report(key, Effect.HARMLESS, "not set")
        if objective != "pretrain":
            translation.translate(
                key, {"init.from": None}, "set init.from to the model to fine-tune", Effect.TO_DO
            )
        return
    note = "an NxD checkpoint's shards, a folder in Hugging Face format or a hub repository can be used as they are"
    architecture = translation.ours.get("model.architecture", "llama")
    if architecture not in NXD_SHARDS:
        note = f"NxD shards of {architecture} are not supported; name a folder in Hugging Face format or a hub repository"
    elif not translation.flag(only, False):
        note = "only its weights are used, with a new optimizer and schedule"
    translation.translate(key, {"init.from": path}, note, Effect.TO_DO)


def _lora_of_experts(translation: Translation, targets: list[str]) -> None:
    """Report settings that LoRA updates of experts do not support."""
    section = f"{strategy(translation)}.peft"
    if halves := [name for name in targets if name in ("gate_proj", "up_proj")]:
        note = f"{halves[0]} of an expert is one product with the other half; name gate_up_proj"
        translation.report(f"{section}.target_modules", Effect.ERROR, note)
    experts = [name for name in targets if name in ("gate_up_proj", "down_proj")]
    if experts and translation.ours["lora.dropout"]:
        note = f"{translation.ours['lora.dropout']} is not supported with {experts[0]} of experts; set 0.0"
        translation.report(f"{section}.lora_dropout", Effect.ERROR, note)
