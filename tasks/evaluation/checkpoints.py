"""Evaluation of single checkpoints by language-model tasks, also while their run is still training.

The checkpoint is exported to a scratch folder once, and each task runs on the export as a separate job on the profile's cluster.
A result is cached by checkpoint, task, task files and version of lm-eval, so only missing results are computed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from modeling.training.metrics import OF_TASKS
from profiles.arguments import to_arguments
from profiles.errors import ProfileError, install_command
from profiles.files import run_files, state_files
from profiles.files.folders import walk
from profiles.schema import Profile
from tasks import keys
from tasks.evaluation.harness import PACKAGE
from tasks.evaluation.held_out import EvaluationStep
from tasks.failures import FatalError
from tasks.launchers import Job
from tasks.launchers.base import Unavailable
from tasks.reporting.format import format_value
from tasks.step import Context, Step
from tasks.steps.export import write_model
from tasks.steps.jobs import JobOptions, run_json_job
from tasks.store.artifacts import Artifact
from tasks.store.run_folder import CheckpointId

RESULT = "result.json"
COMPLETE = ".complete"  # in the exported model, written last
# Suffixes of files in a task folder that may affect a task's result.
TASK_FILES = (".yaml", ".yml", ".json", ".jsonl", ".py", ".csv", ".txt", ".parquet")


def scratch_name(run: str, checkpoint: CheckpointId) -> str:
    """Name of the store's scratch folder with the export of a run's checkpoint.

    A fork has a copy of the checkpoint with the same digest, and the evaluation of either run removes its own folder.
    """
    return f"evaluate-{keys.digest([run, checkpoint.digest])[:16]}"


@dataclass
class CheckpointEvaluationStep(EvaluationStep):
    """Evaluates a step's checkpoint on the whole validation split; `identity` includes its digest.

    A separate kind, because a run has one final evaluation, and any number of checkpoint evaluations.
    """

    step: int = 0
    profile_file: Path | None = None  # the profile of the evaluation; None: the run's

    kind = "checkpoint-evaluation"
    job_name = "evaluate-checkpoint"

    def title(self, profile: Profile) -> str:
        return f"evaluate {profile.name} at step {self.step}"

    def key(self, context: Context) -> str:
        return keys.evaluation(context.run_folder.name, self.identity, None, context.profile.evaluate)

    def describe(self, summary: Mapping[str, Any]) -> str:
        return f"step {self.step:,}: {super().describe(summary)}"

    def job_options(self, context: Context, key: str) -> JobOptions:
        return {"step": self.step, "profile": self.profile_file}


@dataclass
class TaskStep(Step):
    """Runs a language-model task on a checkpoint. Artifact summary: metrics by task, versions, harness."""

    task: str
    checkpoint: CheckpointId
    tokenizer: Artifact
    weights: Artifact | None = None  # base weights of LoRA
    include: Path | None = None  # folder with task files
    limit: int | None = None

    kind = "task-evaluation"
    name = "task"

    def title(self, profile: Profile) -> str:
        return f"{self.task} on {profile.name} at step {self.checkpoint.step}"

    def key(self, context: Context) -> str:
        files = digest_of_tasks(self.include) if self.include else None
        return keys.task_evaluation(self.checkpoint.digest, self.task, version(PACKAGE), files, self.limit)

    def make(self, context: Context, key: str) -> Artifact:
        """Export the checkpoint, unless an earlier task did, and run the task.

        Raises:
            JobFailed, FatalError, TimeoutError: as `EvaluationStep.make`; a task that lm-eval does not have is fatal.
            Unavailable: the task's data could not be read, and a retry may succeed.
        """
        model = self._export(context)
        output = context.run_folder / run_files.LOGS / f"task-{key[:16]}.json"
        options: dict[str, object] = {"include": self.include, "limit": self.limit}
        options["device"] = "cuda" if context.profile.cluster.device == "cuda" else "cpu"
        secrets = (("HF_TOKEN", context.token),) if context.token else ()
        job = Job(
            name="task",
            program="tasks.evaluation.harness",
            arguments=to_arguments(model=model, task=self.task, output=output, **options),
            folder=context.run_folder / run_files.LOGS,
            threads=context.profile.cluster.threads,
            key=key,
            run=context.run_folder.name,
            secrets=secrets,
        )
        result = run_json_job(context.profile, job, output)
        output.unlink()
        if "rejected" in result:
            raise FatalError(result["rejected"])
        if "unavailable" in result:
            raise Unavailable(result["unavailable"])
        with context.store.artifacts.publish(self.id(key), result) as staging:
            state_files.write(staging / RESULT, json.dumps(result, indent=1))
        return context.store.artifacts.expect(self.id(key))

    def describe(self, summary: Mapping[str, Any]) -> str:
        found = metrics_of(summary)
        shown = [f"{name.removeprefix(OF_TASKS)} {format_value(value)}" for name, value in found.items()]
        metrics = ", ".join(text for text in shown if "_stderr" not in text)
        return f"step {self.checkpoint.step:,}: {metrics}"

    def _export(self, context: Context) -> Path:
        """The checkpoint as a Hugging Face model in a scratch folder."""
        name = scratch_name(context.run_folder.name, self.checkpoint)
        folder = context.store.scratch_folder(name) / "model"
        if not state_files.exists(folder / COMPLETE):
            state_files.remove(folder)
            write_model(
                context, run_files.checkpoint(self.checkpoint.step), self.tokenizer, self.weights, folder
            )
            (folder / COMPLETE).touch()
        return folder


def metrics_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a task's summary by their names in evaluations.jsonl: lm_eval/<task>/<metric>."""
    results = summary["results"]
    return {
        f"{OF_TASKS}{task}/{name}": value for task, found in results.items() for name, value in found.items()
    }


def digest_of_tasks(folder: Path) -> str:
    """Digest of a folder's task files and their data."""
    found = (folder / name for name, _ in walk(folder))
    files = sorted(path for path in found if path.suffix in TASK_FILES and state_files.is_file(path))
    return keys.digest([[str(path.relative_to(folder)), keys.file_digest(path)] for path in files])


def require_harness(tasks: list[str], include: str) -> None:
    """Raise ProfileError if there are tasks but no lm-eval, or the folder `include` does not exist."""
    if tasks and importlib.util.find_spec(PACKAGE) is None:
        reason = f"needs lm-evaluation-harness; install it with: {install_command('lm-eval')}"
        raise ProfileError("task", tasks[0], reason)
    if include and not state_files.is_dir(Path(include)):
        raise ProfileError("include", include, "is not a folder with task files")


def require_tasks(tasks: Iterable[str], include: Path | None) -> None:
    """Raise ProfileError for a task that lm-eval does not have; takes seconds, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, RESULT)
        command = [sys.executable, "-P", "-m", "tasks.evaluation.harness", "--output", str(output)]
        command += [*(f"--task={name}" for name in tasks), *to_arguments(include=include)]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        result = state_files.read_json(output)  # None if lm-eval fails, which its jobs report
    if result and result["unknown"]:
        raise ProfileError("task", *result["unknown"])
