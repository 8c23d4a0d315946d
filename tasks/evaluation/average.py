"""Averages of checkpoints of one or several runs: mean weights, their held-out loss and export.

Averaging the last checkpoints of a constant learning rate gives part of the gain of a decay (LAWA, arXiv 2209.14981); averaging
branches gives part of the gain of an ensemble (model soups, arXiv 2203.05482).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modeling.conversion.convert import Options, convert
from modeling.conversion.journal import RECORD
from profiles.errors import ProfileError, counted
from profiles.files import run_files
from profiles.schema import Profile
from tasks import keys
from tasks.evaluation.held_out import EvaluationStep
from tasks.step import Context
from tasks.steps import inference_files
from tasks.steps.checkpoint import CheckpointStep
from tasks.steps.export import copy_tokenizer
from tasks.steps.jobs import JobOptions
from tasks.store.artifacts import Artifact
from tasks.store.run_folder import CheckpointId
from tasks.store.runs import read_inputs
from tasks.store.store import Store

MODEL = "model"  # folder of the artifact: the mean as a Hugging Face model


def identity_of(store: Store, members: list[tuple[str, int]]) -> str:
    """Digest of the checkpoints (run, step) of an average. Raises ProfileError for an incomplete one."""
    found = []
    for run, step in members:
        checkpoint = CheckpointId.of(store.run_folder(run), step)
        if checkpoint is None:
            raise ProfileError("average", f"{run}@{step}", "is not a complete checkpoint")
        found.append(checkpoint.digest)
    return keys.digest(found)


@dataclass
class AverageStep(EvaluationStep):
    """Averages checkpoints, evaluates the mean on the whole validation split, and exports it.

    `identity` is that of the checkpoints (`identity_of`). The artifact's summary: that of an evaluation, and members.
    """

    tokenizer: Artifact = field(kw_only=True)
    members: tuple[tuple[str, int], ...] = ()  # run and step of each
    label: str = ""  # name of the average
    checkpoints: list[Path] = field(default_factory=list, init=False)  # the members on this machine

    kind = "average"
    name = "average"
    job_name = "evaluate-average"

    def title(self, profile: Profile) -> str:
        return f"average {self.label}"

    def key(self, context: Context) -> str:
        return keys.average(self.identity, self.dataset.key, context.profile.evaluate)

    def make(self, context: Context, key: str) -> Artifact:
        """Raises as EvaluationStep, and ValueError: the checkpoints are not of one model, or corrupted."""
        store, scratch = context.store, f"average-{key[:16]}"
        runs = [store.run_folder(run) for run, _ in self.members]
        parts = [run_files.checkpoint(step) for _, step in self.members]
        with ExitStack() as stack:
            self.checkpoints = [
                stack.enter_context(run.local_checkpoint(part)) for run, part in zip(runs, parts, strict=True)
            ]
            stack.callback(store.remove_scratch_folder, scratch)
            self._convert("trainshed", store.scratch_folder(scratch) / "step_0")
            return super().make(context, key)

    def job_options(self, context: Context, key: str) -> JobOptions:
        return {"checkpoints": context.store.scratch_folder(f"average-{key[:16]}")}

    def extend_artifact(self, context: Context, staging: Path, summary: dict[str, Any]) -> None:
        self._convert("hf", staging / MODEL)
        (staging / MODEL / RECORD).unlink()
        store, profile = context.store, context.profile
        initial = read_inputs(context.run_folder).get("checkpoint")
        weights = store.artifacts.find(CheckpointStep.id(initial), hash_limit=0) if initial else None
        given = inference_files.of_weights(weights)
        copy_tokenizer(store, self.tokenizer, staging / MODEL, profile, self.dataset.key, given)
        summary["members"] = [f"{run}@{step}" for run, step in self.members]

    def _convert(self, to: str, folder: Path) -> None:
        first, *others = self.checkpoints
        convert(first, folder, Options(to, average=tuple(others)), replace=True)

    def describe(self, summary: Mapping[str, Any]) -> str:
        return f"{counted(len(summary['members']), 'checkpoint')}, {super().describe(summary)}"
