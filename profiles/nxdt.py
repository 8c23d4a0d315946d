"""NxD Training's configs as profiles: what each of their keys becomes here, or why it is dropped.

Their files are YAML read through OmegaConf: `${a.b}` stands for another key's value, `${.b}` for one of the same section and
`${multiply:x, y}` for a product; all are resolved first. Every key of the file gets one line in the result, known or not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles import text
from profiles.errors import ProfileError, shown

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
DEEPEST = 20  # references within references


@dataclass(frozen=True)
class Line:
    """What became of one key: ours with its value, or None where it is dropped; and a word on why."""

    key: str
    value: Any
    ours: str | None
    note: str = ""

    def show(self, width: int) -> str:
        """As one line, the key padded to a width."""
        became = f"{shown(self.value)} -> {self.ours}" if self.ours else "dropped"
        return f"{self.key:<{width}}  {became}{f': {self.note}' if self.note else ''}"


Rule = Callable[[Any], tuple[dict[str, Any], str]]
"""A value to what is set here and a note; what sets nothing is dropped for the reason in the note."""


def read(path: Path) -> dict[str, Any]:
    """Their file with dotted keys, references resolved.

    Raises:
        ProfileError: no such file, no mapping, a reference that leads nowhere or in a circle.
    """
    try:
        values = text.parse(path.read_text())
    except FileNotFoundError:
        raise ProfileError("config", str(path), "there is no such file") from None
    except UnicodeDecodeError:
        raise ProfileError("config", str(path), "is no text") from None
    except OSError as error:
        raise ProfileError("config", str(path), error.strerror or str(error)) from error
    except ValueError as error:
        raise ProfileError("config", str(path), str(error)) from error
    if not isinstance(values, Mapping):
        raise ProfileError("config", str(path), "is no mapping of sections")
    flat = dict(_flat(values, ""))
    return {key: _resolved(key, value, flat) for key, value in flat.items()}


def convert(theirs: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[Line]]:
    """A profile's values from those of `read`, and a line for each of their keys.

    Args:
        folder: of their file, which relative paths count from.

    Raises:
        ProfileError: a value that has no counterpart and cannot be left out.
    """
    lines: list[Line] = []
    ours: dict[str, Any] = {}
    for key, value in theirs.items():
        rule = RULES.get(key)
        if rule is None:
            lines.append(Line(key, value, None, "Trainshed has nothing like it"))
            continue
        made, note = rule(value)
        ours |= made
        lines.append(Line(key, value, ", ".join(made) or None, note))
    ours |= _hardware(theirs) | _network(ours, folder) | {"data.sources": _sources(theirs)}
    result: dict[str, Any] = {"name": "imported", "description": "From a config of NxD Training"}
    for key, value in ours.items():
        section, dot, name = key.partition(".")
        if dot:
            result.setdefault(section, {})[name] = value
        elif section:
            result[section] = value
    return result, lines


def _hardware(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The cluster: trn1 has 32 devices a node, trn2 64 with logical cores of two."""
    nodes, devices = theirs.get("trainer.num_nodes", 1), theirs.get("trainer.devices", 1)
    model = "trn2" if theirs.get("trainer.lnc") == 2 or devices == 64 else "trn1"
    launcher = "slurm" if nodes > 1 else "local"
    return {"cluster.launcher": launcher, "cluster.device": "neuron", "cluster.accelerator": model}


def _network(ours: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The architecture's kind, which theirs say by what they have, and the tokenizer, beside the config.json if nowhere else."""
    made: dict[str, Any] = {}
    config = ours.get("model.config")
    if config is None:
        made["model.architecture"] = "llama" if "model.rope_theta" in ours else "gpt"
    else:
        path = folder / Path(config).expanduser()
        made["model.config"] = str(path)
        if "tokenizer.source" not in ours:
            made["tokenizer.source"] = str(path if path.is_dir() else path.parent)
    if "tokenizer.source" not in ours | made:
        raise ProfileError(
            "data.tokenizer.type", None, "is missing: nothing else says where the tokenizer is"
        )
    return made


def _sources(theirs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Folders of token ids, or the prefixes of Megatron's files."""
    prefixes = theirs.get("data.data_prefix") or []
    sources = [
        {"kind": "megatron", "path": str(prefix)}
        for prefix in prefixes
        if not isinstance(prefix, float | int)
    ]
    for key, use in (("data.train_dir", "train"), ("data.val_dir", "validation")):
        if theirs.get(key):
            sources.append({"kind": "tokens", "path": theirs[key], "text": "input_ids", "use": use})
    if not sources:
        raise ProfileError("data.train_dir", None, "is missing: nothing says what to train on")
    if len(sources) == 1:
        sources[0].pop("use", None)
    return sources


def _flat(values: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _resolved(key: str, value: Any, flat: Mapping[str, Any]) -> Any:
    for _ in range(DEEPEST):
        if not isinstance(value, str) or (found := REFERENCE.search(value)) is None:
            return value
        target = _target(key, found[1], flat)
        value = target if found[0] == value else value.replace(found[0], str(target))
    raise ProfileError(key, flat[key], "refers to itself")


def _target(key: str, reference: str, flat: Mapping[str, Any]) -> Any:
    name, colon, arguments = reference.partition(":")
    if colon and name.strip() == "multiply":
        return math.prod(text.parse(argument) for argument in arguments.split(","))
    name = reference.strip()
    up = len(name) - len(name.lstrip("."))  # dots lead from the key's own section upwards
    if up:
        name = ".".join([*key.split(".")[:-up], name.lstrip(".")])
    if name not in flat:
        raise ProfileError(key, f"${{{reference}}}", "refers to nothing in this file")
    return flat[name]


def _to(ours: str, note: str = "") -> Rule:
    return lambda value: ({ours: value}, note)


def _drop(reason: str) -> Rule:
    return lambda value: ({}, reason)


def _one_of(key: str, ours: str, choices: Mapping[Any, Any], note: str = "") -> Rule:
    def rule(value: Any) -> tuple[dict[str, Any], str]:
        if value not in choices:
            raise ProfileError(key, value, "has no counterpart", list(map(str, choices)))
        return {ours: choices[value]}, note

    return rule


def _float(ours: str) -> Rule:
    return lambda value: ({ours: float(value)}, "")


def _clip(value: Any) -> tuple[dict[str, Any], str]:
    return {"train.clip": float(value) if value else None}, "" if value else "no clipping"


def _virtual(value: Any) -> tuple[dict[str, Any], str]:
    if not value or value == 1:
        return {}, "one stage a rank is parallel.schedule 1f1b, the default"
    return {"parallel.schedule": "interleaved"}, "two stages a rank, more with parallel.pipeline_cuts"


def _cuts(value: Any) -> tuple[dict[str, Any], str]:
    if not value:
        return {}, "stages are balanced by cost"
    try:
        cuts = [int(str(name).rpartition(".")[2]) + 1 for name in value]
    except ValueError:
        raise ProfileError(
            "model.pipeline_cuts", value, "is no list of layers such as model.layers.18"
        ) from None
    return {"parallel.pipeline_cuts": cuts}, "theirs end a stage, ours begin the next one"


def _recomputed(value: Any) -> tuple[dict[str, Any], str]:
    names = value if isinstance(value, list) else [value] if value else []
    if any(str(name).endswith("MLP") and not str(name).startswith("Activation") for name in names):
        return (
            {},
            "selective keeps an MLP's projections and computes the rest of it again; full keeps nothing",
        )
    return {}, "selective computes norms, rotation, the attention core and activation × gate again"


def _resume(value: Any) -> tuple[dict[str, Any], str]:
    return {"checkpoint.resume": "newest" if value else "none"}, ""


def _from_checkpoint(value: Any) -> tuple[dict[str, Any], str]:
    if not value:
        return {}, "not set"
    return {}, "a checkpoint of theirs: `trainshed convert` makes it one that init.from can start from"


def _keep(value: Any) -> tuple[dict[str, Any], str]:
    return {"checkpoint.keep": max(0, value)}, "0 keeps all" if value < 1 else ""


def _every(ours: str) -> Rule:
    def rule(value: Any) -> tuple[dict[str, Any], str]:
        whole = isinstance(value, int) and value > 0
        return {ours: value if whole else 0}, "" if whole else "0: only at the end"

    return rule


ALWAYS = "always so"
DEVICES_OWN = "the device's own attention kernel is used"
LEGACY = "of the legacy stack, which PyTorch on Neuron does without"
RULES: dict[str, Rule] = {
    "name": _to("name"),
    "seed": _to("train.seed"),
    "model_source": _drop("the architecture follows from the model's keys"),
    "trainer.devices": _to("cluster.devices_per_node"),
    "trainer.num_nodes": _to("cluster.nodes"),
    "trainer.lnc": _drop("cluster.accelerator trn2 means logical cores of two"),
    "trainer.max_steps": _to("train.steps"),
    "trainer.gradient_clip_val": _clip,
    "trainer.val_check_interval": _every("evaluate.every"),
    "trainer.limit_val_batches": lambda value: (
        ({"evaluate.batches": value}, "microbatches a data rank")
        if isinstance(value, int) and value > 0
        else ({}, "all held-out text is evaluated")
    ),
    "trainer.log_every_n_steps": _to("train.log_every"),
    "trainer.sequential_move_factor": _drop("weights are made where they lie, and nothing is moved"),
    "distributed_strategy.tensor_model_parallel_size": _to("parallel.tensor"),
    "distributed_strategy.pipeline_model_parallel_size": _to("parallel.pipeline"),
    "distributed_strategy.virtual_pipeline_model_parallel_size": _virtual,
    "distributed_strategy.context_parallel_size": _to("parallel.context"),
    "distributed_strategy.zero1": _to("parallel.zero1"),
    "distributed_strategy.sequence_parallel": _to("parallel.sequence_parallel"),
    "distributed_strategy.kv_replicator": _drop("follows from parallel.tensor and the number of KV heads"),
    "data.micro_batch_size": _to("train.micro_batch_size"),
    "data.global_batch_size": _to("train.global_batch_size"),
    "data.seq_length": _to("train.sequence_length"),
    "data.train_dir": lambda value: ({"data.sources": value}, "token ids of its column input_ids"),
    "data.val_dir": lambda value: (
        ({"data.sources": value}, "for validation") if value else ({}, "a share of the documents is held out")
    ),
    "data.data_prefix": lambda value: (
        {"data.sources": value},
        "Megatron's files of these names, .bin and .idx",
    ),
    "data.tokenizer": _to("tokenizer.source"),
    "data.tokenizer.type": _to("tokenizer.source"),
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
    "model.model_config": _to("model.config"),
    "model.qkv_linear": _drop("one product for Q, K and V with KV replication is always used"),
    "model.fuse_qkv": _drop("Q, K and V are always one weight"),
    "model.pipeline_cuts": _cuts,
    "model.activations_checkpoint_granularity": _one_of(
        "model.activations_checkpoint_granularity",
        "train.recompute",
        {"selective": "selective", "full": "full", None: "none"},
    ),
    "model.activations_checkpoint_recompute": _recomputed,
    "model.fusions.softmax": _drop(DEVICES_OWN),
    "model.fusions.flash_attention": _drop(DEVICES_OWN),
    "model.fusions.ring_attention": _drop("follows from parallel.context"),
    "model.use_cpu_initialization": _drop(
        "weights depend on the seed and their names alone, wherever they are made"
    ),
    "model.weight_init_only": _drop("weights are always initialized once"),
    "model.do_layer_norm_weight_decay": _to("train.norm_weight_decay"),
    "model.wrap_with_zero": _drop("parallel.zero1 says it"),
    "model.optim.name": _one_of(
        "model.optim.name",
        "",
        dict.fromkeys(("adamw", "adamw_fp32OptState"), ""),
        "AdamW, its states in float32",
    ),
    "model.optim.lr": _float("train.learning_rate"),
    "model.optim.weight_decay": _float("train.weight_decay"),
    "model.optim.betas": lambda value: ({"train.betas": list(map(float, value))}, ""),
    "model.optim.sched.name": _one_of(
        "model.optim.sched.name",
        "train.schedule",
        {"CosineAnnealing": "cosine", "LinearAnnealingWithWarmUp": "linear"},
    ),
    "model.optim.sched.warmup_steps": _to("train.warmup_steps"),
    "model.optim.sched.constant_steps": _to("train.constant_steps"),
    "model.optim.sched.min_lr": _float("train.minimum_learning_rate"),
    "model.optim.sched.max_steps": _drop("the rate reaches its minimum at train.steps"),
    "precision.type": _one_of(
        "precision.type",
        "train.precision",
        {"fp32": "float32"}
        | dict.fromkeys(("mixed_precision", "mixed_precisionSR", "bf16SR", "autocast", "manual"), "bf16"),
        "master weights are float32, and nothing is rounded by chance",
    ),
    "precision.parallel_layers_reduce_dtype": _drop("layers exchange in the type of their activations"),
    "precision.master_weights": _drop(ALWAYS),
    "precision.fp32_grad_acc": _one_of(
        "precision.fp32_grad_acc", "train.gradient_dtype", {True: "float32", False: "bf16"}
    ),
    "precision.xla_use_bf16": _drop(LEGACY),
    "precision.xla_downcast_bf16": _drop(LEGACY),
    "precision.neuron_rt_stochastic_rounding_en": _drop(
        "master weights are float32, and nothing is rounded by chance"
    ),
    "exp_manager.explicit_log_dir": _drop("`trainshed run --store` says where runs are kept"),
    "exp_manager.exp_dir": _drop("`trainshed run --store` says where runs are kept"),
    "exp_manager.name": _drop("a run has its profile's name, or that of `--name`"),
    "exp_manager.resume_if_exists": _resume,
    "exp_manager.resume_from_checkpoint": _from_checkpoint,
    "exp_manager.create_tensorboard_logger": _drop(ALWAYS),
    "exp_manager.save_xser": _drop("checkpoints are always one file a rank"),
    "exp_manager.load_xser": _drop("`trainshed convert` finds out by itself"),
    "exp_manager.async_checkpointing": _to("checkpoint.async"),
    "exp_manager.ckpt_ptl_version": _drop("of PyTorch Lightning, which is not used"),
    "exp_manager.checkpoint_callback_params.every_n_train_steps": _every("checkpoint.every"),
    "exp_manager.checkpoint_callback_params.save_top_k": _keep,
    "exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt": _drop(ALWAYS),
    "compiler_flags": _drop("the compiler of PyTorch on Neuron takes none from a profile"),
    "compiler_cache_url": _drop("compiled graphs are artifacts of the store"),
    "neuron_experimental_compress_rg": _drop(LEGACY),
    "aync_exec_max_inflight_requests": _drop(LEGACY),
    "bucket_size_collectives": _drop("buckets hold at least 10 million elements"),
    "neuron_rt_exec_timeout": _drop(LEGACY),
}
