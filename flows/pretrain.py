"""The main job: from a tokenizer, a data set and perhaps a pretrained checkpoint to a trained Hugging Face model.

    plan -> tokenizer -> dataset -> checkpoint -> graphs -> train -> evaluate -> export -> report

Every step is a Prefect task that publishes an artifact; a step whose artifact is there and whole is not done again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from flows import steps, working_folder
from flows.hooks import end_jobs, explain
from flows.parameters import ProfileName, RunName
from flows.runner import Runner, forward_logs
from flows.secrets import hub_token
from flows.ui.overview import Overview
from modeling.planning.planner import plan
from profiles import resolve
from profiles.schema import Profile
from tasks import checkpoint, dataset, evaluation, export, graphs, keys, tokenizer, training
from tasks.store import ledger, runs
from tasks.store.artifacts import Artifact
from tasks.store.store import Store


def compile_graphs(do: Runner, run: Profile, kept: Store, folder: Path) -> Artifact | None:
    """The step `graphs`, which a profile may do without."""
    if not run.compile.enabled:
        do.skip("graphs", "compile.enabled is false")
        return None
    key = keys.graphs(run)
    return do.once(steps.graphs, graphs.KIND, key, run, kept, folder, key)


def run_name() -> str:
    """What the run is called in Prefect's UI: its own name, else its profile's."""
    profile = Path(flow_run.parameters["profile"])
    return flow_run.parameters["name"] or (
        profile.stem if profile.suffix in (".yaml", ".yml") else profile.name
    )


# Tasks that are mapped run as many at a time as processes can work on them, and a few more that wait.
SHARDS = ThreadPoolTaskRunner(max_workers=2 * (os.cpu_count() or 1))


@flow(
    name="pretrain",
    flow_run_name=run_name,
    on_cancellation=[end_jobs],
    on_failure=[explain],
    on_crashed=[explain],
    task_runner=SHARDS,
)
def pretrain(
    profile: ProfileName, overrides: Sequence[str] = (), name: RunName = None, store: str = "./store"
) -> dict[str, Any]:
    """Train the model of a profile and export it; returns where everything is, and what became of each step.

    Args:
        profile: A shipped profile, or the path of a YAML file.
        overrides: Keys to override, each as in train.steps=100.
        name: The run's name; left empty, its profile's.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
    """
    working_folder.enter()
    forward_logs()
    run = resolve.load(profile, overrides, name)
    resolve.check(run)
    resolve.check_start(run)
    kept = Store(store, run.cluster.work_dir or "store")
    do = Runner(kept)

    planned = do.always(steps.plan, run)
    key = tokenizer.key(run, hub_token(run), kept)
    vocabulary = do.once(steps.tokenizer, tokenizer.KIND, key, run, kept)
    tokenizer.check_fits(run, vocabulary)
    key = dataset.key(run, kept, vocabulary, hub_token(run))
    corpus = do.once(steps.dataset, dataset.KIND, key, run, kept, vocabulary)
    if run.train.epochs is not None:
        run = dataset.with_steps(run, corpus)
        planned = plan(run)  # once more: how long the run is, the data has only now decided
    weights = None
    if checkpoint.needed(run):
        key = checkpoint.key(run, kept, hub_token(run))
        weights = do.once(steps.checkpoint, checkpoint.KIND, key, run, kept, key)
    else:
        do.skip("checkpoint", "from scratch")

    identity = keys.run_identity(run, vocabulary.key, corpus.key, weights and weights.key)
    with runs.open_run(kept, run, identity, str(flow_run.id)) as folder:
        runs.record_inputs(folder, identity, vocabulary, corpus)
        do.record_in(folder)
        overview = Overview(run, folder)
        overview.begin(planned)
        compiled = compile_graphs(do, run, kept, folder)

        key = keys.training(run.name, identity)
        inputs = (run, kept, folder, key, corpus, compiled, weights)
        patience = run.cluster.retries
        trained = do.once(steps.train, training.KIND, key, *inputs, run_folder=folder, patience=patience)
        ledger.record(kept, run.name, identity, corpus)
        key = keys.evaluation(run.name, identity, run.evaluate.metrics)
        evaluated = do.once(
            steps.evaluate, evaluation.KIND, key, run, kept, folder, key, corpus, compiled, trained
        )
        key = keys.export(run.name, identity)
        exported = do.once(
            steps.export, export.KIND, key, run, kept, folder, key, vocabulary, trained, run_folder=folder
        )
        page = do.always(steps.report, run, kept, folder, planned, evaluated, do.outcomes)
        overview.show(now=True)
        return {
            "run": run.name,
            "folder": str(folder),
            "export": str(folder / exported.summary["part"]),
            "metrics": str(folder / "metrics.jsonl"),
            "report": str(page),
            "parameters": planned.parameters,
            "validation_loss": evaluated.summary["validation_loss"],
            "perplexity": evaluated.summary["perplexity"],
            "steps": [asdict(outcome) for outcome in do.outcomes],
        }
