"""Continual pretraining: train a finished model further on new data; promote it only if no worse.

    new data -> graphs -> evaluate before -> train -> evaluate after -> export if no worse -> report -> promote

Starts from the weights of the latest checkpoint with a new optimizer, so the learning rate warms up and decays again (arXiv
2403.08763). The model is promoted only once its run folder is complete, in a remote store too. Meant for a schedule: without
new data the flow run ends at once, in a state named after the reason.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.alerts.events import emit
from flows.final_states import final_states
from flows.hooks import HOOKS
from flows.parameters import ProfileName, RunName
from flows.pretrain import run_name
from flows.run_setup import (
    check_plan,
    flow_context,
    open_run,
    read_lockfile,
    resolve_inputs,
    settle_compilation,
    with_training_progress,
)
from flows.runner import THREADS, Runner
from flows.start_checks import load
from modeling import run_files
from profiles import resolve, state_files
from profiles.errors import ProfileError
from profiles.huggingface.config import GENERATION_CONFIG
from profiles.schema import Profile
from tasks import keys
from tasks.continual import generated, replay, series, stand_in
from tasks.continual.data import new_data
from tasks.continual.restore import restore
from tasks.continual.schedule import with_shortened_schedule
from tasks.evaluation.held_out import EvaluationStep, NotFinite
from tasks.inputs import EXPORT, locate_runs
from tasks.launchers import Job
from tasks.report import ReportStep
from tasks.reporting.outcome import Outcome
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.export import ExportStep
from tasks.steps.graphs import GraphsStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.steps.training import TrainingStep
from tasks.store import activities, ledger, runs
from tasks.store.artifacts import Artifact
from tasks.store.locks import Lock
from tasks.store.store import Store, open_store

# Keys of `train` that fit a cluster: the promoted model is evaluated with those of the round.
PER_CLUSTER = {*keys.NOT_MATHEMATICS, "global_batch_size"}
log = logging.getLogger(__name__)


@flow(name="continual", flow_run_name=run_name, task_runner=THREADS, **HOOKS)
@final_states
def continual(
    profile: ProfileName, overrides: Sequence[str] = (), name: RunName = "", store: str = "./store"
) -> State[Any]:
    """Train a run's latest model further on new data, and promote the result if it is no worse.

    Args:
        profile: A shipped profile's name, or the path of a YAML file.
        overrides: Keys to override, each as in train.steps=100.
        name: Name of the pretraining run to continue; empty: the profile's.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
    """
    run = load(profile, overrides, name or None)
    if run.fine_tunes:
        reason = "continual pretraining supports objective.kind pretrain without LoRA only"
        raise ProfileError("profile", profile, reason)
    opened = open_store(store, run.cluster.work_dir or "store")
    run = locate_runs(run, opened)
    # If scheduled flow runs overlap, the later one waits for the lock, and then finds no new data.
    with activities.begin(opened, "continual", run.name), ExitStack() as stack:
        current = series.promoted_model(opened, run.name)
        if current is None:
            missing = f"run {run.name} has no finished model to continue; train it to its last step and export it first"
            return Completed(name="NoFinishedRun", message=missing)
        if current.run != run.name:  # or it might be replaced while its checkpoint is read
            stack.enter_context(activities.begin(opened, "continual", current.run))
        return _attempts(flow_context(run, opened), current)


def _attempts(context: Context, current: series.Promoted) -> State[Any]:
    """A round, trained again with more replay while it is rejected for forgetting."""
    stand_in.warn_if_unknown(context)
    state, tried = _round(context, current), 0.0
    while state.name == "NotPromoted":
        recorded = series.recorded_inputs(context.store, _name(context, current))
        tried = max(tried, _recorded_share(context.store, recorded))
        larger = [share for share in context.profile.continual.shares if share > tried]
        if not larger:
            break
        log.info("%s; training the round again with continual.replay %g", state.message, larger[0])
        state, tried = _round(context, current, larger[0]), larger[0]
    return state


def _recorded_share(store: Store, recorded: Mapping[str, str] | None) -> float:
    """Share of replayed samples of a round that began to train; 0 if its dataset is gone."""
    dataset = recorded and store.artifacts.find(DatasetStep.kind, recorded["dataset"])
    return replay.share_of(store, dataset) if dataset else 0.0


def _name(context: Context, current: series.Promoted) -> str:
    return f"{context.profile.name}-round-{current.round + 1}"


def _round(context: Context, current: series.Promoted, share: float | None = None) -> State[Any]:
    """One round: train the promoted model on new data, and promote the result if it is no worse."""
    profile, store = context.profile, context.store
    tokenizer = store.artifacts.expect(TokenizerStep.kind, current.tokenizer)
    name = _name(context, current)
    # An interrupted round resumes with its data. One that was evaluated and not promoted, or whose weights are not those of the
    # promoted model any more, looks for new data.
    recorded = series.recorded_inputs(store, name)
    over = series.was_not_promoted(store, name) or _is_outdated(store, name, current, recorded)
    with activities.begin(store, "run", name) as lock, Runner(context, lock) as runner:
        resolve_inputs(runner, None if over else read_lockfile(store, name))
        everything = runner.run(DatasetStep(tokenizer))
        begun = store.artifacts.find(DatasetStep.kind, recorded["dataset"]) if recorded and not over else None
        # Weights of sources that were changed since are those of the next round.
        new = begun or new_data(store, current, everything, profile.train.sequence_length)
        if new is None:
            return Completed(name="NoNewData", message=f"{current.run} was trained on all of the data")
        if share is None:
            share = _first_share(runner, current, tokenizer, new, recorded, is_resumed=begun is not None)
        run = with_shortened_schedule(profile, new, share).model_copy(update={"name": name})
        dataset = begun or _with_replay(runner, current, tokenizer, new, run, share)
        runner.record_use(dataset)
        runner.context = replace(runner.context, profile=run)
        result = _train(runner, current, tokenizer, dataset, lock, start_over=over)
        lock.check()  # otherwise another process may have promoted later rounds while this one was suspended
        losses = f"held-out loss {result.before:.4f} before, {result.after:.4f} after"
        if not result.better:
            series.record_not_promoted(store, name)
            return Completed(name="NotPromoted", message=f"{current.run} remains promoted: {losses}")
        series.promote(store, profile.name, current, name, result.identity)
        message = f"{name} replaces {current.run}: {losses}"
        emit("promoted", name, message)
        return Completed(name="Promoted", message=message)


def _first_share(
    runner: Runner,
    current: series.Promoted,
    tokenizer: Artifact,
    new: Artifact,
    recorded: Mapping[str, str] | None,
    *,
    is_resumed: bool,
) -> float:
    """Share that the round begins with: that of the recorded attempt if nothing else has changed, else the smallest."""
    first, used = runner.context.profile.continual.shares[0], _recorded_share(runner.context.store, recorded)
    if is_resumed or recorded is None or used <= first:
        return used if is_resumed else first
    run = with_shortened_schedule(runner.context.profile, new, used)
    dataset = _with_replay(runner, current, tokenizer, new, run, used)
    identity = keys.run_identity(run, tokenizer.key, dataset.key, recorded["checkpoint"])
    return used if identity == recorded["identity"] else first


def _with_replay(
    runner: Runner, current: series.Promoted, tokenizer: Artifact, new: Artifact, run: Profile, share: float
) -> Artifact:
    """The round's dataset: new data, and a share of samples from the promoted model's history."""
    if not share:
        return new
    context, train = runner.context, run.train
    samples = train.steps * train.global_batch_size
    if run.continual.replay_from == "generated":
        known = _generate(runner, current, new, run, math.ceil(share * samples))
        return replay.with_replay(context.store, new, known, share, samples, lambda drawn: None)
    known = replay.history(context.store, current, new, train.sequence_length)
    if (standing := stand_in.make(context, tokenizer)) is not None:
        runner.record_use(standing)
        known = known + stand_in.history(context.store, standing, train.sequence_length)
    return replay.with_replay(context.store, new, known, share, samples, partial(restore, context, tokenizer))


def _generate(
    runner: Runner, current: series.Promoted, new: Artifact, run: Profile, windows: int
) -> replay.History:
    """Text sampled from the promoted model on the round's cluster, for a number of replayed windows."""
    store, settings, length = runner.context.store, run.continual, run.train.sequence_length
    base = runs.fetch(store, current.run)
    profile = _on_cluster_of(run, resolve.load(str(base / run_files.PROFILE)))
    text = resolve.dump(profile)
    file = base / run_files.LOGS / f"generate-{keys.digest(text)[:8]}.yaml"
    file.parent.mkdir(exist_ok=True)
    state_files.write(file, text)
    model = keys.digest([current.identity, series.latest_step(store, current)])
    context = replace(runner.context, profile=profile, folder=base)
    rows = generated.row_count(windows, length, settings.generated_tokens)
    made = [
        runner.run(generated.GenerationStep(model, new, first, count, file), context)
        for first, count in generated.shards(rows)
    ]
    return generated.history(model, made, length)


def _tolerance(run: Profile) -> float:
    """How much the held-out loss of old text may rise."""
    limits = (gate.rise_at_most for gate in run.continual.gates if gate.on == "old")
    return next((limit for limit in limits if limit is not None), math.inf)


def _start(current: series.Promoted, checkpoint: str) -> str:
    """Digest of what a round starts from: the promoted run, and the name of its checkpoint."""
    return keys.digest([current.identity, checkpoint])


def _is_outdated(
    store: Store, name: str, current: series.Promoted, recorded: Mapping[str, str] | None
) -> bool:
    """Whether a round started from other weights: its base run was replaced or trained further."""
    start = recorded and recorded["checkpoint"]  # None in a round of an earlier version
    latest = Path(run_files.checkpoint(series.latest_step(store, current))).name
    if not start or start == _start(current, latest):
        return False
    log.warning("%s started from other weights than the latest ones of %s: it starts over", name, current.run)
    return True


@dataclass
class _PromotedEvaluationStep(EvaluationStep):
    """Evaluates the promoted model with the profile in a file, not that of its run folder."""

    profile_file: Path = Path()

    def adapt_job(self, job: Job, context: Context, key: str) -> Job:
        return job.with_arguments("--profile", str(self.profile_file))


class _Result(NamedTuple):
    """A trained round and its losses on the promoted model's held-out data."""

    identity: str
    before: float
    after: float
    tolerance: float

    @property
    def better(self) -> bool:
        """Whether its model replaces the promoted one; never for a loss that is not a number."""
        return self.after <= self.before + self.tolerance


def _train(
    runner: Runner,
    current: series.Promoted,
    tokenizer: Artifact,
    dataset: Artifact,
    lock: Lock,
    *,
    start_over: bool,
) -> _Result:
    """Train the promoted model on new data, evaluate before and after, and export a better result."""
    context, store = runner.context, runner.context.store
    run, base = context.profile, runs.fetch(store, current.run)
    with series.latest_checkpoint(store, current) as weights:
        planned = check_plan(runner)
        compiling = runner.start(GraphsStep())
        start = _start(current, weights.name)
        identity = keys.run_identity(run, tokenizer.key, dataset.key, start)
        runs.record_flow_run(base, context.flow_run)
        inputs = {"tokenizer": tokenizer.key, "dataset": dataset.key, "checkpoint": start}
        lock.check()  # another process may have taken over the round while this one was suspended
        with open_run(runner, run, identity, inputs, planned, replace=start_over) as overview:
            ledger.record(store, run.name, identity, dataset, parent=current.identity)
            held_out = store.artifacts.expect(DatasetStep.kind, current.dataset)
            before = _evaluate_promoted(runner, base, held_out, current, weights.name)
            graphs = compiling.result()
            settle_compilation(runner, graphs)
            training = TrainingStep(dataset, identity, graphs, weights)
            runner.run(training, with_training_progress(runner.context))
            what = keys.digest([identity, held_out.key])
            try:
                evaluated = runner.run(EvaluationStep(held_out, what, graphs))
            except NotFinite:
                series.record_not_promoted(store, run.name)
                raise
            after = evaluated.summary["validation_loss"]
            result = _Result(identity, before, after, _tolerance(run))
            if result.better:
                with activities.begin(store, "exporting", run.name):
                    given = state_files.read_json(base / EXPORT / GENERATION_CONFIG)
                    runner.run(ExportStep(tokenizer, identity, generation_config=given or {}))
            runner.run(ReportStep(planned, evaluated, _with_new_data(runner.outcomes, tokenizer, dataset)))
            overview.update(now=True)
        return result


def _evaluate_promoted(
    runner: Runner, base: Path, held_out: Artifact, current: series.Promoted, checkpoint: str
) -> float:
    """Held-out loss of the promoted model, in the run folder `base`, on the round's cluster."""
    profile = _on_cluster_of(runner.context.profile, resolve.load(str(base / run_files.PROFILE)))
    text = resolve.dump(profile)
    # Named by its contents: the job of an earlier round may still load its own.
    file = base / run_files.LOGS / f"evaluate-{keys.digest(text)[:8]}.yaml"
    file.parent.mkdir(exist_ok=True)
    state_files.write(file, text)
    what = keys.digest([current.identity, checkpoint, held_out.key])
    step = _PromotedEvaluationStep(held_out, what, profile_file=file)
    return runner.run(step, replace(runner.context, profile=profile, folder=base)).summary["validation_loss"]


def _on_cluster_of(run: Profile, promoted: Profile) -> Profile:
    """The promoted model's profile, with the round's cluster, topology and batch.

    Raises ProfileError if they do not fit its other settings.
    """
    train = promoted.train.model_copy(update={name: getattr(run.train, name) for name in PER_CLUSTER})
    sections = {name: getattr(run, name) for name in ("cluster", "parallel", "compile")}
    profile = promoted.model_copy(update={**sections, "train": train})
    resolve.check(profile)
    return profile


def _with_new_data(outcomes: Sequence[Outcome], tokenizer: Artifact, dataset: Artifact) -> list[Outcome]:
    """The outcomes, with the data that the round trains on in place of all data of the series."""
    step = DatasetStep(tokenizer)
    new = {"note": step.describe(dataset.summary), "summary": dataset.summary}
    return [replace(outcome, **new) if outcome.step == step.name else outcome for outcome in outcomes]
