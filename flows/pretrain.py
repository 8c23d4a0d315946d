"""The main flow, from tokenizer, dataset and optional pretrained weights to a Hugging Face model.

                   ┌─> tokenizer ─> dataset ─┐
    plan ─> resolve ─> checkpoint ───────────┼─> train ─> evaluate ─> export ─> report
       └─> graphs ───────────────────────────┘

Each step is a Prefect task. All but plan, resolve and report publish an artifact, and do not run again once it is complete.
Graphs need only the profile, so they compile while the data is tokenized.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.final_states import final_states
from flows.hooks import HOOKS
from flows.parameters import ForkedFrom, LastStep, ProfileName, RunName
from flows.run_setup import TrainingRun, admitted, read_lockfile, resolve_inputs, warn, write_lockfile
from flows.runner import THREADS, Background, Runner
from flows.start_checks import RunCommand, load
from flows.step_names import check_last_step
from modeling.planning.planner import plan
from profiles.schema import Profile
from profiles.sections.base import required
from tasks.evaluation.held_out import EvaluationStep
from tasks.experiments import forecasts
from tasks.fork import copy_checkpoint, hold_checkpoint
from tasks.lineage import find_origin
from tasks.report import ReportStep, read_initial_evaluation
from tasks.reporting.outcome import run_result
from tasks.steps.checkpoint import CheckpointStep
from tasks.steps.dataset import DatasetStep, with_steps
from tasks.steps.export import ExportStep
from tasks.steps.reference import ReferenceStep
from tasks.steps.tokenizer import TokenizerStep, check_fits, check_records
from tasks.steps.training import TrainingStep
from tasks.store import activities, ledger
from tasks.store.artifacts import Artifact
from tasks.store.run_folder import Parent

log = logging.getLogger(__name__)


def run_name() -> str:
    """Name of the flow run in Prefect's UI: the run's name, else its profile's."""
    return flow_run.parameters["name"] or profile_name(flow_run.parameters["profile"])


def profile_name(profile: str) -> str:
    """Name of a profile that is given by name or path."""
    path = Path(profile)
    return path.stem if path.suffix in (".yaml", ".yml") else path.name


@flow(name="pretrain", flow_run_name=run_name, task_runner=THREADS, **HOOKS)
@final_states
def pretrain(
    profile: ProfileName,
    overrides: Sequence[str] = (),
    name: RunName = "",
    store: str = "./store",
    update: bool = False,
    replace: bool = False,
    fork: ForkedFrom = "",
    until: LastStep = "",
) -> dict[str, Any]:
    """Train and export a profile's model; returns the paths of its results and each step's outcome.

    Args:
        profile: A shipped profile, or the path of a YAML file.
        overrides: Keys to override, each as in train.steps=100.
        name: Name of the run and of its folder, runs/NAME, in the store; empty: the profile's.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
        update: Resolve hub revisions and source files again instead of reading them from the run's lockfile.
        replace: If this name belongs to a run with another model, data or training, move it to NAME~N and start over.
        fork: RUN or RUN@STEP: a new run starts from this run's checkpoint, with its optimizer and data position; empty: none.
        until: Step to end with, such as graphs, with those that it needs; the next run continues there; empty: all steps.
    """
    run = load(profile, overrides, name or None)
    check_last_step(run, until)
    command = RunCommand(profile, overrides, name or None, store, fork=fork)
    return train_profile(run, command, update=update, replace=replace, until=until)


def train_profile(
    profile: Profile, command: RunCommand, *, update: bool = False, replace: bool = False, until: str = ""
) -> dict[str, Any]:
    """Train and export one profile within a flow run; result and other arguments as for `pretrain`.

    Args:
        profile: of the run, resolved.
        command: the command line that it was resolved from.
    """
    result: dict[str, Any] = {"run": profile.name, "until": until}
    with admitted(profile, command, until, replace=replace) as (runner, parent):
        training = TrainingRun(runner)
        tokenizer, dataset, converting = _prepare(runner, parent, update)
        run, store = runner.context.profile, runner.context.store
        if run.train.epochs is not None:
            run = with_steps(run, dataset)
            training.plan = plan(run)  # again: the number of steps follows from the data
        warnings = warn(runner, run, tokenizer, dataset, parent)
        weights = converting.result()
        opened = training.open(
            run,
            tokenizer.key,
            dataset.key,
            weights.key if weights else None,
            command,
            parent=parent,
            replace=replace,
            warnings=warnings,
            reports=not until,
        )
        with opened as overview, runner.until_reached():
            # Before training: a run that never ends may be forked.
            origin = find_origin(runner.context, tokenizer, training.identity, parent)
            initial = parent.run if parent else run.init.from_ or ""
            ledger.record(store, run.name, training.identity, dataset, origin, initial)
            if parent:
                copy_checkpoint(store, parent, run.name)
            # A ladder does not locate its target's tokenizer, whose location depends on the machine.
            target = run.model_copy(update={"tokenizer": profile.tokenizer})
            if forecast := forecasts.record(store, target, store.run_folder(run.name)):
                log.info("%s", forecasts.in_words(run.name, forecast))
            evaluated, exported = _train(runner, training, tokenizer, dataset, weights)
            report = required(runner.run(ReportStep(training.plan, evaluated, runner.outcomes)))
            overview.update(now=True)
        if not runner.reached:
            folder, export = runner.context.run_folder, exported.summary["part"]
            before = read_initial_evaluation(folder)
            result = run_result(folder, export, report.location, evaluated.summary, before)
            result["parameters"] = training.plan.parameters
    return {**result, "steps": [asdict(outcome) for outcome in runner.outcomes]}


def _prepare(runner: Runner, parent: Parent | None, update: bool) -> tuple[Artifact, Artifact, Background]:
    """Resolve the inputs; tokenizer and dataset, and the step that converts weights in the background."""
    run, store = runner.context.profile, runner.context.store
    if parent:
        hold_checkpoint(store, parent, run.name)  # the parent may remove it before the data is prepared
    lockfile = None if update else read_lockfile(store, run.name, parent)
    # A fork keeps the weights that its parent's checkpoint was trained from.
    resolve_inputs(runner, lockfile, keep_exports=parent is not None)
    write_lockfile(runner.context)
    tokenizer = required(runner.run(TokenizerStep()))
    # A tokenizer is small: what it lacks is found before weights and data are fetched, in a second attempt too.
    check_fits(run, tokenizer.summary)
    check_records(run, store.artifacts.path(tokenizer))
    converting = runner.start(CheckpointStep())
    dataset = required(runner.run(DatasetStep(tokenizer)))
    return tokenizer, dataset, required(converting)  # None only if the flow has ended before


def _train(
    runner: Runner, training: TrainingRun, tokenizer: Artifact, dataset: Artifact, weights: Artifact | None
) -> tuple[Artifact, Artifact]:
    """Train in the open run folder, evaluate and export; returns the evaluation and the export."""
    identity, graphs = training.identity, training.graphs()
    context, reference = runner.context, None
    if context.profile.precomputes_reference:  # other runs should not list a skipped step
        assert weights is not None  # DPO starts from a model
        reference = runner.run(ReferenceStep(dataset, weights, graphs))
    training.train(TrainingStep(dataset, identity, graphs, weights, reference))
    evaluated = required(runner.run(EvaluationStep(dataset, identity, graphs, weights, reference)))
    with activities.begin(context.store, "exporting", context.profile.name):
        return evaluated, required(runner.run(ExportStep(tokenizer, identity, weights)))


finetune = pretrain.with_options(name="finetune")  # the same steps, listed separately in Prefect's UI
