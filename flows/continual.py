"""Continual pretraining: train a finished model further on new data; promote it if it meets the gates.

    new data -> graphs -> evaluate before -> train -> evaluate after -> export if gates are met -> report -> promote

Starts from the weights of the latest checkpoint with a new optimizer, so the learning rate warms up and decays again (arXiv
2403.08763), or continues a trunk of constant rate, of which each round is a branch that decays (`continual.schedule`). The model
is promoted only once its run folder is complete, in a remote store too. Meant for a schedule: without new data the flow run ends
at once, in a state named after the reason.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.alerts.events import emit
from flows.final_states import final_states
from flows.hooks import HOOKS
from flows.parameters import ProfileName, RunName
from flows.pretrain import run_name
from flows.run_setup import TrainingRun, flow_context, read_lockfile, resolve_inputs
from flows.runner import THREADS, Runner
from flows.start_checks import load
from flows.verdicts import Judge, check_gates, missing_held_out, on_cluster_of, show_series
from profiles.files import run_files, state_files
from profiles.huggingface.config import GENERATION_CONFIG
from profiles.rules.continual import check_round, check_same_training, stand_in_data
from profiles.schema import Profile
from profiles.sections.base import required
from tasks import keys
from tasks.continual import generated, held_out, replay, rounds, schedule, series, stand_in
from tasks.continual.data import new_data
from tasks.continual.gates import Verdict
from tasks.continual.restore import restore, restore_held_out
from tasks.inputs import EXPORT, locate_runs
from tasks.report import ReportStep
from tasks.reporting.outcome import Outcome
from tasks.step import Context
from tasks.steps.dataset import DatasetStep, read_file
from tasks.steps.export import ExportStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.steps.training import TrainingStep
from tasks.store import activities, ledger, runs
from tasks.store.artifacts import Artifact
from tasks.store.store import Store, open_store

log = logging.getLogger(__name__)


@flow(name="continual", flow_run_name=run_name, task_runner=THREADS, **HOOKS)
@final_states
def continual(
    profile: ProfileName, overrides: Sequence[str] = (), name: RunName = "", store: str = "./store"
) -> State[Any]:
    """Train a run's latest model further on new data, and promote the result if it meets the gates.

    Args:
        profile: A shipped profile's name, or the path of a YAML file.
        overrides: Keys to override, each as in train.steps=100.
        name: Name of the pretraining run to continue; empty: the profile's.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
    """
    run = load(profile, overrides, name or None)
    check_round(run)
    opened = open_store(store, run.cluster.work_dir or "store")
    run = locate_runs(run, opened, required=False)
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
    stand_in.warn_if_unknown(context, current)
    promoted = runs.load_profile(runs.fetch(context.store, current.run))
    check_same_training(context.profile, promoted)
    schedule.check_trunk(context.profile, promoted)
    check_gates(context.store, context.profile, current)
    state, tried = _round(context, current), 0.0
    while state.name == "NotPromoted" and rounds.forgot(context.store, _name(context, current)):
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
    dataset = recorded and store.artifacts.find(DatasetStep.id(recorded["dataset"]))
    return replay.share_of(store, dataset) if dataset else 0.0


def _name(context: Context, current: series.Promoted) -> str:
    return f"{context.profile.name}-{held_out.round_origin(current.next_round)}"


def _round(context: Context, current: series.Promoted, share: float | None = None) -> State[Any]:
    """One round: train the promoted model on new data, and promote the result if it meets the gates."""
    profile, store = context.profile, context.store
    tokenizer = store.artifacts.expect(TokenizerStep.id(current.tokenizer))
    name, origin = _name(context, current), held_out.round_origin(current.next_round)
    # An interrupted round resumes with its data. One that was evaluated and not promoted, or whose weights are not those of the
    # promoted model any more, looks for new data.
    recorded = series.recorded_inputs(store, name)
    over = series.was_not_promoted(store, name) or _is_outdated(context, name, current, recorded)
    with activities.begin(store, "run", name) as lock, Runner(context, lock) as runner:
        resolve_inputs(runner, None if over else read_lockfile(store, name), data_only=True)
        everything = required(runner.run(DatasetStep(tokenizer)))
        old = old_sets(runner.context, current, tokenizer)
        restore_held_out(runner.context, tokenizer, current.identity, old.entries)
        begun = store.artifacts.find(DatasetStep.id(recorded["dataset"])) if recorded and not over else None
        # Weights of sources that were changed since are those of the next round.
        by_hash = held_out.held_out_by_hash(profile.data)
        records = profile if profile.objective.traits.reads_records else None
        length = profile.train.sequence_length
        new = begun or new_data(store, current, everything, length, old, by_hash, records)
        if new is None:
            return Completed(name="NoNewData", message=f"{current.run} was trained on all of the data")
        if begun is None:
            contents = read_file(store, new)
            if reason := missing_held_out(profile, contents, origin):
                return Completed(name="NoNewData", message=f"{reason}; a later round trains on it with more")
            held_out.check_disjoint(store, contents, new_by_hash=len(by_hash) == len(profile.data.sources))
        if share is None:
            share = _first_share(runner, current, tokenizer, new, recorded, is_resumed=begun is not None)
        run = schedule.of_round(profile, new, share).model_copy(update={"name": name})
        dataset = begun or _with_replay(runner, current, tokenizer, new, run, share)
        # The line of the dataset step is on all data of the series.
        describes = DatasetStep(tokenizer).describe(dataset.summary)
        log.info("%s trains on new data, with the held-out text of all rounds: %s", name, describes)
        frozen = series.frozen_weights(store, profile)
        for used in filter(None, (dataset, frozen)):
            runner.record_use(used)
        runner.context = replace(runner.context, profile=run)
        judge = Judge(runner, current, tokenizer, dataset, origin, frozen)
        identity, verdict = _train(judge, start_over=over)
        runner.require_lock()  # otherwise another process may have promoted later rounds while this one was suspended
        if verdict.promotes:
            steps, batch = run.train.last_step, run.train.global_batch_size
            read = replay.samples_read(store.run_folder(name), steps, batch)
            ledger.record_samples(store, identity, read)
            series.promote(store, profile.name, current, name, identity, dataset)
            state, message = "Promoted", f"{name} replaces {current.run}"
        else:
            state, message = "NotPromoted", f"{current.run} remains promoted: {verdict.reason}"
        show_series(store, profile.name)
        message = f"{message}\n\n{verdict.text}"
        alert = keys.digest([identity, message])
        # Otherwise an earlier flow run judged this model.
        if verdict.promotes or alert != series.last_alert(store, name):
            emit("promoted" if verdict.promotes else "not-promoted", name, message)
        if not verdict.promotes:
            series.record_not_promoted(store, name, alert)
        return Completed(name=state, message=message)


def old_sets(context: Context, current: series.Promoted, tokenizer: Artifact) -> held_out.HeldOut:
    """The held-out sets of the promoted model and its ancestors, and of new stand-in sources."""
    sets = series.held_out_sets(context.store, context.profile.name, current)
    made = None if sets.tokens(held_out.STAND_IN) else stand_in.make(context, tokenizer)
    if made is None:
        return sets
    by_hash = held_out.held_out_by_hash(stand_in_data(context.profile))
    contents = read_file(context.store, made)
    return sets + held_out.HeldOut.from_sources(held_out.STAND_IN, contents, by_hash)


def _first_share(
    runner: Runner,
    current: series.Promoted,
    tokenizer: Artifact,
    new: Artifact,
    recorded: Mapping[str, str] | None,
    *,
    is_resumed: bool,
) -> float:
    """Share that the round begins with: the recorded attempt's if nothing else changed, else the smallest."""
    first, used = runner.context.profile.continual.shares[0], _recorded_share(runner.context.store, recorded)
    if is_resumed or recorded is None or used <= first:
        return used if is_resumed else first
    run = schedule.of_round(runner.context.profile, new, used)
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
    samples = train.last_step * train.global_batch_size
    if run.continual.replay_from == "generated":
        known = _generate(runner, current, new, run, math.ceil(share * samples))
        return replay.with_replay(context.store, new, known, share, samples, lambda drawn: None)
    known = history_of(runner, current, tokenizer, new)
    return replay.with_replay(context.store, new, known, share, samples, partial(restore, context, tokenizer))


def history_of(
    runner: Runner, current: series.Promoted, tokenizer: Artifact, new: Artifact
) -> replay.History:
    """What the promoted model and its ancestors were trained on, and the stand-in sources."""
    context, length = runner.context, runner.context.profile.train.sequence_length
    known = replay.history(context.store, current, new, length)
    if (made := stand_in.make(context, tokenizer)) is not None:
        runner.record_use(made)
        known = known + stand_in.history(context.store, made, length)
    return known


def _generate(
    runner: Runner, current: series.Promoted, new: Artifact, run: Profile, windows: int
) -> replay.History:
    """Text sampled from the promoted model on the round's cluster, for a number of replayed windows."""
    store, settings, length = runner.context.store, run.continual, run.train.sequence_length
    base = runs.fetch(store, current.run)
    profile, file = on_cluster_of(run, base, "generate")
    model = keys.digest([current.identity, series.latest_step(store, current)])
    frozen = series.frozen_weights(store, runner.context.profile)
    context = replace(runner.context, profile=profile, folder=base)
    rows = generated.row_count(windows, length, settings.generated_tokens)
    made = [
        required(runner.run(generated.GenerationStep(model, new, first, count, file, frozen), context))
        for first, count in generated.shards(rows)
    ]
    return generated.history(model, made, length)


def _start(current: series.Promoted, step: int, profile: Profile) -> str:
    """Digest of what a round starts from: run and checkpoint, and whether its optimizer is kept."""
    checkpoint = Path(run_files.checkpoint(step)).name
    return keys.digest([current.identity, checkpoint, *(["trunk"] if profile.continual.is_trunk else [])])


def _is_outdated(
    context: Context, name: str, current: series.Promoted, recorded: Mapping[str, str] | None
) -> bool:
    """Whether a round started from other weights: its base run was replaced or trained further."""
    step = series.start_step(context.store, current, trunk=context.profile.continual.is_trunk)
    if not recorded or recorded["checkpoint"] == _start(current, step, context.profile):
        return False
    log.warning("%s started from other weights than step %d of %s: it starts over", name, step, current.run)
    return True


def _train(judge: Judge, *, start_over: bool) -> tuple[str, Verdict]:
    """Train the promoted model on new data, evaluate before and after, and export a promoted result.

    Returns the round's identity and how it was judged.
    """
    runner, current, tokenizer, dataset = judge.runner, judge.promoted, judge.tokenizer, judge.dataset
    context, store = runner.context, runner.context.store
    run, base = context.profile, runs.fetch(store, current.run)
    trunk = run.continual.is_trunk
    step = series.start_step(store, current, trunk=trunk)
    saved = run_files.checkpoint(step)
    with store.run_folder(current.run).local_checkpoint(saved, keep_on_error=True) as weights:
        training = TrainingRun(runner)
        runs.record_flow_run(base, context.flow_run)
        inputs = tokenizer.key, dataset.key, _start(current, step, run)
        with training.open(run, *inputs, replace=start_over, reports=True) as overview:
            identity = training.identity
            ledger.record(store, run.name, identity, dataset, parent=current.identity)
            judge.evaluate_promoted(base)
            graphs = training.graphs()
            train = TrainingStep(dataset, identity, graphs, weights, keep_optimizer=trunk)
            if judge.weights is not None:  # LoRA: the updates of the same weights are trained further
                train = replace(train, weights=judge.weights, adapters=weights)
            training.train(train)
            verdict, evaluated = judge.judge(identity, graphs)
            if verdict.promotes:
                with activities.begin(store, "exporting", run.name):
                    given = state_files.read_json(base / EXPORT / GENERATION_CONFIG)
                    runner.run(ExportStep(tokenizer, identity, judge.weights, generation_config=given or {}))
            outcomes = _with_new_data(runner.outcomes, tokenizer, dataset)
            runner.run(ReportStep(training.plan, evaluated, outcomes, verdict.lines))
            overview.update(now=True)
        return identity, verdict


def _with_new_data(outcomes: Sequence[Outcome], tokenizer: Artifact, dataset: Artifact) -> list[Outcome]:
    """The outcomes, with the data that the round trains on in place of all data of the series."""
    step = DatasetStep(tokenizer)
    note, summary = step.describe(dataset.summary), dataset.summary
    return [
        replace(outcome, note=note, summary=summary) if outcome.step == step.name else outcome
        for outcome in outcomes
    ]
