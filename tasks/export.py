"""Export step: the run's latest checkpoint as a Hugging Face folder, `<run>/export/`, with the tokenizer's files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks import keys
from tasks.reporting.format import format_bytes
from tasks.resolve import EXPORT
from tasks.step import Context, Step
from tasks.store import run_artifacts
from tasks.store.artifacts import Artifact
from tasks.store.manifest import NAME as MANIFEST

ADAPTER = "adapter"  # folder of the export


@dataclass
class ExportStep(Step):
    """Writes the weights in the training precision, config.json and the tokenizer; the folder appears complete.

    Of a LoRA run, the weights are merged, and `adapter/` has the adapters in PEFT's format.

    The artifact points into the run folder. Its summary: part (of the run folder), bytes.
    """

    tokenizer: Artifact
    identity: str  # of the run; of its mathematics at the exported step
    weights: Artifact | None = None  # that LoRA updates

    kind = "export"
    name = "export"

    def key(self, context: Context) -> str:
        return keys.export(context.run_folder.name, self.identity, context.profile.train)

    def find(self, context: Context, key: str) -> Artifact | None:
        return run_artifacts.find(context.store, self.kind, key, context.run_folder.name)

    def make(self, context: Context, key: str) -> Artifact:
        from modeling.conversion.convert import Options, convert
        from modeling.conversion.journal import RECORD
        from modeling.conversion.lora import TrainedAdapters

        store, folder = context.store, context.run_folder
        partial, final = folder / f"{EXPORT}.partial", folder / EXPORT
        run = store.run_folder(folder.name)
        checkpoint = f"checkpoints/step_{run.checkpoint_steps()[-1]}"
        local = run.download(checkpoint)
        if self.weights and context.profile.lora.rank:
            base = store.artifacts.path(self.weights)
            convert(base, partial, Options("hf", adapters=local), replace=True)
            TrainedAdapters(local).write(partial / ADAPTER)
        else:
            convert(local, partial, Options("hf"), replace=True)
        if run.is_remote(checkpoint):
            shutil.rmtree(local.parent)  # downloaded copies
        for file in store.artifacts.path(self.tokenizer).iterdir():
            if file.name != MANIFEST:
                shutil.copy2(file, partial / file.name)
        (partial / RECORD).unlink()
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
        return run_artifacts.publish(store, self.kind, key, folder.name, EXPORT, {"bytes": size})

    def describe(self, summary: Mapping[str, Any]) -> str:
        return format_bytes(summary["bytes"])
