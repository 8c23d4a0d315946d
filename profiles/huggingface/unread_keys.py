"""Keys of config.json that do not describe the model, and the check that no other is left unread.

A key is read, or has the only value that is supported, or is listed here as one that training does not need. Any other key may
belong to another model that shares this `model_type`, and is rejected by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from profiles.errors import ProfileError, format_value
from profiles.sections.families import Family

LIBRARY = (
    *("model_type", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "dtype", "torch_dtype"),
    *("use_bfloat16", "torchscript", "tf_legacy_loss", "is_llama_config", "transformers.js_config", "gradient_checkpointing"),
    *("unsloth_fixed", "unsloth_version", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
    *("use_flash_attention", "_flash_attn_2_enabled", "use_cache", "pretraining_tp", "ep_size", "return_dict"),
    *("use_return_dict", "output_hidden_states", "output_attentions", "output_past", "output_scores", "is_decoder"),
    *("return_dict_in_generate", "selective_checkpoint_enabled", "sequence_parallel_enabled", "move_model_to_device"),
)  # fmt: skip
TOKENIZER = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
    *("tokenizer_class", "prefix", "tokenizer_model_max_length", "tokenizer_padding_side", "model_max_length"),
    *("max_sequence_length", "n_ctx"),
)  # fmt: skip
GENERATION = (
    *("max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
    *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "cache_implementation"),
)  # fmt: skip
OTHER_TASKS = (
    *("num_labels", "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
    *("classifier_dropout", "predict_special_tokens", "summary_type", "summary_use_proj", "summary_activation"),
    *("summary_proj_to_labels", "summary_first_dropout", "n_special"),
)  # fmt: skip
# The profile's train section has the balance loss, and a run has no jitter.
TRAINING = (
    *("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"),
    *("moe_loss_weight", "moe_jitter_eps"),
)
UNUSED = frozenset((*LIBRARY, *TOKENIZER, *GENERATION, *OTHER_TASKS, *TRAINING))
# Keys that change the model, unless they have this value.
DEFAULTS: Mapping[str, Any] = {
    "attention_head_type": "multihead",
    "multi_query": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_sliding_window": False,
    "use_mrope": False,
    "moe_frequency": 1,
    "mlp_only_layers": [],
    "uniform_expert_assignment": False,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}
QUANTIZATION = "quantization_config"
HEADS = ("ForCausalLM", "LMHeadModel")  # endings of classes with a language model's head


def check(config: Mapping[str, Any], architecture: str, family: Family, read: Collection[str]) -> None:
    """Raise ProfileError for keys that may change the model, and for another model of this `model_type`.

    Args:
        read: keys that the caller reads.
    """
    rest = {name: value for name, value in config.items() if value is not None and name not in read}
    rest = {name: value for name, value in rest.items() if name not in UNUSED and name not in family.unused}
    for name in [name for name in rest if name in DEFAULTS]:
        if (value := rest.pop(name)) != DEFAULTS[name]:
            raise ProfileError(name, value, f"is not supported for {architecture}", [DEFAULTS[name]])
    if any(kind != "full_attention" for kind in rest.pop("layer_types", ())):
        kinds = ", ".join(config["layer_types"])
        raise ProfileError("layer_types", kinds, f"is not supported for {architecture}", ["full_attention"])
    _check_classes(rest.pop("architectures", ()), rest.pop("auto_map", {}), architecture, family)
    if quantization := rest.pop(QUANTIZATION, None):
        _check_quantization(quantization)
    for name, value in rest.items():
        reason = f"is not a key that Trainshed or transformers know for {architecture}, and may belong to another model; if it "
        raise ProfileError(name, value, f"{reason}does not change the model, delete it from the config.json")


def _check_classes(
    classes: Collection[str], custom: Mapping[str, str | list[str]], architecture: str, family: Family
) -> None:
    """Raise ProfileError unless `architectures` and `auto_map` name the family's own classes."""
    stem = family.huggingface
    for ending in HEADS:
        stem = stem.removesuffix(ending)
    known = [family.huggingface, f"{stem}Model", f"{stem}PreTrainedModel", f"{stem}Config"]
    same = {name.lower() for name in known}  # the first Llama's was LLaMAForCausalLM
    for name in [classes] if isinstance(classes, str) else classes:
        if name.lower() not in same:
            reason = f"is another model than {architecture}, though its model_type is the same"
            raise ProfileError("architectures", name, reason, known[:1])
    for auto in ("AutoConfig", "AutoModel", "AutoModelForCausalLM"):
        path = custom.get(auto)
        if path and (not isinstance(path, str) or path.rpartition(".")[2].lower() not in same):
            raise ProfileError(f"auto_map.{auto}", path, "names code of another model, which is not run")


def _check_quantization(quantization: Mapping[str, Any]) -> None:
    """Raise ProfileError unless modeling/conversion reads weights in this format."""
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("fmt", "e4m3") == "e4m3":
        if list(quantization.get("weight_block_size") or ()) == [128, 128]:
            return
        name, value = f"{QUANTIZATION}.weight_block_size", format_value(quantization.get("weight_block_size"))
        raise ProfileError(name, value, "is not supported for float8 weights", ["[128, 128]"])
    if method != "mxfp4":
        reason = "is not supported; name a model with weights in bfloat16, float16 or float32"
        raise ProfileError(f"{QUANTIZATION}.quant_method", format_value(method), reason, ["fp8", "mxfp4"])


def renamed(config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The config with aliases replaced. Raises ProfileError if two names of a key have different values."""
    result: dict[str, Any] = {}
    for name, value in config.items():
        key = aliases.get(name, name)
        if value is None and key in result:
            continue
        if (other := result.get(key)) is not None and other != value:
            raise ProfileError(
                name, value, f"is another name of a key that is {other} too; delete one of them"
            )
        result[key] = value
    return result
