"""Evaluate checkpoints of a finished or running run: held-out loss and language-model tasks, by step.

Each result is cached by its checkpoint, so the flow can be restarted at any time; with `follow` it waits for further checkpoints
until the run has ended. Results go to evaluations.jsonl, TensorBoard, the run's report, and a table in Prefect's UI.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import flow

from flows.final_states import final_states
from flows.hooks import SHOW_FAILURE
from flows.run_setup import flow_context
from flows.runner import THREADS, Runner
from flows.ui.artifacts import show_table
from flows.ui.console import log_waiting
from modeling.training.metrics import OF_TASKS
from profiles import resolve
from profiles.files import run_files, state_files
from profiles.schema import Profile
from profiles.sections.base import required
from tasks import keys
from tasks.evaluation import request, results
from tasks.evaluation.checkpoints import (
    CheckpointEvaluationStep,
    TaskStep,
    metrics_of,
    require_harness,
    require_tasks,
    scratch_name,
)
from tasks.report import update_evaluations
from tasks.reporting.format import format_value
from tasks.step import Step
from tasks.steps.checkpoint import CheckpointStep
from tasks.steps.dataset import DatasetStep
from tasks.steps.reference import ReferenceStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import activities, runs
from tasks.store.artifacts import Artifact
from tasks.store.backends.folder import FolderBackend
from tasks.store.run_folder import CheckpointId
from tasks.store.store import Store, open_store
from tasks.tracking.process import catch_up

log = logging.getLogger(__name__)

POLL_SECONDS = 15.0  # of the run's checkpoints


@dataclass(frozen=True)
class Evaluator:
    """Evaluates checkpoints of one run."""

    runner: Runner
    store: Store
    run: str
    inputs: dict[str, Any]
    tasks: Sequence[str]
    include: Path | None
    limit: int | None
    profile_file: Path | None
    settings: str | None = None  # digest of overridden settings that change the loss; None: the run's
    found: dict[int, dict[str, float]] = field(default_factory=dict)  # results by step

    def evaluate(self, checkpoint: CheckpointId) -> dict[str, float]:
        """Evaluate a checkpoint; returns its metrics, empty if the run has since removed or replaced it."""
        step, run = checkpoint.step, self.store.run_folder(self.run)
        try:
            found = self._evaluate(checkpoint)
        except Exception:
            if CheckpointId.of(run, step) == checkpoint:
                raise
            log.warning(
                "step %s: its checkpoint was removed while it was evaluated (checkpoint.keep); skipped", step
            )
            return {}
        finally:
            self.store.remove_scratch_folder(scratch_name(self.run, checkpoint))
        if CheckpointId.of(run, step) not in (checkpoint, None):
            log.warning("step %s: its checkpoint was replaced while it was evaluated; skipped", step)
            return {}
        self.runner.require_lock()  # or these might be recorded as results of a run that has replaced it
        self.found[step] = found
        of_run = found
        if self.settings is not None:  # tasks evaluate the exported checkpoint, which no override changes
            of_run = {name: value for name, value in found.items() if name.startswith(OF_TASKS)}
        if of_run:
            results.record(self.store, self.run, step, of_run, checkpoint.digest)
        return found

    def rows(self, folder: Path) -> dict[int, dict[str, float]]:
        """Metrics by step: all that the run has, with overridden settings only those of this evaluation."""
        return results.read(folder) if self.settings is None else dict(sorted(self.found.items()))

    def _evaluate(self, checkpoint: CheckpointId) -> dict[str, float]:
        profile = self.runner.context.profile
        base = self._artifact(CheckpointStep) if profile.uses_initial_weights else None
        held_out = CheckpointEvaluationStep(
            self._artifact(DatasetStep),
            " ".join(filter(None, (self.inputs["identity"], checkpoint.digest, self.settings))),
            weights=base,
            reference=self._reference(),
            step=checkpoint.step,
            profile_file=self.profile_file,
        )
        summary = required(self.runner.run(held_out)).summary
        found = {"validation_loss": summary["validation_loss"], **summary["metrics"]}
        tokenizer = self._artifact(TokenizerStep)
        for task in self.tasks:
            made = TaskStep(task, checkpoint, tokenizer, base, self.include, self.limit)
            found |= metrics_of(required(self.runner.run(made)).summary)
        return found

    def _reference(self) -> Artifact | None:
        """Log-probabilities of the reference model, if the main flow has computed them; None otherwise."""
        if not self.runner.context.profile.precomputes_reference:
            return None
        dataset, weights = self._artifact(DatasetStep), self._artifact(CheckpointStep)
        return self.runner.run(ReferenceStep(dataset, weights))

    def _artifact(self, step: type[Step]) -> Artifact:
        return runs.require_artifact(self.store, self.run, step.id(self.inputs[step.kind]))


@flow(name="evaluate", flow_run_name="{run}", task_runner=THREADS, **SHOW_FAILURE)
@final_states
def evaluate(
    run: str,
    tasks: Sequence[str] = (),
    include: str = "",
    limit: int | None = None,
    follow: bool = False,
    overrides: Sequence[str] = (),
    store: str = "./store",
    work_dir: str = "./store",
) -> list[dict[str, float]]:
    """Evaluate a run's checkpoints; returns metrics for each step, including those evaluated earlier.

    If overrides change the held-out loss, it is cached separately and returned, but not recorded as the run's.

    Args:
        run: RUN for all of its complete checkpoints, RUN@STEP for the one of this step.
        tasks: Tasks or groups of lm-evaluation-harness; empty: only the held-out loss.
        include: Folder with your own task files, in addition to those of lm-eval; empty: none.
        limit: Maximum number of examples per task, for a quick estimate.
        follow: Wait for further checkpoints until the run has ended. If one cannot be evaluated, the flow fails after the others.
        overrides: Keys to override for the evaluation, for instance cluster.nodes=1 or evaluate.by_source=true.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
        work_dir: With a store on S3, the local folder of run folders, like cluster.work_dir of a profile.
    """
    name, step = request.split(run)
    require_harness(list(tasks), include)
    opened = open_store(store, work_dir, existing=True)
    folder = runs.fetch(opened, name)
    files = Path(include).absolute() if include else None
    if new := set(tasks) - _evaluated_tasks(folder):
        log_waiting(log, "checking the tasks' names")
        require_tasks(sorted(new), files)
    with activities.begin(opened, "evaluate", name) as lock:
        folder = runs.fetch(opened, name)  # again: it may have been replaced during the wait
        request.require_checkpoint(opened, name, step, follow=follow)
        profile = request.load_profile(folder, overrides)
        changed = request.write_profile(folder, "evaluate", profile) if overrides else None
        inputs = runs.read_inputs(folder)
        settings = _changed_settings(folder, profile, inputs) if overrides else None
        if settings is not None:
            log.info("overrides change the held-out loss: it is not recorded in %s", run_files.EVALUATIONS)
        with Runner(flow_context(profile, opened, folder), lock, keeps_recorded=True) as runner:
            evaluator = Evaluator(runner, opened, name, inputs, tasks, files, limit, changed, settings)
            failures = _evaluate_all(evaluator, folder, step, follow)
        opened.run_folder(name).sync(results.TENSORBOARD).upload()
        if activities.holder(opened, "run", name) is None:  # otherwise its flow and trackers do this
            if opened.is_remote:
                folder = _update_stored_report(opened, name)
            catch_up(folder)
    if failures:
        raise failures[0]
    return [{"step": step, **metrics} for step, metrics in evaluator.rows(folder).items()]


def _evaluate_all(evaluator: Evaluator, folder: Path, step: int | None, follow: bool) -> list[Exception]:
    """Evaluate a run's checkpoints, or the one of a step.

    With `follow`, also further ones, until the run has ended.

    Returns:
        Errors of checkpoints that could not be evaluated; without `follow`, the first one is raised.
    """
    store, name = evaluator.store, evaluator.run
    done: set[CheckpointId] = set()  # a rolled-back run writes a step again
    failures: list[Exception] = []
    while True:
        # Queried before listing checkpoints, so that one completed just before the run ends is not missed.
        active = follow and activities.holder(store, "run", name) is not None
        for each in store.run_folder(name).checkpoint_steps() if step is None else [step]:
            checkpoint = CheckpointId.of(store.run_folder(name), each)
            if checkpoint is None or checkpoint in done:
                continue
            done.add(checkpoint)
            try:
                if evaluator.evaluate(checkpoint):
                    _show(folder, evaluator.rows(folder))
            except Exception as error:
                if not follow:
                    raise
                # Later checkpoints may be removed before another attempt could evaluate them.
                log.warning("step %s: could not be evaluated: %s", each, error)
                failures.append(error)
        if not active:
            return failures
        time.sleep(POLL_SECONDS)


def _update_stored_report(store: Store, name: str) -> Path:
    """Add the results to a run's report in a remote store; returns the run's local folder."""
    folder, run = runs.fetch(store, name), store.run_folder(name)
    if report := run.read(run_files.REPORT_JSON):
        # The one in the store: another machine may have written it since this one downloaded the run.
        FolderBackend(folder).write(run_files.REPORT_JSON, report)
        if update_evaluations(folder):
            for file in (run_files.REPORT_JSON, run_files.REPORT):
                run.write(file, state_files.contents(folder / file))
    return folder


def _changed_settings(folder: Path, profile: Profile, inputs: Mapping[str, Any]) -> str | None:
    """Digest of a profile's settings that affect results; None if they are those of the run."""
    artifacts = [inputs[step.kind] for step in (TokenizerStep, DatasetStep)]
    of_run = resolve.load(str(folder / run_files.PROFILE), (), folder.name)
    there, here = (keys.run_identity(each, *artifacts) for each in (of_run, profile))
    return here if here != there else None


def _evaluated_tasks(folder: Path) -> set[str]:
    """Names of the tasks of which the run has results."""
    names = {name for metrics in results.read(folder).values() for name in metrics}
    return {name.removeprefix(OF_TASKS).split("/")[0] for name in names if name.startswith(OF_TASKS)}


def _show(folder: Path, found: Mapping[int, Mapping[str, float]]) -> None:
    """Show results by step as a table in Prefect's UI, and the run's own in its report if there is one."""
    names = dict.fromkeys(name for metrics in found.values() for name in metrics)
    rows = [
        {
            "step": f"{step:,}",
            **{name: format_value(metrics[name]) if name in metrics else None for name in names},
        }
        for step, metrics in found.items()
    ]
    show_table("evaluations", f"Evaluations of {folder.name} by step", rows)
    update_evaluations(folder)
