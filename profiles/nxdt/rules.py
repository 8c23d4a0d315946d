"""Keys that are translated one by one: trainer, topology, optimizer, precision, checkpoints, runtime.

A rule takes the translation, a key and its value, and reports the key. Keys that neither a rule nor another file reads are
unknown: an error if they could change the model or are a misspelling, otherwise reported as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from profiles.nxdt.config import Unresolved
from profiles.nxdt.translation import Effect, Line, Translation

Rule = Callable[[Translation, str, Any], None]
OFF = (None, False, 0, "", "None", "none")  # values that switch a feature off
# Sections whose unknown keys may change what is trained.
MODEL_SECTIONS = ("model", "model_alignment_strategy", "distributed_strategy")


def apply(translation: Translation) -> None:
    """Translate the keys that have a rule, and report those that nothing has read."""
    translation.known |= RULES.keys()
    for key, value in translation.theirs.items():
        rule = RULES.get(key)
        if isinstance(rule, str):
            translation.report(key, Effect.HARMLESS, rule)
        elif rule is not None:
            rule(translation, key, value)
    if is_hugging_face(translation) and NORMS not in translation.theirs:
        translation.ours["train.norm_weight_decay"] = True
        note = "NxD Training's Hugging Face models decay norm weights by default"
        translation.lines[NORMS] = Line(NORMS, None, Effect.TRANSLATED, "train.norm_weight_decay", note)
    for key, value in translation.theirs.items():
        if key not in translation.lines:
            _unknown(translation, key, value)


def _unknown(translation: Translation, key: str, value: Any) -> None:
    if close := translation.misspelt(key):
        translation.report(key, Effect.ERROR, f"is unknown; did you mean {close[0]}?")
    elif value in OFF or value == {}:
        translation.report(key, Effect.HARMLESS, "unknown to Trainshed, and off")
    elif key.partition(".")[0] in MODEL_SECTIONS:
        note = "is unknown to Trainshed and may change the model; remove it to import the rest"
        translation.report(key, Effect.ERROR, note)
    else:
        translation.report(key, Effect.DIFFERS, "unknown to Trainshed: not imported")


def _to(ours: str, read: Callable[[Translation, str], Any]) -> Rule:
    """A rule for a key with the same meaning; `read` checks and returns its value."""

    def rule(translation: Translation, key: str, value: Any) -> None:
        if translation.has(key):
            translation.translate(key, {ours: read(translation, key)})
        else:
            translation.report(key, Effect.HARMLESS, "not set")

    return rule


def _count(translation: Translation, key: str) -> int:
    return translation.integer(key, 1)


def _index(translation: Translation, key: str) -> int:
    return translation.integer(key, 0, least=0)


def _number(translation: Translation, key: str) -> float:
    return float(translation.number(key, 0))


def _flag(translation: Translation, key: str) -> bool:
    return translation.flag(key, False)


def _only(valid: Any, reason: str, otherwise: Effect = Effect.ERROR) -> Rule:
    """A rule for a feature with one supported value; another value is an error, or differs."""

    def rule(translation: Translation, key: str, value: Any) -> None:
        if value == valid or (valid in OFF and value in OFF):
            translation.report(key, Effect.HARMLESS, "the same here")
        else:
            translation.report(key, otherwise, reason)

    return rule


def _one_of(ours: str, choices: Mapping[Any, Any], note: str = "") -> Rule:
    def rule(translation: Translation, key: str, value: Any) -> None:
        if isinstance(value, list | dict) or value not in choices:
            translation.report(
                key, Effect.ERROR, f"has no equivalent; Trainshed has {', '.join(map(str, choices))}"
            )
        else:
            translation.translate(key, {ours: choices[value]} if ours else {}, note)

    return rule


def _data_sharding(translation: Translation, key: str, value: Any) -> None:
    sharding, note, effect = "zero1", "", Effect.TRANSLATED
    if not translation.flag(key, False):
        sharding = "none"
        if _asks_for_float32(translation):
            note = "without ZeRO-1, NxD Training has neither float32 master weights nor float32 gradient "
            note += "accumulation; Trainshed has both in either case"
            effect = Effect.DIFFERS
    translation.translate(key, {"parallel.data_sharding": sharding}, note, effect)


def _asks_for_float32(translation: Translation) -> bool:
    """Whether NxD Training's precision has float32 master weights or gradient accumulation."""
    kind = translation.get("precision.type")
    if kind == "manual":
        return any(
            translation.flag(f"precision.{name}", False) for name in ("master_weights", "fp32_grad_acc")
        )
    return kind in ("mixed_precision", "mixed_precisionSR", "autocast")


def _kv_replicator(translation: Translation, key: str, value: Any) -> None:
    """Reject a number of replicas with which the tensor ranks cannot share the KV heads evenly."""
    replicas, ours = translation.integer(key, 1), translation.ours
    tensor = translation.integer("distributed_strategy.tensor_model_parallel_size", 1)
    heads = ours.get("model.num_key_value_heads", ours.get("model.num_attention_heads", tensor))
    copies = heads * replicas
    if is_hugging_face(translation) and replicas > 1 and (copies < tensor or copies % tensor):
        note = f"makes {copies} of {heads} KV heads, which {tensor} tensor ranks do not divide"
        translation.report(key, Effect.ERROR, note)
    translation.report(key, Effect.HARMLESS, "follows from parallel.tensor and the number of KV heads")


def _virtual_pipeline(translation: Translation, key: str, value: Any) -> None:
    stages = translation.integer(key, 1, least=0)
    if stages < 2:
        translation.report(key, Effect.HARMLESS, "one stage per rank, as by default")
    elif translation.integer("distributed_strategy.pipeline_model_parallel_size", 1) == 1:
        translation.report(key, Effect.HARMLESS, "has no effect without pipeline parallelism")
    else:
        note = "two stages per rank" + (
            "" if stages == 2 else f" instead of {stages}: set parallel.pipeline_cuts"
        )
        effect = Effect.TRANSLATED if stages == 2 else Effect.TO_DO
        translation.translate(key, {"parallel.schedule": "interleaved"}, note, effect)


def _pipeline_cuts(translation: Translation, key: str, value: Any) -> None:
    if not value:
        translation.report(key, Effect.HARMLESS, "stages are balanced by cost")
        return
    try:
        value = value if isinstance(value, list) else [value]
        cuts = [int(str(name).rpartition(".")[2]) + 1 for name in value]
    except ValueError:
        translation.report(key, Effect.ERROR, "is not a list of layers such as model.layers.18")
        return
    note = "NxD names the last layer of a stage, Trainshed the first of the next"
    translation.translate(key, {"parallel.pipeline_cuts": cuts}, note)


def _max_steps(translation: Translation, key: str, value: Any) -> None:
    if not _is_unlimited(translation):
        translation.translate(key, {"train.steps": translation.integer(key, 1)})
    elif translation.integer("trainer.max_epochs", -1, least=-1) > 0:
        translation.report(key, Effect.HARMLESS, "unlimited: trainer.max_epochs determines the steps")
    else:
        translation.report(key, Effect.ERROR, "is unlimited; set a number of steps")


def _max_epochs(translation: Translation, key: str, value: Any) -> None:
    epochs = translation.integer(key, -1, least=-1)
    if epochs < 1:
        translation.report(key, Effect.HARMLESS, "unlimited: trainer.max_steps determines the length")
    elif _is_unlimited(translation):
        translation.translate(key, {"train.epochs": epochs})
    else:
        count = "an epoch" if epochs == 1 else f"{epochs} epochs"
        note = f"NxD Training stops after {count} if that is earlier; set train.steps to the number of steps then"
        translation.report(key, Effect.DIFFERS, note)


def _is_unlimited(translation: Translation) -> bool:
    """Whether trainer.max_steps, -1 by default, does not limit the run."""
    return translation.number("trainer.max_steps", -1) < 0


def _evaluations(translation: Translation, key: str, value: Any) -> None:
    batches, steps = (
        translation.number("trainer.limit_val_batches", 1.0),
        translation.number("trainer.max_steps", 0),
    )
    every = translation.number(key, 0)  # a float is a share of an epoch
    never = isinstance(every, float) or every <= 0 or not batches or 0 < steps < every
    translation.translate(key, {"evaluate.every": 0 if never else every}, "only at the end" if never else "")


def _evaluation_batches(translation: Translation, key: str, value: Any) -> None:
    batches = translation.number(key, 0)
    if isinstance(batches, int) and batches > 0:
        translation.translate(key, {"evaluate.batches": batches}, "global batches")
    elif not batches:
        translation.report(
            key, Effect.HARMLESS, "no evaluation during training; the final model is evaluated"
        )
    else:
        translation.report(key, Effect.HARMLESS, "the complete validation split is evaluated")


def _checkpoint_interval(translation: Translation, key: str, value: Any) -> None:
    every = translation.integer(key, 0, least=-1)
    callback = translation.flag("exp_manager.create_checkpoint_callback", True)
    if every < 1 or not callback or _saves_only_the_end(translation):
        translation.translate(key, {"checkpoint.every": 0}, "only at the end")
    else:
        translation.translate(key, {"checkpoint.every": every})


def _keep(translation: Translation, key: str, value: Any) -> None:
    """-1 keeps all checkpoints in Lightning, and 0 none."""
    kept = translation.integer(key, 1, least=-1)
    if kept < 0:
        translation.translate(key, {"checkpoint.keep": 0}, "0 keeps all")
    elif _saves_only_the_end(translation):
        translation.translate(key, {"checkpoint.every": 0}, "only at the end")
    else:
        note = "" if kept else "the latest: save_last is true"
        translation.translate(key, {"checkpoint.keep": max(1, kept)}, note)


def _saves_only_the_end(translation: Translation) -> bool:
    kept = translation.integer(f"{CALLBACK}.save_top_k", 1, least=-1)
    return kept == 0 and not translation.flag(f"{CALLBACK}.save_last", False)


def _weight_decay(translation: Translation, key: str, value: Any) -> None:
    decay, note, effect = _number(translation, key), "", Effect.TRANSLATED
    if is_hugging_face(translation) and decay != 0.01:
        note = "NxD Training's Hugging Face models always decay by 0.01; set 0.01 to reproduce its runs"
        effect = Effect.DIFFERS
    translation.translate(key, {"train.weight_decay": decay}, note, effect)


def _norm_weight_decay(translation: Translation, key: str, value: Any) -> None:
    decays, note, effect = _flag(translation, key), "", Effect.TRANSLATED
    if is_hugging_face(translation):
        note = "NxD Training's Hugging Face models do the opposite of what this key is documented to do"
        note += f"; set train.norm_weight_decay {str(not decays).lower()} to reproduce its runs"
        effect = Effect.DIFFERS
    translation.translate(key, {"train.norm_weight_decay": decays}, note, effect)


def is_hugging_face(translation: Translation) -> bool:
    """Whether the config trains NxD Training's copy of a Hugging Face model, not its Megatron model."""
    likely = "hf" if translation.has("model.model_config") else "megatron"
    source: str = translation.get("model_source", likely)
    if source not in ("hf", "megatron"):
        translation.report("model_source", Effect.ERROR, "is neither hf nor megatron")
        return likely == "hf"
    return source == "hf"


def _is_hugging_face_llama(translation: Translation) -> bool:
    return is_hugging_face(translation) and not translation.has_section("model.moe")


def _betas(translation: Translation, key: str) -> list[float]:
    value = translation.get(key)
    if isinstance(value, list) and len(value) == 2 and all(isinstance(beta, int | float) for beta in value):
        return [float(beta) for beta in value]
    translation.report(key, Effect.ERROR, "is not a list of two numbers")
    return [0.9, 0.999]


def _schedule(translation: Translation, key: str, value: Any) -> None:
    _one_of("train.schedule", SCHEDULES)(translation, key, value)
    if _is_unlimited(translation):
        note = "without trainer.max_steps, NxD Training's learning rate is constant, without warm-up"
        translation.report(key, Effect.DIFFERS, note)


def _warmup_ratio(translation: Translation, key: str, value: Any) -> None:
    if _is_unlimited(translation) and translation.number(key, 0):
        note = "is a share of trainer.max_steps, which is unlimited; set train.warmup_steps"
        translation.report(key, Effect.TO_DO, note)
    else:
        translation.translate(key, {"train.warmup_steps": _warmup_steps(translation)}, "of trainer.max_steps")


def _warmup_steps(translation: Translation) -> int:
    """Warm-up steps, stated as such or as a share of trainer.max_steps."""
    ratio = translation.number(f"{SCHEDULE}.warmup_ratio", 0)
    if ratio:
        return int(ratio * max(0, translation.number("trainer.max_steps", 0)))
    return translation.integer(f"{SCHEDULE}.warmup_steps", 0, least=0)


def _constant_steps(translation: Translation, key: str, value: Any) -> None:
    """Steps at the minimum rate after the decay, as in NeMo; if fewer are left, right after warm-up."""
    asked = _index(translation, key)
    left = max(0, int(translation.number("trainer.max_steps", 0)) - _warmup_steps(translation))
    steps = asked if _is_unlimited(translation) else min(asked, left)
    note, effect = "steps at the minimum after the decay, as in NeMo", Effect.TRANSLATED
    if steps < asked:
        note = f"exceeds the {left} steps after warm-up: the learning rate is then at its minimum, as in NeMo"
        effect = Effect.DIFFERS
    translation.translate(key, {"train.minimum_rate_steps": steps}, note if steps else "", effect)


def _schedule_steps(translation: Translation, key: str, value: Any) -> None:
    same = value == translation.get("trainer.max_steps")
    note = "the schedule ends at trainer.max_steps, as in NxD Training"
    translation.report(key, Effect.HARMLESS if same else Effect.DIFFERS, note)


def _precision(translation: Translation, key: str, value: Any) -> None:
    _one_of("train.precision", PRECISIONS, "master weights are float32; no stochastic rounding")(
        translation, key, value
    )
    if value == "mixed_precision_SR":
        note = "with this spelling, NxD Training has no float32 master weights, and accumulates gradients in bf16; here "
        note += "master weights are always float32, and there is no stochastic rounding"
        translation.translate(key, {"train.precision": "bf16"}, note, Effect.DIFFERS)
    if value == "manual":
        _manual_precision(translation)
        return
    accumulate = value not in ("bf16SR", "mixed_precision_SR")
    translation.ours["train.gradient_dtype"] = "float32" if accumulate else "bf16"
    for name in MANUAL:
        translation.report(f"precision.{name}", Effect.HARMLESS, "only read if precision.type is manual")


def _manual_precision(translation: Translation) -> None:
    """Set the dtypes from the switches of `precision`.

    Each of the XLA switches turns float32 to bf16. Without them, only the Hugging Face Llama, which is cast, is bf16.
    """
    everything, downcast = (translation.flag(f"precision.{name}", False) for name in XLA)
    full = not (everything or downcast or _is_hugging_face_llama(translation))
    translation.ours["train.precision"] = "float32" if full else "bf16"
    for name in XLA:
        translation.translate(f"precision.{name}", {"train.precision": translation.ours["train.precision"]})
    if everything:
        note = "everything is bf16 in NxD Training, master weights included; they are always float32 here"
        translation.report(f"precision.{XLA[0]}", Effect.DIFFERS, note)
    accumulate = full or translation.flag("precision.fp32_grad_acc", False)
    translation.translate(
        "precision.fp32_grad_acc", {"train.gradient_dtype": "float32" if accumulate else "bf16"}
    )
    if not full and not translation.flag("precision.master_weights", False):
        translation.report("precision.master_weights", Effect.DIFFERS, "master weights are always float32")
    for name in MANUAL:
        translation.report(f"precision.{name}", Effect.HARMLESS, "master weights are float32")


def _reduce_dtype(translation: Translation, key: str, value: Any) -> None:
    wider = str(value).lower() == "fp32" and translation.get("precision.type") != "fp32"
    if wider and _is_hugging_face_llama(translation):
        note = "NxD Training's Hugging Face Llama sums over tensor ranks in float32, Trainshed in the dtype of activations"
        translation.report(key, Effect.DIFFERS, note)
    translation.report(key, Effect.HARMLESS, "layers communicate in the dtype of their activations")


ALWAYS = "always done"
KERNEL = "the device's own attention kernel is used"
LEGACY = "belongs to the legacy stack, which native PyTorch on Neuron does not use"
STORE = "`trainshed run --store` sets where runs are stored"
FILES = "only affects how files are read"
FORMAT = "checkpoints have one file per rank, in a format that any topology reads"
MANUAL = (
    *("master_weights", "fp32_grad_acc", "fp32_grads_cc"),
    *("xla_use_bf16", "xla_downcast_bf16", "neuron_rt_stochastic_rounding_en"),
)
XLA = ("xla_use_bf16", "xla_downcast_bf16")  # the first also makes master weights bf16
PRECISIONS = {
    "fp32": "float32",
    **dict.fromkeys(("mixed_precision", "mixed_precisionSR", "mixed_precision_SR"), "bf16"),
    **dict.fromkeys(("bf16SR", "autocast", "manual"), "bf16"),
}
SCHEDULES = {"CosineAnnealing": "cosine", "LinearAnnealingWithWarmUp": "linear", "WarmupPolicy": "constant"}
RECOMPUTE = {"selective": "selective", "full": "full", None: "none"}
CALLBACK = "exp_manager.checkpoint_callback_params"
SCHEDULE = "model.optim.sched"
NORMS = "model.do_layer_norm_weight_decay"

# A text is why a key has no effect.
RULES: dict[str, Rule | str] = {
    "name": "the profile has its file's name; several published configs share one",
    "seed": _to("train.seed", _index),
    "model_source": "the architecture follows from the model's keys",
    "compiler_flags": "flags of neuronx-cc for the legacy stack; compile.flags has those of native PyTorch",
    "compiler_cache_url": "compiled graphs are artifacts in the store",
    "neuron_experimental_compress_rg": LEGACY,
    "aync_exec_max_inflight_requests": LEGACY,
    "bucket_size_collectives": "buckets hold at least 10 million elements",
    "neuron_rt_exec_timeout": LEGACY,
    # trainer
    "trainer.devices": _to("cluster.devices_per_node", _count),
    "trainer.num_nodes": _to("cluster.nodes", _count),
    **dict.fromkeys(  # vnc: before SDK 2.22
        ("trainer.lnc", "trainer.vnc"), "cluster.accelerator trn2 has two physical cores per logical core"
    ),
    "trainer.max_epochs": _max_epochs,
    "trainer.max_steps": _max_steps,
    "trainer.gradient_clip_val": lambda translation, key, _: translation.translate(
        key, {"train.clip": _number(translation, key) or None}
    ),
    "trainer.val_check_interval": _evaluations,
    "trainer.check_val_every_n_epoch": _only(None, "evaluate.every counts steps", Effect.DIFFERS),
    "trainer.num_sanity_val_steps": "there is no trial evaluation before training",
    "trainer.limit_val_batches": _evaluation_batches,
    "trainer.limit_test_batches": "there is no test split",
    "trainer.log_every_n_steps": _to("train.log_every", _count),
    "trainer.sequential_move_factor": "weights are initialized on the device, not moved",
    # distributed_strategy
    "distributed_strategy.tensor_model_parallel_size": _to("parallel.tensor", _count),
    "distributed_strategy.pipeline_model_parallel_size": _to("parallel.pipeline", _count),
    "distributed_strategy.virtual_pipeline_model_parallel_size": _virtual_pipeline,
    "distributed_strategy.context_parallel_size": _to("parallel.context", _count),
    "distributed_strategy.zero1": _data_sharding,
    "distributed_strategy.sequence_parallel": _to("parallel.sequence_parallel", _flag),
    "distributed_strategy.kv_replicator": _kv_replicator,
    # training
    "data.micro_batch_size": _to("train.micro_batch_size", _count),
    "data.global_batch_size": _to("train.global_batch_size", _count),
    "model.qkv_linear": "Q, K and V are one projection, with KV heads replicated as needed",
    "model.fuse_qkv": "Q, K and V are always fused",
    "model.pipeline_cuts": _pipeline_cuts,
    "model.activations_checkpoint_granularity": _one_of("train.recompute", RECOMPUTE),
    **dict.fromkeys(
        ("model.activations_checkpoint_recompute", "model.activations_checkpoint_recompute_mlp"),
        "selective saves attention and the projections, and recomputes norms, rotation and activations",
    ),
    "model.fusions.softmax": KERNEL,
    "model.fusions.flash_attention": KERNEL,
    "model.fusions.ring_attention": "follows from parallel.context",
    "model.transpose_nki_inputs": KERNEL,
    "model.use_cpu_initialization": "weights depend only on the seed and their names, on any device",
    NORMS: _norm_weight_decay,
    "model.wrap_with_zero": "see parallel.data_sharding",
    # model.optim
    "model.optim.name": _one_of("", {"adamw": "", "adamw_fp32OptState": ""}, "AdamW with float32 states"),
    "model.optim.lr": _to("train.learning_rate", _number),
    "model.optim.weight_decay": _weight_decay,
    "model.optim.betas": _to("train.betas", _betas),
    "model.optim.eps": _to("train.epsilon", _number),
    "model.optim.capturable": "only affects CUDA graphs",
    f"{SCHEDULE}.name": _schedule,
    f"{SCHEDULE}.warmup_steps": _to("train.warmup_steps", _index),
    f"{SCHEDULE}.warmup_ratio": _warmup_ratio,
    f"{SCHEDULE}.constant_steps": _constant_steps,
    f"{SCHEDULE}.min_lr": _to("train.minimum_learning_rate", _number),
    f"{SCHEDULE}.max_steps": _schedule_steps,
    # precision
    "precision.type": _precision,
    "precision.parallel_layers_reduce_dtype": _reduce_dtype,
    # exp_manager
    "exp_manager.explicit_log_dir": STORE,
    "exp_manager.exp_dir": STORE,
    "exp_manager.name": "a run is named after its profile, or by --name",
    "exp_manager.resume_if_exists": lambda translation, key, value: translation.translate(
        key,
        {"checkpoint.resume": "newest" if translation.flag(key, isinstance(value, Unresolved)) else "none"},
    ),
    "exp_manager.resume_ignore_no_checkpoint": "a run without a checkpoint starts anew",
    "exp_manager.create_tensorboard_logger": ALWAYS,
    "exp_manager.create_checkpoint_callback": "see checkpoint.every",
    "exp_manager.log_parameter_norm": "always logged",
    "exp_manager.log_gradient_norm": "always logged",
    "exp_manager.log_local_rank_0_only": "metrics are written once, by rank 0",
    "exp_manager.enable_recovery_time_instrumentation": "the log has the time of each attempt and each checkpoint",
    "exp_manager.save_xser": FORMAT,
    "exp_manager.load_xser": "`trainshed convert` detects the format",
    "exp_manager.save_bf16": "checkpoints keep the float32 master weights",
    "exp_manager.async_checkpointing": _to("checkpoint.async", _flag),
    "exp_manager.ckpt_ptl_version": "PyTorch Lightning is not used",
    f"{CALLBACK}.every_n_train_steps": _checkpoint_interval,
    f"{CALLBACK}.save_top_k": _keep,
    f"{CALLBACK}.save_last": "the last step's checkpoint is always saved",
    f"{CALLBACK}.use_master_weights_in_ckpt": ALWAYS,
    **{
        f"{CALLBACK}.{name}": "the latest checkpoints are kept, named by their step"
        for name in ("monitor", "mode", "filename", "model_parallel_size")
    },
    # how data is read
    **{f"data.{name}": FILES for name in ("data_impl", "skip_warmup", "num_workers", "index_mapping_dir")},
    "data.dataloader_type": "samples are shuffled by the seed",
    "data.validation_drop_last": "the last batch is evaluated too",
    "data.pad_samples_to_global_batch_size": "the last batch is evaluated as it is",
    "data.no_seqlen_plus_one_input_tokens": _only(False, "each sample has one more target", Effect.DIFFERS),
    "data.eod_mask_loss": _only(False, "is not supported: the loss counts each document's EOS token"),
    "data.fine_tuning": _only(False, "is not supported by NxD Training either"),
}
