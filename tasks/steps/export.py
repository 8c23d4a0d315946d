"""Export step: a checkpoint of the run and its tokenizer as a Hugging Face folder, `<run>/export/`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.files import run_files, state_files
from profiles.files.folders import walk
from profiles.huggingface.config import GENERATION_CONFIG
from profiles.schema import Profile
from tasks import keys
from tasks.failures import FatalError
from tasks.inputs import EXPORT
from tasks.reporting.format import format_bytes
from tasks.step import Context, Step
from tasks.steps import inference_files
from tasks.steps.dataset import DatasetStep
from tasks.store import run_artifacts
from tasks.store.artifacts import Artifact
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.run_folder import CheckpointId
from tasks.store.runs import read_inputs
from tasks.store.store import Store
from tasks.tokenization.chat_templates import read_template
from tasks.tokenization.tokenizer_files import check_loads, load, special_token_id, typed_tokens

ADAPTER = "adapter"  # folder of the export


@dataclass
class ExportStep(Step):
    """Writes a folder, complete or not at all, in place of an earlier export.

    It has the weights in the training precision, config.json, generation_config.json and the tokenizer; after fine-tuning, the
    chat template that was trained on too.

    A LoRA run exports merged weights, and its adapters in PEFT's format in `adapter/`.

    The artifact points into the run folder. Its summary: part (of the run folder), bytes.
    """

    tokenizer: Artifact
    identity: str  # of the run; of its mathematics at the exported step
    weights: Artifact | None = None  # the initial ones
    checkpoint: CheckpointId | None = None  # None: that of the run's last step
    generation_config: Mapping[str, Any] | None = (
        None  # of the model that the run started from; None: that of `weights`
    )

    kind = "export"
    name = "export"

    def key(self, context: Context) -> str:
        changed = context.profile.objective.traits.reads_records or self.weights is not None
        # Recipe 1 had neither the chat template nor the generation config of the initial weights.
        recipe = {"recipe": 2} if changed else {}
        return keys.export(context.run_folder.name, self.identity, context.profile.train, **recipe)

    def find(self, context: Context, key: str) -> Artifact | None:
        return run_artifacts.find(context.store, self.id(key), context.run_folder.name)

    def make(self, context: Context, key: str) -> Artifact:
        """Export the checkpoint. Raises FatalError if the run has removed or replaced it."""
        store, folder = context.store, context.run_folder
        run = store.run_folder(folder.name)
        partial, final = folder / f"{EXPORT}.partial", folder / EXPORT
        step = self.checkpoint.step if self.checkpoint else context.profile.train.steps
        if step not in run.checkpoint_steps():
            raise FatalError(f"run {run.name}: the checkpoint of step {step} was removed; export again")
        given = {} if self.generation_config is None else {"generation_config": self.generation_config}
        write_model(context, run_files.checkpoint(step), self.tokenizer, self.weights, partial, **given)
        if self.checkpoint and self.checkpoint.of(run, step) not in (self.checkpoint, None):
            reason = f"the checkpoint of step {step} was replaced during the export"
            raise FatalError(f"run {run.name}: {reason}; export again")
        state_files.remove(final)
        partial.rename(final)
        size = sum(entry.stat().st_size for _, entry in walk(final))
        return run_artifacts.publish(store, self.id(key), folder.name, EXPORT, {"bytes": size})

    def describe(self, summary: Mapping[str, Any]) -> str:
        return format_bytes(summary["bytes"])


def write_model(
    context: Context,
    checkpoint: str,
    tokenizer: Artifact,
    weights: Artifact | None,
    folder: Path,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint (path in the run folder) as a Hugging Face model with the tokenizer's files.

    Args:
        weights: the initial ones; LoRA updates them.
        generation_config: of the model that the run started from; None: that of `weights`.
    """
    from modeling.conversion.adapters import peft
    from modeling.conversion.adapters.peft_experts import missing_format
    from modeling.conversion.adapters.trained import TrainedAdapters
    from modeling.conversion.convert import Options, convert
    from modeling.conversion.journal import RECORD

    store, run = context.store, context.store.run_folder(context.run_folder.name)
    with run.local_checkpoint(checkpoint) as local:
        if weights and context.profile.lora.rank:
            base = store.artifacts.path(weights)
            convert(base, folder, Options("hf", adapters=local), replace=True)
            if reason := missing_format(context.profile.model, context.profile.lora.targets):
                context.progress(f"no {ADAPTER}: {reason}; the model has the updates merged", None)
            else:
                peft.write(TrainedAdapters(local), folder / ADAPTER)
        else:
            convert(local, folder, Options("hf"), replace=True)
    dataset = read_inputs(context.run_folder)["dataset"]
    given = inference_files.of_weights(weights) if generation_config is None else generation_config
    copy_tokenizer(store, tokenizer, folder, context.profile, dataset, given)
    (folder / RECORD).unlink()


def copy_tokenizer(
    store: Store,
    tokenizer: Artifact,
    folder: Path,
    profile: Profile | None = None,
    dataset: str | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Copy a tokenizer's files into the folder of a model, and write the configs that generation needs.

    Args:
        profile: of the run; None: it was not fine-tuned.
        dataset: key of the run's dataset, which knows the chat template that it was made with.
        generation_config: of the model that the run started from; what training does not change is kept.

    Raises:
        FatalError: `AutoTokenizer` cannot load the tokenizer.
    """
    source = store.artifacts.path(tokenizer)
    for file in source.iterdir():
        if file.name != MANIFEST:
            (folder / file.name).write_bytes(state_files.contents(file))
    loaded, stops = load(source), []
    if profile is not None and profile.objective.traits.reads_records:
        stops = inference_files.install_template(folder, _trained_template(store, profile, dataset), loaded)
    ids, config = inference_files.configs(source, loaded, generation_config or {}, stops)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(state_files.contents(path)), **ids}, indent=1))
    if stops and config["pad_token_id"] is None:
        # Not in config.json, where it would stop the embedding of the token from training.
        config["pad_token_id"] = special_token_id(folder, loaded, "pad_token")
    (folder / GENERATION_CONFIG).write_text(json.dumps(config, indent=1))
    try:
        path = folder / "tokenizer_config.json"
        path.write_text(
            json.dumps(typed_tokens(json.loads(state_files.contents(path))), indent=2, ensure_ascii=False)
        )
        check_loads(folder)
    except ValueError as error:
        reason = f"the tokenizer {tokenizer.summary.get('source', tokenizer.key)} cannot be exported: {error}"
        raise FatalError(f"{reason}; correct the files of tokenizer.source") from error


def _trained_template(store: Store, profile: Profile, dataset: str | None) -> str | None:
    """Source of the chat template that records were rendered with; None: the tokenizer's own."""
    found = store.artifacts.find(DatasetStep.id(dataset), hash_limit=0) if dataset else None
    if found is not None and "template" in found.summary:
        recorded: str | None = found.summary["template"]
        return recorded
    template = profile.objective.template
    return template and read_template(template)
