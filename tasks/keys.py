"""Cache keys: a hash of everything that determines a step's result, and of nothing else.

Keys are made of contents and parameters, never of paths or times. An input that is another step's artifact is represented by
that artifact's key. Only the keys of training, evaluation and export contain a name, the run's, because their artifacts refer to
files in its folder.

Which keys of a profile belong to which part of a run stands at each key (`profiles/sections/roles.py`); `tasks/rerun.py` compares
two profiles by it, for `trainshed plan --changes RUN`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profiles import renamed_keys, user_functions
from profiles.files import state_files
from profiles.files.folders import walk
from profiles.schema import Evaluate, Objective, Profile, Train
from profiles.sections import families
from profiles.sections.base import required
from profiles.sections.model import PARAMETRIZATION
from profiles.sections.roles import keys_of

# Keys of `train` that define the learning-rate schedule, which may change for steps not trained yet.
SCHEDULE = keys_of(Train, "schedule")
# Keys of `train` that do not change the mathematics: how it is computed, logged and guarded against anomalies.
NOT_MATHEMATICS = keys_of(Train, "identity", other=True) - SCHEDULE
# Keys of `model` introduced with DeepSeek-V3.
DEEPSEEK = {
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_shared_experts",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
}
# Keys of `train` introduced with Muon.
MUON = {"optimizer", "muon_momentum", "muon_coefficients", "muon_dtype", "muon_heads"}
# Further keys of `model` that not every family has, introduced after those that its key always contains.
OF_FAMILIES = {
    "max_window_layers",
    "no_rope_layer_interval",
    "partial_rotary_factor",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "use_qk_norm",
    "use_parallel_residual",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "linear_allow_neg_eigval",
    "shared_expert_intermediate_size",
}
# Arguments of a package's `Family` that change its model, but neither its class nor the shapes of its weights.
FEATURES = (
    *("norm", "norm_position", "qk_norm", "output_bias", "adjacent_pairs", "local_rope"),
    *("scaled_embedding", "linear_attention", "linear_norm_eps"),
)
# Keys of `train` that only have an effect on a model with multi-token prediction.
MULTI_TOKEN = ("mtp_weight", "mtp_steps", "mtp_later_weight")
# Keys of `train` that a position in the data depends on.
POSITION = ("global_batch_size", "sequence_length")
COMPILERS = ("torch", "triton", "torch-neuronx", "neuronx-cc")  # packages
# Modules that rewrite graphs, by compiler backend.
PASSES = {"inductor": ("modeling.compilation.product_pass", "parallel.host_products")}


# By objective.kind; changed when the same input is tokenized differently.
RECIPES = {"pretrain": 2, "sft": 6, "dpo": 7, "orpo": 7}
# Version of the engines that tokenize texts: 1 could confuse the tokens added to a vocabulary that are not special.
ENGINE = 2
SETTINGS = 3  # number of the settings with which inductor compiles for GPUs (modeling.compilation.compilers)


def digest(value: Any) -> str:
    """Hash of a JSON value, independent of key order: 32 hex digits. Raises TypeError or ValueError."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_digest(path: str | Path) -> str:
    """sha256 of a file's contents: 64 hex digits. Raises OSError, also on a short read."""
    with state_files.open_file(Path(path)) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        size, read = os.fstat(file.fileno()).st_size, file.tell()
    if read < size:
        raise OSError(errno.EIO, f"only {read} of {size} bytes could be read", str(path))
    return found


def tokenizer(**content: Any) -> str:
    """Key of a tokenizer: repository commit, folder contents, or training texts and vocabulary size."""
    return digest({"step": "tokenizer", **content})


def tokens(tokenizer: str | None, source: str, held_out: float | str, **options: Any) -> str:
    """Key of a tokenized shard: the tokenizer's key, the source's digest and the document options.

    Args:
        tokenizer: None if the source is tokenized already.
        held_out: fraction of the documents, or the split that all of them belong to.
    """
    inputs = {"tokenizer": tokenizer, "source": source, "held_out": held_out}
    recipe = RECIPES[options["records"]["kind"] if "records" in options else "pretrain"]
    return digest({"step": "tokens", "recipe": recipe, **inputs, **options})


def hashes(source: str) -> str:
    """Key of the hashes of a shard's documents."""
    return digest({"step": "hashes", "source": source})


def duplicates(hashes: Sequence[Sequence[str]]) -> str:
    """Key of the list of duplicate documents, from the keys of the hashes of each source, in order."""
    return digest({"step": "duplicates", "recipe": 2, "hashes": [list(source) for source in hashes]})


def dataset(shards: Sequence[str], sequence_length: int, **options: Any) -> str:
    """Key of a corpus, from its shards' keys before deduplication, in order, and how it is read."""
    inputs: dict[str, Any] = {"shards": list(shards), "sequence_length": sequence_length}
    if options.get("deduplicate"):
        inputs["recipe"] = 2  # 1 could drop other documents than the duplicates
    return digest({"step": "dataset", **inputs, **options})


def new_data(corpus: Mapping[str, Any]) -> str:
    """Key of a dataset that is new to the promoted model of a continual series, from its corpus.json."""
    return digest({"step": "fresh", "corpus": corpus})


def generated(model: str, sequence_length: int, first: int, count: int) -> str:
    """Key of rows of text sampled from a model, from the digest of its weights."""
    rows = {"sequence_length": sequence_length, "first": first, "count": count}
    return digest({"step": "generated", "recipe": 1, "model": model, **rows})


def checkpoint(profile: Profile, weights: str) -> str:
    """Key of pretrained weights converted for a model, from the digest of their source."""
    # Recipe 1 did not compare a tied head with the embedding, nor an index with the file beside it; recipe 2 read float8 parts
    # of one tensor from its first rows. Of the families with such tensors, these are published in float8; the runs of the
    # others would only become other runs.
    published = profile.model.family.linear_attention in ("fused", "split")
    inputs: dict[str, Any] = {"recipe": 3 if published else 2, "weights": weights, "model": _model(profile)}
    if profile.init.nxd_layout is not None:
        inputs["nxd_layout"] = profile.init.nxd_layout
    return digest({"step": "checkpoint", **inputs})


def reference(profile: Profile, weights: str, dataset: str) -> str:
    """Key of log-probabilities of a dataset's pairs under a model: both keys and how they are computed."""
    train = profile.train
    inputs: dict[str, Any] = {"weights": weights, "dataset": dataset, "precision": train.precision}
    if train.capacity_factor is not None:  # drops tokens
        inputs["capacity_factor"] = train.capacity_factor
    if train.precision == "fp8":
        inputs["fp8_recipe"] = train.fp8_recipe
    return digest({"step": "reference", "model": _model(profile), **inputs})


def trial(profile: Profile) -> str:
    """Key of the decision whether to compile a profile's graphs, from them and the run's length."""
    return digest(
        {"step": "trial", "graphs": graphs(profile), "tokens": profile.train.last_step * profile.step_tokens}
    )


def graphs(profile: Profile) -> str:
    """Key of the compiled graphs: what shapes them, what compiles them and the target platform."""
    from parallel import device as devices

    parallel, train, cluster = profile.parallel, profile.train, profile.cluster
    device = devices.resolve(cluster.device, cluster.accelerator)
    step = None
    if device.compiles_operators:  # everything else in a step is compiled too
        functions = [
            [_function(name, helpers=True) for name in names if name]
            for names in ([train.loss], profile.evaluate.metrics)
        ]
        settings = _without(keys_of(Train, "graphs", other=True), train_values(train))
        objective = profile.objective.model_dump(mode="json")
        # The parametrization's rates decide which parameters share a bucket.
        model = _model(profile, trained=True)
        step = [functions, settings, objective, profile.packs, profile.world_size, model]
    # On such a device, blocks gather their shards inside the graph, and the optimizer's update of a shard is a program.
    sharded = device.gathers_in_graph
    return digest(
        {
            "step": "graphs",
            "model": _model(profile),
            "degrees": [parallel.tensor, parallel.context, parallel.pipeline],
            "sequence_parallel": [parallel.sequence_parallel, parallel.overlap_chunks],
            "pipeline": [parallel.pipeline_cuts, parallel.schedule],
            "sharding": [parallel.data_sharding, profile.shard_degree] if sharded else None,
            "shape": [profile.micro_batch_rows, train.sequence_length],
            "precision": [train.precision, train.fp8_recipe, train.gradient_dtype],
            "recompute": train.recompute,
            "experts": _experts(profile) if profile.model.num_experts else None,
            "loss": [train.loss, profile.objective.traits.pairs],
            "step_programs": step,
            "document_masks": profile.document_masks,
            "lora": profile.lora.model_dump(mode="json") if profile.lora.rank else None,
            "rates": profile.scores_pairs_in_step,
            **({} if train.qk_clip is None else {"qk_clip": True}),
            **({"mtp": True} if profile.evaluate.mtp and profile.model.prediction_layers else {}),
            "compiler": compiler(profile),
            "code": code_digest("modeling", "parallel"),
        }
    )


def graph(profile: Profile, graph: str) -> str:
    """Key of one compiled program, from the digest of its graphs."""
    from parallel import device as devices

    inputs: dict[str, Any] = {"step": "graph", "graph": graph, "compiler": compiler(profile)}
    if devices.KINDS[profile.cluster.device].compiles_operators:
        # What such a compiler puts into a program although its graph has names only: the ranks of each group, and the values of
        # constants in a user's functions.
        parallel = profile.parallel
        inputs["ranks"] = [profile.world_size, parallel.pipeline, parallel.context, parallel.tensor]
        inputs["ranks"] += [parallel.expert, profile.shard_degree]
        named = (profile.train.loss, *profile.evaluate.metrics)
        inputs["functions"] = [_function(each, helpers=True) for each in named if each]
    return digest(inputs)


def compiler(profile: Profile) -> dict[str, Any]:
    """The compiler and the platform of a profile's graphs on this machine, as a JSON value."""
    from modeling.compilation.compilers import backend_name, make_compiler
    from modeling.training.trainer import threads
    from parallel import device as devices
    from parallel.host_products import ONEDNN_IS_FASTER

    cluster, backend, made = profile.cluster, backend_name(profile), make_compiler(profile)
    device = devices.KINDS[cluster.device]
    return {
        "backend": backend,
        "passes": [
            file_digest(required(required(find_spec(name)).origin)) for name in PASSES.get(backend, ())
        ],
        "flags": profile.compile.flags,
        "async_tensor": profile.compile.async_tensor,
        "lacks": made.missing_requirement(ahead_of_time=True),
        "platform": [devices.platform_tag(cluster.device), cluster.accelerator],
        "onednn": ONEDNN_IS_FASTER and cluster.device == "cpu",
        "devices": device.compiled_for(cluster.devices_per_node),
        "deterministic": device.nondeterministic and profile.train.deterministic,
        "threads": threads(profile) if cluster.device == "cpu" else None,  # that C++ code is divided among
        **({"settings": SETTINGS} if cluster.device == "cuda" else {}),
        **({"target": made.target} if made.target else {}),
        "versions": compiler_versions(),
    }


def run_identity(
    profile: Profile, tokenizer: str, dataset: str, weights: str | None = None, parent: str | None = None
) -> str:
    """Identity of a run: what determines its mathematics, and the keys of the artifacts it starts from.

    Excludes its name, cluster and topology, how it is compiled, saved and evaluated, what guards it, and the learning rate's
    schedule, which is compared step by step instead (store/runs.py).

    Args:
        parent: identity and step of the run that it was forked from.
    """
    train = _without(NOT_MATHEMATICS | SCHEDULE, train_values(profile.train))
    if profile.train.loss:
        train["loss"] = _function(profile.train.loss)
    inputs: dict[str, Any] = {
        "tokenizer": tokenizer,
        "dataset": dataset,
        "weights": weights,
        "parent": parent,
    }
    if profile.objective.traits.reads_records:
        objective = _without(
            keys_of(Objective, "identity", other=True), profile.objective.model_dump(mode="json")
        )
        inputs["objective"] = {**objective, "packing": profile.packs}
    if profile.lora.rank:
        inputs["lora"] = profile.lora.model_dump(mode="json")
    if profile.data.schedule:
        inputs["mixture"] = [change.model_dump(mode="json") for change in profile.data.schedule]
    return digest({"model": _model(profile, trained=True), "train": train, **inputs})


def forecast_target(profile: Profile) -> str:
    """Digest of a forecast's target run: its mathematics and data, without names and topology."""
    train = renamed_keys.original("train", _without(NOT_MATHEMATICS, train_values(profile.train)))
    sections = {
        name: getattr(profile, name).model_dump(mode="json") for name in ("tokenizer", "data", "objective")
    }
    del sections["data"]["cache_gigabytes"]
    if not profile.objective.traits.reads_records:
        del sections["objective"]["turns"]  # keeps the keys of forecasts and mixtures made before it existed
    return digest({"model": _model(profile, trained=True), "train": train, **sections})


def forecast(target: str, rungs: Sequence[Sequence[float]], metrics: Sequence[Mapping[str, float]]) -> str:
    """Key of a forecast: its target's settings, each rung's size, length and loss, and its metrics."""
    measured = {"rungs": [list(rung) for rung in rungs], "metrics": [dict(found) for found in metrics]}
    return digest({"step": "forecast", "recipe": 4, "target": target, **measured})


def proposal(kind: str, target: str, **fitted: Any) -> str:
    """Key of a proposed mixture or replay share: target settings, and what its laws are fitted to."""
    return digest({"step": kind, "recipe": 1, "target": target, **fitted})


def training(run: str, identity: str, train: Train) -> str:
    """Key of a run's training, to the end of its schedule."""
    return _of_run("training", run, identity, train)


def average(members: str, dataset: str, settings: Evaluate) -> str:
    """Key of an average: its checkpoints' digest, and the data and settings of its evaluation."""
    measured = {"metrics": [], "by_source": False} | _measured(settings)
    return digest({"step": "average", "members": members, "dataset": dataset, **measured})


def evaluation(run: str, identity: str, train: Train | None, settings: Evaluate) -> str:
    """Key of a run's evaluation.

    Args:
        train: None if `identity` includes a checkpoint's digest: the rest of the schedule does not change its weights.
    """
    return _of_run("evaluation", run, identity, train, **_measured(settings))


def _measured(settings: Evaluate) -> dict[str, Any]:
    """What an evaluation measures besides its loss, with the source of the user's metrics."""
    functions = [_function(name, helpers=True) for name in settings.metrics]
    given = {"metrics": functions, "by_source": settings.by_source, "mtp": settings.mtp}
    return {name: value for name, value in given.items() if value}


def task_evaluation(checkpoint: str, task: str, harness: str, files: str | None, limit: int | None) -> str:
    """Key of a language-model task's results, from digests of a checkpoint and of the user's task files.

    Args:
        harness: version of lm-eval.
        limit: maximum number of examples; None: all.
    """
    inputs = {"checkpoint": checkpoint, "task": task, "harness": harness, "files": files, "limit": limit}
    return digest({"step": "task-evaluation", **inputs})


def export(run: str, identity: str, train: Train, **more: Any) -> str:
    """Key of a run's export."""
    return _of_run("export", run, identity, train, **more)


def _of_run(step: str, run: str, identity: str, train: Train | None, **more: Any) -> str:
    schedule = None
    if train:
        schedule = renamed_keys.original("train", train.model_dump(mode="json", include={*SCHEDULE}))
    return digest({"step": step, "run": run, "identity": identity, "schedule": schedule, **more})


def compiler_versions() -> Mapping[str, str]:
    """Versions of Python and of the installed compiler packages and C++ compiler."""
    from modeling.compilation.toolchain import cpp_compiler

    found = {"python": platform.python_version()}
    for package in COMPILERS:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    if compiler := cpp_compiler():
        answer = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, errors="replace", check=False
        )
        found["c++"] = answer.stdout.partition("\n")[0]
    return found


def code_digest(*packages: str) -> str:
    """Hash of the source files of packages."""
    total = hashlib.sha256()
    for package in packages:
        folder = Path(required(required(find_spec(package)).submodule_search_locations)[0])
        for path in sorted(folder / name for name, _ in walk(folder) if name.endswith(".py")):
            total.update(f"{package}/{path.relative_to(folder)}\0{file_digest(path)}\n".encode())
    return total.hexdigest()[:32]


def _function(name: str, *, helpers: bool = False) -> list[Any]:
    """A user function, `module:function`, with the hash of its file.

    Args:
        helpers: also hash the files beside it that it imports. A run's identity does not: it is compared with those of
            earlier versions.
    """
    module = name.partition(":")[0]
    path = user_functions.module_file(module)
    if path is None:
        return [name, None]
    found = {}
    if helpers:
        root = path.parents[module.count(".")]
        files = user_functions.imported_files(path, root)
        found = {file.relative_to(root).as_posix(): file_digest(file) for file in files}
    return [name, file_digest(path), *([found] if found else [])]


def _model(profile: Profile, *, trained: bool = False) -> dict[str, Any]:
    """The model section; `trained` includes a non-standard parametrization, which only training uses."""
    values, family = profile.model.model_dump(mode="json"), profile.model.family
    if not family.selection_bias:  # keeps the identities of runs made before these keys existed
        values = _without(DEEPSEEK, values)
        scaling = values["rope_scaling"] or {}
        values["rope_scaling"] = {name: scaling[name] for name in scaling if "mscale" not in name} or None
    values = _without(OF_FAMILIES - family.fields.keys(), values)
    if depth := values.pop("num_nextn_predict_layers"):  # likewise
        weights = [getattr(profile.train, name) for name in MULTI_TOKEN] if trained else []
        values["multi_token"] = [depth, *weights]
    if profile.model.architecture not in families.OWN:
        values |= _package(family)
    scales = {name: values.pop(name) for name in PARAMETRIZATION}
    return values | scales if trained and scales["parametrization"] != "standard" else values


def _package(family: families.Family) -> dict[str, Any]:
    """What a package's model depends on besides its profile: file of its class, features of its entry."""
    own = any(family.model == each.model for each in families.OWN.values())
    usual = families.OWN["llama"]
    features = {name: getattr(family, name) for name in FEATURES}
    features = {name: value for name, value in features.items() if value != getattr(usual, name)}
    return ({} if own else {"code": _function(family.model)}) | ({"features": features} if features else {})


def train_values(train: Train) -> dict[str, Any]:
    """The train section with the effective settings of balancing and optimizer, less those in `_model`."""
    # Keeps the identities of runs made before the key existed.
    unset = {"qk_clip"} if train.qk_clip is None else set()
    values = train.model_dump(mode="json", exclude={"balance_bias_rate", *MUON, *MULTI_TOKEN, *unset})
    if train.optimizer == "muon":  # else the identities of runs made before these keys existed
        values |= {name: getattr(train, name) for name in MUON} | {"muon_dtype": train.newton_schulz_dtype}
        if not train.muon_heads:
            del values["muon_heads"]
    values["balance_coefficient"] = train.expert_loss_coefficient
    step = train.expert_bias_step
    return {**values, "balance_bias_rate": step} if step else values


def _without(names: Set[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _experts(profile: Profile) -> list[Any]:
    """What graphs of expert blocks depend on: placement, capacity, padding, coefficients of their losses."""
    train = profile.train
    factors = [train.expert_loss_coefficient, train.router_z_coefficient, train.expert_bias_step]
    rows = train.global_batch_size * profile.rows_per_sample
    placement = [profile.parallel.expert, train.capacity_factor, rows]
    return [train.balance, *factors, *placement, profile.padding_masks]
