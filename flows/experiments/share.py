"""Share: train small rounds at several shares of replay; propose the share of a series' next round.

    new data, history ─> small model of the history ─> round ┐
                                                       round ├─> proposed share
                                                       round ┘

The small model stands for the promoted one. Its rounds train on the series' new data and replay its history, as the series' next
round would. Their data is pinned with the small model, so proxies are reused for later rounds that it says something about
(tasks/continual/proxy_data.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from prefect import flow

from flows.continual import history_of, old_sets
from flows.experiments.plans import load_share, no_series, plan_within, require_startable
from flows.experiments.side_by_side import file_name, run_side_by_side
from flows.final_states import final_states
from flows.hooks import EXPERIMENT_HOOKS, HOOKS
from flows.parameters import ProfileName, RunName
from flows.pretrain import run_name
from flows.run_setup import TrainingRun, admitted, flow_context, read_lockfile, resolve_inputs
from flows.runner import THREADS, Runner, log_result
from flows.start_checks import RunCommand
from modeling.planning.auto import resolve_auto
from modeling.scaling.planned_run import PlannedRun, round_of
from profiles import resolve
from profiles.errors import ProfileError
from profiles.experiments import Share
from profiles.files import run_files
from profiles.schema import Profile
from profiles.sections.base import required
from tasks import keys
from tasks.continual import gates, held_out, proxy_data, replay, series
from tasks.continual.data import new_data
from tasks.continual.proxy_data import ProxyData
from tasks.continual.restore import restore, restore_held_out
from tasks.continual.schedule import with_shortened_schedule
from tasks.evaluation.held_out import SetsEvaluationStep
from tasks.experiments import json_artifacts, shares
from tasks.experiments.shares import SETS, Measured
from tasks.inputs import locate_runs
from tasks.reporting import html, share_page
from tasks.steps.dataset import DatasetStep, read_file
from tasks.steps.tokenizer import TokenizerStep
from tasks.steps.training import TrainingStep
from tasks.store import activities
from tasks.store.store import Store, open_store

POINTS = 201  # of a line on the page, which may fall steeply at first
log = logging.getLogger(__name__)


@flow(name="share", flow_run_name=file_name, task_runner=THREADS, **EXPERIMENT_HOOKS)
@final_states
def share(file: str, store: str = "./store") -> dict[str, Any]:
    """Train proxies of a series' next round and propose its share of replay; returns the proposal.

    Args:
        file: The share file.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
    """
    described, target, base = load_share(file)
    require_startable([base])
    opened = open_store(store, target.profile.cluster.work_dir or "store")
    overrides = [*described.overrides, *described.round_overrides]
    run = resolve.load(described.target, overrides, described.series or target.name)
    run = locate_runs(run, opened, required=False)
    with activities.begin(opened, "run", f"{described.name}-data"):  # so that its new data is no garbage yet
        data = _data(run, base, opened)
        rounds = _rounds(described, target, base, run, data, opened)
        plan_within(described, [base, *(each for each, _ in rounds)])
        return _propose(described, target, base, rounds, data, opened, store)


def _propose(
    described: Share,
    target: PlannedRun,
    base: PlannedRun,
    rounds: Sequence[tuple[PlannedRun, str]],
    data: ProxyData,
    opened: Store,
    store: str,
) -> dict[str, Any]:
    """Train the proxies that the store lacks, and write the proposal and its page."""
    datasets = {base.name: data.history} | {each.name: dataset for each, dataset in rounds}

    def train(start: str, each: PlannedRun, store: str) -> dict[str, Any]:
        given = (each.name, store, data.tokenizer, datasets[each.name], data.new, start)
        return proxy_round(each.source, list(each.overrides), *given)

    (before,) = run_side_by_side(described, [base], store, partial(train, ""))
    proxy_data.pin(opened, base.name, data)
    unmoved = gates.losses(before["sets"], data.origin)
    if missing := [name for name in SETS if name not in unmoved]:
        reason = f"holds out no {missing[0]} text of at least one window, which proxies are evaluated on"
        raise ProfileError("series", described.series or target.name, reason)
    results = run_side_by_side(described, [each for each, _ in rounds], store, partial(train, base.name))
    measured = [
        Measured(each.name, value, gates.losses(result["sets"], data.origin))
        for (each, _), value, result in zip(rounds, described.shares, results, strict=True)
    ]
    artifact = shares.write_proposal(opened, described, target, unmoved, measured)
    document = json_artifacts.read(opened, artifact)
    if warning := _warning(document, max(described.shares)):
        log.warning(warning)
    log_result(f"proposed: continual.replay {document['share']:g}")
    result = {"experiment": described.name, "key": artifact.key, **document}
    lines = shares.fitted_lines(document, POINTS)
    path = opened.work_dir / "shares" / f"{described.name}.html"
    page = html.write(path, share_page.render(described, result, lines))
    return {**result, "page": str(page)}


def _warning(proposed: Mapping[str, Any], largest: float) -> str:
    """What to say of a proposal, if anything, when the largest share of a proxy is this."""
    if not proposed["meets"]:
        return f"no share up to {largest:g} keeps the old loss within its gate"
    if proposed["share"] >= largest:
        return "the proposed share is the largest of the proxies; add larger ones to shares"
    return ""


def _data(run: Profile, base: PlannedRun, store: Store) -> ProxyData:
    """The data that proxies are trained on: that of earlier ones if it is similar, else the next round's."""
    current = series.promoted_model(store, run.name)
    if current is None:
        raise no_series(run.name, store)
    tokenizer = store.artifacts.expect(TokenizerStep.id(current.tokenizer))
    runner = Runner(flow_context(run, store))
    resolve_inputs(runner, None, data_only=True)
    everything = required(runner.run(DatasetStep(tokenizer)))
    old = old_sets(runner.context, current, tokenizer)
    restore_held_out(runner.context, tokenizer, current.identity, old.entries)
    by_hash = held_out.held_out_by_hash(run.data)
    new = new_data(store, current, everything, run.train.sequence_length, old, by_hash)
    if new is None:
        raise ProfileError("series", run.name, "has no new data, from which a share could be found")
    known = history_of(runner, current, tokenizer, new)
    if not known.parts:
        raise ProfileError("series", run.name, "has no history to replay")
    drawn = [(part.stream, shard) for part in known.parts for shard in part.shards]
    restore(runner.context, tokenizer, drawn)
    history = proxy_data.history_dataset(store, new, known)
    now = ProxyData.of(store, current, everything, new, history)
    pinned = proxy_data.read_pinned(store, base.name)
    reason = pinned.why_not(store, now) if pinned else "there are none yet"
    if pinned and reason is None:
        log.info("the proxies of %s are reused: the new data is of the same sources", pinned.origin)
        return pinned
    log.info("new proxies are trained: %s", reason)
    return now


def _rounds(
    described: Share, target: PlannedRun, base: PlannedRun, run: Profile, data: ProxyData, store: Store
) -> list[tuple[PlannedRun, str]]:
    """The proxies of the round, each with the key of its dataset."""
    new, history = (store.artifacts.expect(DatasetStep.id(key)) for key in (data.new, data.history))
    length = run.train.sequence_length
    known = replay.of_dataset(data.history, described.name, read_file(store, history), length)
    found = []
    for value in described.shares:
        planned = round_of(described, target, base, with_shortened_schedule(run, new, value), value)
        train = planned.profile.train
        samples = (train.steps or 0) * train.global_batch_size
        dataset = replay.with_replay(store, new, known, value, samples, lambda drawn: None)
        found.append((planned, dataset.key))
    return found


@flow(name="proxy-round", flow_run_name=run_name, task_runner=THREADS, **HOOKS)
@final_states
def proxy_round(
    profile: ProfileName,
    overrides: Sequence[str],
    name: RunName,
    store: str,
    tokenizer: str,
    dataset: str,
    held_out: str,
    start: str = "",
) -> dict[str, Any]:
    """Train a proxy on a dataset, and evaluate it on another one's held-out sets.

    Args:
        profile: A shipped profile's name, or the path of a YAML file.
        overrides: Keys to override.
        name: Name of the run.
        store: Where artifacts and runs are kept.
        tokenizer: Key of the tokenizer.
        dataset: Key of the dataset to train on.
        held_out: Key of the dataset with the held-out sets.
        start: Run from whose latest checkpoint it starts; empty: from scratch.
    """
    run = resolve_auto(resolve.load(profile, overrides, name))
    command = RunCommand(profile, overrides, name, store)
    with admitted(run, command, replace=True) as (runner, _), ExitStack() as stack:
        run, opened = runner.context.profile, runner.context.store
        corpus, sets = (opened.artifacts.expect(DatasetStep.id(key)) for key in (dataset, held_out))
        weights, origin = None, None
        if start:
            folder = opened.run_folder(start)
            part = run_files.checkpoint(folder.checkpoint_steps()[-1])
            weights = stack.enter_context(folder.local_checkpoint(part, keep_on_error=True))
            origin = keys.digest([folder.stored_identity, weights.name])
        resolve_inputs(runner, read_lockfile(opened, name))
        training = TrainingRun(runner)
        for used in (corpus, sets):
            runner.record_use(used)
        with training.open(run, tokenizer, dataset, origin, replace=True):
            identity, graphs = training.identity, training.graphs()
            training.train(TrainingStep(corpus, identity, graphs, weights))
            step = SetsEvaluationStep(sets, keys.digest([identity, held_out]), graphs)
            found = required(runner.run(step)).summary
    steps = [{"step": each.step, "how": each.how} for each in runner.outcomes]
    return {"steps": steps, "validation_loss": found["validation_loss"], "sets": found["sets"]}
