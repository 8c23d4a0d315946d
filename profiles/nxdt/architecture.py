"""The model: sizes from a config.json for NxD Training's Hugging Face models, else from the config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiles.errors import format_value
from profiles.files import state_files
from profiles.huggingface.config import read_config_json
from profiles.nxdt import experts, published
from profiles.nxdt.published import Published
from profiles.nxdt.rules import is_hugging_face
from profiles.nxdt.translation import Effect, Translation

# Numbers that configs of both kinds may state: key of `model` in the config: key in our section `model`.
NUMBERS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "layernorm_epsilon": "norm_eps",
}
# The only numbers that Hugging Face models take from the config; they override the config.json.
OVERRIDES = ("num_layers", "hidden_size", "max_position_embeddings", "rope_theta")
REQUIRED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
FLOATS = ("rope_theta", "layernorm_epsilon")
BASE = {"freq_base": 10000, "abf_factor": 1}  # defaults of model.position_*, whose product is rope_theta
# Our architecture for Megatron's (activation, normalization, position_embedding_type).
FAMILIES: dict[tuple[str, ...], str] = {
    ("swiglu", "rmsnorm", "rope"): "llama",
    ("gelu", "layernorm", "learned_absolute"): "gpt",
}


def translate(translation: Translation, config: Path | None) -> Published | None:
    """Set the model section.

    Args:
        config: config.json to use instead of the one that the config names.

    Returns:
        The published model whose numbers are used, if there is one.
    """
    if is_hugging_face(translation):
        model = _hugging_face(translation, config)
    else:
        model = _megatron(translation)
    experts.translate(translation, is_hugging_face(translation))
    return model


def stated(translation: Translation) -> dict[str, Any]:
    """The dimensions that the config states, under our names."""
    values = {}
    for name, ours in NUMBERS.items():
        if translation.has(f"model.{name}"):
            value = translation.number(f"model.{name}", 0)
            values[ours] = float(value) if name in FLOATS else value
    return values


def _hugging_face(translation: Translation, config: Path | None) -> Published | None:
    path, named = config, translation.path("model.model_config")
    if path is None and named is not None:
        path = translation.folder / named
    if path is not None:
        path = path / "config.json" if state_files.is_dir(path) else path
    model = None
    if path is not None and (config is not None or state_files.is_file(path)):
        base = read_config_json(path, "--config" if config else "model.model_config")
        translation.translate("model.model_config", _section(base), f"from {path}")
        for name in set(NUMBERS) - set(OVERRIDES):
            translation.report(f"model.{name}", Effect.HARMLESS, "NxD Training reads it from the config.json")
    elif all(translation.has(f"model.{name}") for name in REQUIRED):
        base = {"architecture": _dense_families(translation)[0]}
        note, effect = "not needed: the config states the dimensions", Effect.TRANSLATED
        if base["architecture"] == "mistral":
            note, effect = (
                "does not state whether it has a sliding window; set model.sliding_window",
                Effect.TO_DO,
            )
        translation.translate("model.model_config", {}, note, effect)
        translation.ours |= _section(_replicated_heads(translation))
        _numbers(translation, NUMBERS)
    else:
        model = _published(translation, named)
        if model is None:
            _numbers(translation, NUMBERS)
            return None
        base = model.model.model_dump(mode="json", exclude_defaults=True)
        translation.ours |= _section(base)
    translation.ours["model.architecture"] = base.get("architecture", "llama")
    size = base.get("hidden_size")  # None if the config states all dimensions, head_dim among them
    if (
        size is not None
        and translation.has("model.hidden_size")
        and translation.get("model.hidden_size") != size
    ):
        translation.ours.pop("model.head_dim", None)  # NxD Training derives it again
    _numbers(translation, OVERRIDES)
    return model


def _published(translation: Translation, named: str | None) -> Published | None:
    """The published model with the dimensions in the config; reports an error unless there is exactly one."""
    numbers = stated(translation) | experts.stated(translation) | _replicated_heads(translation)
    families = ["mixtral"] if translation.has_section("model.moe") else _dense_families(translation)
    matches = []
    if "hidden_size" in numbers:
        for family in families:
            matches += published.find({**numbers, "architecture": family}, _texts(translation))
    fewest = min((len(match.different) for match in matches), default=0)
    matches = [match for match in matches if len(match.different) == fewest]
    numbers["architecture"] = " or ".join(families)
    where = f"{named} is not on this machine" if named else "is missing"
    shown = ", ".join(f"{name} {format_value(value)}" for name, value in numbers.items())
    if len(matches) != 1:
        which = " and ".join(match.published.name for match in matches) or "no published model"
        note = f"{where}, and {which} has the dimensions that the config states ({shown}); pass --config FILE"
        translation.report("model.model_config", Effect.ERROR, note)
        return None
    match = matches[0]
    numbers["architecture"] = match.published.model.architecture
    note = f"{where}: the dimensions are those of the published {match.published.name}, which has "
    note += ", ".join(f"{name} {format_value(numbers[name])}" for name in match.equal)
    if match.different:
        note += "; but not " + ", ".join(f"{name} {format_value(numbers[name])}" for name in match.different)
    translation.translate("model.model_config", {}, f"{note}; --config FILE to use another", Effect.TO_DO)
    return match.published


def _dense_families(translation: Translation) -> list[str]:
    """Families without experts that a config may describe: Llama and Mistral, unless a text names one."""
    text = _texts(translation).lower()
    named = [family for family in ("mistral", "llama") if family in text]
    return named[:1] or ["llama", "mistral"]


def _texts(translation: Translation) -> str:
    return " ".join(value for value in translation.theirs.values() if isinstance(value, str))


def _replicated_heads(translation: Translation) -> dict[str, int]:
    """The KV heads that kv_replicator copies to one per tensor rank; empty without replication."""
    replicas = translation.integer("distributed_strategy.kv_replicator", 1)
    tensor = translation.integer("distributed_strategy.tensor_model_parallel_size", 1)
    return {"num_key_value_heads": tensor // replicas} if replicas > 1 else {}


def _section(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in values.items()}


def _numbers(translation: Translation, names: Any) -> None:
    for name in names:
        key, value = f"model.{name}", translation.get(f"model.{name}")
        if value is None:
            translation.report(key, Effect.HARMLESS, "not set")
            continue
        value = translation.number(key, 0)
        translation.translate(key, {f"model.{NUMBERS[name]}": float(value) if name in FLOATS else value})


def _megatron(translation: Translation) -> Published | None:
    translation.report("model.model_config", Effect.HARMLESS, "not read by NxD Training's Megatron models")
    _numbers(translation, [name for name in NUMBERS if name not in ("rope_theta", "vocab_size")])
    keys = ("model.activation", "model.normalization", "model.position_embedding_type")
    defaults = ("gelu", "layernorm", "learned_absolute")
    kind = tuple(str(translation.get(key, default)) for key, default in zip(keys, defaults, strict=True))
    if kind not in FAMILIES:
        known = "; ".join(f"{' with '.join(names)} is {family}" for names, family in FAMILIES.items())
        translation.report(keys[0], Effect.ERROR, f"with {kind[1]} and {kind[2]} has no equivalent: {known}")
    # Of an unknown combination, the other keys are still read, so that only what is wrong is reported.
    family = FAMILIES.get(kind, "gpt" if kind[1] == "layernorm" else "llama")
    for key in keys:
        translation.translate(key, {"model.architecture": family})
    if translation.has("model.sliding_window_size") and family == "llama":
        family = "mistral"
        translation.translate(
            "model.sliding_window_size",
            {
                "model.architecture": family,
                "model.sliding_window": translation.integer("model.sliding_window_size", 4096),
            },
        )
    elif translation.has("model.sliding_window_size"):
        translation.report(
            "model.sliding_window_size", Effect.ERROR, "GPT has no sliding window in Trainshed"
        )
    _switches(translation)
    _dropouts(translation, family)
    if family != "gpt":
        _rotary(translation)
    _fixed(translation)
    return None


def _switches(translation: Translation) -> None:
    tied = translation.flag("model.share_embeddings_and_output_weights", True)
    translation.translate("model.share_embeddings_and_output_weights", {"model.tie_word_embeddings": tied})
    bias = translation.flag("model.has_bias", True)
    translation.translate("model.has_bias", {"model.attention_bias": bias, "model.mlp_bias": bias})
    deviation = float(translation.number("model.init_method_std", 0.02))
    translation.translate("model.init_method_std", {"model.initializer_range": deviation})
    scaled = translation.flag("model.use_scaled_init_method", True)
    translation.translate("model.use_scaled_init_method", {"model.scaled_initialization": scaled})
    if not translation.has("model.layernorm_epsilon"):
        translation.ours["model.norm_eps"] = 1e-5


def _dropouts(translation: Translation, family: str) -> None:
    """hidden_dropout applies to embeddings and residuals, ffn_dropout to the MLP's activations."""
    defaults = {"hidden_dropout": 0.1, "attention_dropout": 0.0, "ffn_dropout": 0.0}
    rates = {name: float(translation.number(f"model.{name}", default)) for name, default in defaults.items()}
    if family != "gpt":
        for name, rate in rates.items():
            if rate:
                note = f"{rate:g} by default: " if not translation.has(f"model.{name}") else ""
                translation.report(
                    f"model.{name}", Effect.ERROR, f"{note}{family} has no dropout in Trainshed; set it to 0"
                )
            else:
                translation.report(f"model.{name}", Effect.HARMLESS, "no dropout")
        return
    if rates["hidden_dropout"] != rates["attention_dropout"]:
        note = (
            f"differs from hidden_dropout {rates['hidden_dropout']:g}; Trainshed's GPT has one rate for both"
        )
        translation.report("model.attention_dropout", Effect.ERROR, note)
    translation.translate("model.hidden_dropout", {"model.dropout": rates["hidden_dropout"]})
    translation.translate("model.attention_dropout", {"model.dropout": rates["hidden_dropout"]})
    translation.translate("model.ffn_dropout", {"model.mlp_dropout": rates["ffn_dropout"]})


def _rotary(translation: Translation) -> None:
    share = float(translation.number("model.rotary_percentage", 1))
    note = "all of a head is rotated" if share == 1 else "is not supported: Trainshed rotates all of a head"
    translation.report("model.rotary_percentage", Effect.HARMLESS if share == 1 else Effect.ERROR, note)
    frequency, factor = (
        translation.number(f"model.position_{name}", default) for name, default in BASE.items()
    )
    base = float(frequency * factor)
    for name in BASE:
        translation.translate(f"model.position_{name}", {"model.rope_theta": base})
    if translation.has("model.rope_theta") and not translation.has("model.position_freq_base"):
        theta = float(translation.number("model.rope_theta", base))
        note, effect = "", Effect.TRANSLATED
        if theta != base:
            note, effect = f"NxD Training's Megatron model does not read it, and has {base:g}", Effect.DIFFERS
        translation.translate("model.rope_theta", {"model.rope_theta": theta}, note, effect)
    translation.ours.setdefault("model.rope_theta", base)
    misspelt = "positition_interpolation_factor"  # spelled like this in NxD Training
    factor = float(translation.number(f"model.{misspelt}", 1))
    scaling = {"rope_type": "linear", "factor": factor} if factor != 1 else None
    translation.translate(f"model.{misspelt}", {"model.rope_scaling": scaling})
    note = f"NxD Training reads {misspelt}"
    translation.report("model.position_interpolation_factor", Effect.HARMLESS, note)


def _fixed(translation: Translation) -> None:
    """Keys with one supported value."""
    note = "scores are divided and then multiplied by it: the same mathematics"
    translation.report("model.apply_query_key_layer_scaling", Effect.HARMLESS, note)
    translation.report("model.persist_layer_norm", Effect.HARMLESS, "a kernel")
    translation.report(
        "model.rotary_percentage", Effect.HARMLESS, "heads are rotated completely or not at all"
    )
    translation.report("model.make_vocab_size_divisible_by", Effect.HARMLESS, "see model.vocab_size")
    block = translation.get("model.transformer_block_type", "pre_ln")
    right = block == "pre_ln"
    note = "is not supported: Trainshed's blocks normalize before attention and MLP"
    note = "the same here" if right else note
    translation.report("model.transformer_block_type", Effect.HARMLESS if right else Effect.ERROR, note)
    if translation.flag("model.fp32_residual_connection", False):
        note = "the residual stream has the training dtype"
        translation.report("model.fp32_residual_connection", Effect.DIFFERS, note)
    for name in ("bias_activation_fusion", "bias_dropout_add_fusion", "masked_softmax_fusion", "save_logits"):
        translation.report(f"model.{name}", Effect.HARMLESS, "a kernel" if "fusion" in name else "not needed")
