"""Continual pretraining: a finished model is trained further on what is new, and replaced only by one that is no worse.

    new data -> graphs -> evaluate before -> train -> evaluate after -> export if no worse -> report -> promote

The weights are those of the newest checkpoint; the optimizer is new, so the learning rate warms up and decays once more
(arXiv 2403.08763). The report leaves the run's folder whole in a remote store too, and only then is its model promoted. Meant
for a schedule: where nothing is new the run is done at once, and says so by its state's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from flows import steps, working_folder
from flows.hooks import end_jobs, explain
from flows.parameters import ProfileName, RunName
from flows.pretrain import SHARDS, compile_graphs, run_name
from flows.runner import Runner, forward_logs
from flows.secrets import hub_token
from flows.ui.overview import Overview
from profiles import resolve
from profiles.schema import Profile
from tasks import continual as series
from tasks import dataset, evaluation, export, keys, tokenizer, training
from tasks.store import ledger, runs
from tasks.store.store import Store


@flow(
    name="continual",
    flow_run_name=run_name,
    on_cancellation=[end_jobs],
    on_failure=[explain],
    on_crashed=[explain],
    task_runner=SHARDS,
)
def continual(
    profile: ProfileName, overrides: Sequence[str] = (), name: RunName = None, store: str = "./store"
) -> State[Any]:
    """Train a run's newest model further on new data, and promote what came of it if it is no worse.

    Args:
        profile: A shipped profile's name, or the path of a YAML file.
        overrides: Keys to override, each as in train.steps=100.
        name: The name of the pretraining run that is continued; left empty, its profile's.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
    """
    working_folder.enter()
    forward_logs()
    run = resolve.load(profile, overrides, name)
    resolve.check(run)
    resolve.check_start(run)
    kept = Store(store, run.cluster.work_dir or "store")
    # Two schedules, or one that overtakes itself: the later waits, and then finds nothing new.
    with kept.lock(f"continual-{run.name}"):
        return _round(run, kept)


def _round(run: Profile, kept: Store) -> State[Any]:
    do = Runner(kept)
    stands = series.standing(kept, run.name)
    if stands is None:
        missing = f"run {run.name} has no finished model to go on from: one that was trained to its end and exported"
        return Completed(name="NothingYet", message=missing)
    vocabulary = kept.artifacts.expect(tokenizer.KIND, stands.tokenizer)
    key = dataset.key(run, kept, vocabulary, hub_token(run))
    corpus = do.once(steps.dataset, dataset.KIND, key, run, kept, vocabulary)
    new = series.fresh(kept, stands, corpus, run.train.sequence_length)
    if new is None:
        return Completed(name="NothingNew", message=f"no data that {stands.run} was not trained on")

    run = series.with_steps(run, new)
    base = runs.fetch(kept, stands.run)
    start = series.newest(kept, stands)
    mine = run.model_copy(update={"name": f"{run.name}-round-{stands.round + 1}"})
    planned = do.always(steps.plan, mine)
    identity = keys.run_identity(
        mine, vocabulary.key, new.key, weights=keys.digest([stands.identity, start.name])
    )
    runs.record_flow_run(base, str(flow_run.id))
    with runs.open_run(kept, mine, identity, str(flow_run.id)) as folder:
        runs.record_inputs(folder, identity, vocabulary, new)
        do.record_in(folder)
        overview = Overview(mine, folder)
        overview.begin(planned)
        compiled = compile_graphs(do, mine, kept, folder)

        held_out = kept.artifacts.expect(dataset.KIND, stands.dataset)
        own = resolve.load(str(base / "profile.yaml"))
        what = keys.digest([stands.identity, start.name, held_out.key])
        key = keys.evaluation(stands.run, what, own.evaluate.metrics)
        old = do.once(steps.evaluate, evaluation.KIND, key, own, kept, base, key, held_out, None, None)
        key = keys.training(mine.name, identity)
        inputs = (mine, kept, folder, key, new, compiled, start)
        patience = mine.cluster.retries
        trained = do.once(steps.train, training.KIND, key, *inputs, run_folder=folder, patience=patience)
        ledger.record(kept, mine.name, identity, new, parent=stands.identity)
        key = keys.evaluation(mine.name, keys.digest([identity, held_out.key]), mine.evaluate.metrics)
        now = do.once(
            steps.evaluate, evaluation.KIND, key, mine, kept, folder, key, held_out, compiled, trained
        )
        # Never so where a loss is not a number.
        better = now.summary["validation_loss"] <= old.summary["validation_loss"] + run.evaluate.tolerance
        if better:
            key = keys.export(mine.name, identity)
            inputs = (mine, kept, folder, key, vocabulary, trained)
            do.once(steps.export, export.KIND, key, *inputs, run_folder=folder)
        do.always(steps.report, mine, kept, folder, planned, now, do.outcomes)
        overview.show(now=True)

        losses = f"held-out loss {old.summary['validation_loss']:.4f} before, {now.summary['validation_loss']:.4f} after"
        if not better:
            return Completed(name="NotPromoted", message=f"{stands.run} stands: {losses}")
        series.promote(kept, run.name, stands, mine.name, identity)
        return Completed(name="Promoted", message=f"{mine.name} takes the place of {stands.run}: {losses}")
