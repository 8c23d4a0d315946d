"""Import NxD Training configs: translate each of their keys to profile keys, or say why it is dropped.

The configs are YAML read through OmegaConf: `${a.b}` refers to another key, `${.b}` to one of the same section, and
`${multiply:x, y}` is a product; references are resolved first. RULES has the translation of each key; every key of the file gets
one line in the result, whether known or not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles import yaml_text
from profiles.errors import ProfileError, format_value

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAXIMUM_DEPTH = 20  # nested references


@dataclass(frozen=True)
class Line:
    """The translation of one key: the profile keys it becomes (None: dropped) and a note."""

    key: str
    value: Any
    ours: str | None
    note: str = ""

    def show(self, width: int) -> str:
        """Format as one line, with the key padded to a width."""
        result = f"{format_value(self.value)} -> {self.ours}" if self.ours else "dropped"
        return f"{self.key:<{width}}  {result}{f': {self.note}' if self.note else ''}"


Translation = tuple[dict[str, Any], str]
"""The profile keys to set, none if the key is dropped, and a note."""
Rule = Callable[[Any], Translation]
"""Translates the value of one key."""


def read(path: Path) -> dict[str, Any]:
    """Read a config: values by dotted key, references resolved. Raises ProfileError for an invalid file or reference."""
    try:
        values = yaml_text.parse(path.read_text())
    except FileNotFoundError:
        raise ProfileError("config", str(path), "there is no such file") from None
    except UnicodeDecodeError:
        raise ProfileError("config", str(path), "is not a text file") from None
    except OSError as error:
        raise ProfileError("config", str(path), error.strerror or str(error)) from error
    except ValueError as error:
        raise ProfileError("config", str(path), str(error)) from error
    if not isinstance(values, Mapping):
        raise ProfileError("config", str(path), "is not a mapping of sections")
    flat = dict(_flatten(values, ""))
    return {key: _resolve(key, value, flat) for key, value in flat.items()}


def convert(theirs: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[Line]]:
    """Translate the values of `read` to a profile's values, with a line for each key.

    Args:
        folder: folder of the config, to which its paths are relative.

    Raises:
        ProfileError: a value has no equivalent and cannot be dropped.
    """
    lines: list[Line] = []
    ours: dict[str, Any] = {}
    for key, value in theirs.items():
        rule = RULES.get(key)
        if rule is None:
            lines.append(Line(key, value, None, "not supported by Trainshed"))
            continue
        translated, note = rule(value)
        ours |= translated
        lines.append(Line(key, value, ", ".join(translated) or None, note))
    ours |= _cluster(theirs) | _model_and_tokenizer(ours, folder) | {"data.sources": _sources(theirs)}
    result: dict[str, Any] = {"name": "imported", "description": "Imported from an NxD Training config"}
    for key, value in ours.items():
        section, dot, name = key.partition(".")
        if dot:
            result.setdefault(section, {})[name] = value
        elif section:
            result[section] = value
    return result, lines


def _cluster(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Launcher and accelerator: a trn1 node has 32 devices, a trn2 node 64 logical cores of two physical ones (LNC 2)."""
    nodes, devices = theirs.get("trainer.num_nodes", 1), theirs.get("trainer.devices", 1)
    accelerator = "trn2" if theirs.get("trainer.lnc") == 2 or devices == 64 else "trn1"
    launcher = "slurm" if nodes > 1 else "local"
    return {"cluster.launcher": launcher, "cluster.device": "neuron", "cluster.accelerator": accelerator}


def _model_and_tokenizer(ours: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The architecture, inferred from the keys present, and the tokenizer, by default beside the config.json."""
    derived: dict[str, Any] = {}
    config = ours.get("model.config")
    if config is None:
        derived["model.architecture"] = "llama" if "model.rope_theta" in ours else "gpt"
    else:
        path = folder / Path(config).expanduser()
        derived["model.config"] = str(path)
        if "tokenizer.source" not in ours:
            derived["tokenizer.source"] = str(path if path.is_dir() else path.parent)
    if "tokenizer.source" not in ours | derived:
        raise ProfileError("data.tokenizer.type", None, "is missing; no other key names a tokenizer")
    return derived


def _sources(theirs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Data sources: folders of token ids, or prefixes of Megatron files."""
    prefixes = [entry for entry in theirs.get("data.data_prefix") or [] if not isinstance(entry, float | int)]
    sources = [{"kind": "megatron", "path": str(prefix)} for prefix in prefixes]
    for key, use in (("data.train_dir", "train"), ("data.val_dir", "validation")):
        if theirs.get(key):
            sources.append({"kind": "tokens", "path": theirs[key], "text": "input_ids", "use": use})
    if not sources:
        raise ProfileError("data.train_dir", None, "is missing; no other key names training data")
    if len(sources) == 1:
        sources[0].pop("use", None)
    return sources


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _resolve(key: str, value: Any, flat: Mapping[str, Any]) -> Any:
    """A value with its references replaced."""
    for _ in range(MAXIMUM_DEPTH):
        if not isinstance(value, str) or (found := REFERENCE.search(value)) is None:
            return value
        referenced = _lookup(key, found[1], flat)
        value = referenced if found[0] == value else value.replace(found[0], str(referenced))
    raise ProfileError(key, flat[key], "refers to itself")


def _lookup(key: str, reference: str, flat: Mapping[str, Any]) -> Any:
    """The value that a reference in a key's value stands for."""
    name, colon, arguments = reference.partition(":")
    if colon and name.strip() == "multiply":
        return math.prod(yaml_text.parse(argument) for argument in arguments.split(","))
    name = reference.strip()
    up = len(name) - len(name.lstrip("."))  # each leading dot goes up one section
    if up:
        name = ".".join([*key.split(".")[:-up], name.lstrip(".")])
    if name not in flat:
        raise ProfileError(key, f"${{{reference}}}", "refers to an undefined key")
    return flat[name]


def _to(ours: str, note: str = "") -> Rule:
    return lambda value: ({ours: value}, note)


def _drop(reason: str) -> Rule:
    return lambda value: ({}, reason)


def _float(ours: str) -> Rule:
    return lambda value: ({ours: float(value)}, "")


def _one_of(key: str, ours: str, choices: Mapping[Any, Any], note: str = "") -> Rule:
    def rule(value: Any) -> Translation:
        if value not in choices:
            raise ProfileError(key, value, "has no equivalent", list(map(str, choices)))
        return {ours: choices[value]}, note

    return rule


def _interval(ours: str) -> Rule:
    """Steps between events; anything but a positive integer means only at the end."""

    def rule(value: Any) -> Translation:
        valid = isinstance(value, int) and value > 0
        return {ours: value if valid else 0}, "" if valid else "0: only at the end"

    return rule


def _clip(value: Any) -> Translation:
    return {"train.clip": float(value) if value else None}, "" if value else "no clipping"


def _data_sharding(value: Any) -> Translation:
    return {"parallel.data_sharding": "zero1" if value else "none"}, ""


def _virtual_pipeline(value: Any) -> Translation:
    if not value or value == 1:
        return {}, "one stage per rank is parallel.schedule 1f1b, the default"
    return {"parallel.schedule": "interleaved"}, "two stages per rank; more with parallel.pipeline_cuts"


def _pipeline_cuts(value: Any) -> Translation:
    if not value:
        return {}, "stages are balanced by cost"
    try:
        cuts = [int(str(name).rpartition(".")[2]) + 1 for name in value]
    except ValueError:
        reason = "is not a list of layers such as model.layers.18"
        raise ProfileError("model.pipeline_cuts", value, reason) from None
    note = "NxD names the last layer of a stage, Trainshed the first of the next"
    return {"parallel.pipeline_cuts": cuts}, note


def _recompute_modules(value: Any) -> Translation:
    names = value if isinstance(value, list) else [value] if value else []
    if any(str(name).endswith("MLP") and not str(name).startswith("Activation") for name in names):
        note = "selective saves the MLP projections and recomputes the rest of the MLP; full saves nothing"
        return {}, note
    return (
        {},
        "selective saves attention and the projections; it recomputes norms, rotation and activation × gate",
    )


def _initial_checkpoint(value: Any) -> Translation:
    if not value:
        return {}, "not set"
    return {}, "an NxD checkpoint: convert it with `trainshed convert` and set init.from"


def _validation_batches(value: Any) -> Translation:
    if isinstance(value, int) and value > 0:
        return {"evaluate.batches": value}, "global batches"
    return {}, "the whole validation split is evaluated"


def _validation_folder(value: Any) -> Translation:
    if value:
        return {"data.sources": value}, "for validation"
    return {}, "a fraction of the documents is held out"


ALWAYS = "always enabled"
KERNEL = "the device's own attention kernel is used"
LEGACY = "belongs to the legacy stack, which native PyTorch on Neuron does not use"
ROUNDING = "master weights are float32; no stochastic rounding"
STORE = "`trainshed run --store` sets where runs are stored"
BF16 = ("mixed_precision", "mixed_precisionSR", "bf16SR", "autocast", "manual")
OPTIMIZERS = {"adamw": "", "adamw_fp32OptState": ""}
SCHEDULES = {"CosineAnnealing": "cosine", "LinearAnnealingWithWarmUp": "linear"}
RECOMPUTE = {"selective": "selective", "full": "full", None: "none"}

RULES: dict[str, Rule] = {
    "name": _to("name"),
    "seed": _to("train.seed"),
    "model_source": _drop("the architecture follows from the model's keys"),
    "compiler_flags": _drop("native PyTorch on Neuron takes no compiler flags from a profile"),
    "compiler_cache_url": _drop("compiled graphs are artifacts in the store"),
    "neuron_experimental_compress_rg": _drop(LEGACY),
    "aync_exec_max_inflight_requests": _drop(LEGACY),
    "bucket_size_collectives": _drop("buckets hold at least 10 million elements"),
    "neuron_rt_exec_timeout": _drop(LEGACY),
    # trainer
    "trainer.devices": _to("cluster.devices_per_node"),
    "trainer.num_nodes": _to("cluster.nodes"),
    "trainer.lnc": _drop("implied by cluster.accelerator trn2: two physical cores per logical core"),
    "trainer.max_steps": _to("train.steps"),
    "trainer.gradient_clip_val": _clip,
    "trainer.val_check_interval": _interval("evaluate.every"),
    "trainer.limit_val_batches": _validation_batches,
    "trainer.log_every_n_steps": _to("train.log_every"),
    "trainer.sequential_move_factor": _drop("weights are initialized on the device, not moved"),
    # distributed_strategy
    "distributed_strategy.tensor_model_parallel_size": _to("parallel.tensor"),
    "distributed_strategy.pipeline_model_parallel_size": _to("parallel.pipeline"),
    "distributed_strategy.virtual_pipeline_model_parallel_size": _virtual_pipeline,
    "distributed_strategy.context_parallel_size": _to("parallel.context"),
    "distributed_strategy.zero1": _data_sharding,
    "distributed_strategy.sequence_parallel": _to("parallel.sequence_parallel"),
    "distributed_strategy.kv_replicator": _drop("derived from parallel.tensor and the number of KV heads"),
    # data
    "data.micro_batch_size": _to("train.micro_batch_size"),
    "data.global_batch_size": _to("train.global_batch_size"),
    "data.seq_length": _to("train.sequence_length"),
    "data.train_dir": _to("data.sources", "token ids in its column input_ids"),
    "data.val_dir": _validation_folder,
    "data.data_prefix": _to("data.sources", "Megatron files with these prefixes, .bin and .idx"),
    "data.tokenizer": _to("tokenizer.source"),
    "data.tokenizer.type": _to("tokenizer.source"),
    # model
    "model.model_config": _to("model.config"),
    "model.encoder_seq_length": _to("train.sequence_length"),
    "model.num_layers": _to("model.num_hidden_layers"),
    "model.hidden_size": _to("model.hidden_size"),
    "model.ffn_hidden_size": _to("model.intermediate_size"),
    "model.num_attention_heads": _to("model.num_attention_heads"),
    "model.num_kv_heads": _to("model.num_key_value_heads"),
    "model.max_position_embeddings": _to("model.max_position_embeddings"),
    "model.rope_theta": _float("model.rope_theta"),
    "model.vocab_size": _to("model.vocab_size"),
    "model.layernorm_epsilon": _float("model.norm_eps"),
    "model.qkv_linear": _drop("the fused QKV projection with KV replication is always used"),
    "model.fuse_qkv": _drop("Q, K and V are always fused"),
    "model.pipeline_cuts": _pipeline_cuts,
    "model.activations_checkpoint_granularity": _one_of(
        "model.activations_checkpoint_granularity", "train.recompute", RECOMPUTE
    ),
    "model.activations_checkpoint_recompute": _recompute_modules,
    "model.fusions.softmax": _drop(KERNEL),
    "model.fusions.flash_attention": _drop(KERNEL),
    "model.fusions.ring_attention": _drop("follows from parallel.context"),
    "model.use_cpu_initialization": _drop("weights depend only on the seed and their names, on any device"),
    "model.weight_init_only": _drop("weights are always initialized once"),
    "model.do_layer_norm_weight_decay": _to("train.norm_weight_decay"),
    "model.wrap_with_zero": _drop("see parallel.data_sharding"),
    # model.optim
    "model.optim.name": _one_of("model.optim.name", "", OPTIMIZERS, "AdamW with float32 states"),
    "model.optim.lr": _float("train.learning_rate"),
    "model.optim.weight_decay": _float("train.weight_decay"),
    "model.optim.betas": lambda value: ({"train.betas": list(map(float, value))}, ""),
    "model.optim.sched.name": _one_of("model.optim.sched.name", "train.schedule", SCHEDULES),
    "model.optim.sched.warmup_steps": _to("train.warmup_steps"),
    "model.optim.sched.constant_steps": _to("train.constant_steps"),
    "model.optim.sched.min_lr": _float("train.minimum_learning_rate"),
    "model.optim.sched.max_steps": _drop("the learning rate reaches its minimum at train.steps"),
    # precision
    "precision.type": _one_of(
        "precision.type", "train.precision", {"fp32": "float32", **dict.fromkeys(BF16, "bf16")}, ROUNDING
    ),
    "precision.parallel_layers_reduce_dtype": _drop("layers communicate in the dtype of their activations"),
    "precision.master_weights": _drop(ALWAYS),
    "precision.fp32_grad_acc": _one_of(
        "precision.fp32_grad_acc", "train.gradient_dtype", {True: "float32", False: "bf16"}
    ),
    "precision.xla_use_bf16": _drop(LEGACY),
    "precision.xla_downcast_bf16": _drop(LEGACY),
    "precision.neuron_rt_stochastic_rounding_en": _drop(ROUNDING),
    # exp_manager
    "exp_manager.explicit_log_dir": _drop(STORE),
    "exp_manager.exp_dir": _drop(STORE),
    "exp_manager.name": _drop("a run is named after its profile, or by --name"),
    "exp_manager.resume_if_exists": lambda value: ({"checkpoint.resume": "newest" if value else "none"}, ""),
    "exp_manager.resume_from_checkpoint": _initial_checkpoint,
    "exp_manager.create_tensorboard_logger": _drop(ALWAYS),
    "exp_manager.save_xser": _drop("checkpoints always have one file per rank"),
    "exp_manager.load_xser": _drop("`trainshed convert` detects the format"),
    "exp_manager.async_checkpointing": _to("checkpoint.async"),
    "exp_manager.ckpt_ptl_version": _drop("PyTorch Lightning is not used"),
    "exp_manager.checkpoint_callback_params.every_n_train_steps": _interval("checkpoint.every"),
    "exp_manager.checkpoint_callback_params.save_top_k": lambda value: (
        {"checkpoint.keep": max(0, value)},
        "0 keeps all" if value < 1 else "",
    ),
    "exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt": _drop(ALWAYS),
}
