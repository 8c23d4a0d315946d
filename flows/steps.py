"""The steps as Prefect tasks: their names in the UI, their retries, what of their progress is shown.

The work itself is in `tasks/`, which knows of no flow. Programs that hang are ended by deadlines of their own: Prefect's
timeout cannot interrupt a call that blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prefect import task, unmapped
from prefect.cache_policies import NO_CACHE

from flows.runner import worth_retrying
from flows.secrets import hub_token
from flows.ui.artifacts import Bar
from flows.ui.progress import Progress, show_graphs, tell, watched
from modeling.planning import planner
from profiles.schema import Profile
from tasks import checkpoint as checkpoints
from tasks import dataset as datasets
from tasks import evaluation, training
from tasks import export as exports
from tasks import graphs as compilation
from tasks import report as reports
from tasks import tokenizer as tokenizers
from tasks.reporting.outcome import Outcome
from tasks.store.artifacts import Artifact
from tasks.store.store import Store
from tasks.tokenization.dataset_plan import DatasetPlan
from tasks.tokenization.slurm_array import SlurmArray
from tasks.tokenization.worker_pool import WorkerPool

# Of tasks whose arguments Prefect need not hash to find out whether they are done; of the others the runner tells it.
UNKEYED: dict[str, Any] = {"cache_policy": NO_CACHE}
# Of tasks that can fail for reasons that pass: a network, a machine, a disk that was full.
DELAYS = [
    2.0,
    4.0,
    8.0,
    16.0,
    30.0,
]  # seconds; the last for all that follow, also of a run that fails a hundred times
RETRIED: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": DELAYS,
    "retry_condition_fn": worth_retrying,
}


@task(task_run_name="plan {profile.name}", **UNKEYED)
def plan(profile: Profile) -> planner.Plan:
    """Validity, parameters and bytes on each rank; refuses what cannot fit."""
    planned = planner.plan(profile)
    planner.require_fit(profile, planned)
    planner.require_devices(profile)
    return planned


@task(task_run_name="tokenizer from {profile.tokenizer.source}", **RETRIED)
def tokenizer(profile: Profile, store: Store) -> Artifact:
    """Fetch the tokenizer, or train it on the data."""
    return tokenizers.run(profile, store, hub_token(profile), progress=tell)


@task(task_run_name="dataset of {profile.name}", **RETRIED)
def dataset(profile: Profile, store: Store, tokenizer: Artifact) -> Artifact:
    """Tokenize the data into Megatron's indexed format."""
    bar = Bar("tokenizing", "Shards of the data that are tokenized")
    token, cluster = hub_token(profile), profile.cluster
    array = cluster.launcher == "slurm" and cluster.shards_partition is not None
    spread = SlurmArray(cluster, store, token) if array else mapped
    return datasets.run(profile, store, tokenizer, watched(bar), spread, token)


@task(task_run_name="{order} {name}", **RETRIED, **UNKEYED)
def shard(order: str, name: str, k: int, workers: WorkerPool) -> dict[str, Any]:
    """One shard of the data, by a process that is free."""
    return workers.run(order, k).to_json()


def mapped(workers: WorkerPool, plan: DatasetPlan, order: str, numbers: Sequence[int]) -> Iterator[Artifact]:
    """Shards as tasks of their own, which Prefect shows and tries again one by one."""
    names = [plan.shards[k].name for k in numbers]
    for future in shard.map(order, names, list(numbers), unmapped(workers)):
        yield Artifact.from_json(future.result())


@task(task_run_name="weights from {profile.init.from_}", **RETRIED)
def checkpoint(profile: Profile, store: Store, key: str) -> Artifact:
    """Make pretrained weights ready for training."""
    return checkpoints.run(profile, store, key, hub_token(profile))


@task(task_run_name="graphs of {profile.name}", **RETRIED)
def graphs(profile: Profile, store: Store, folder: Path, key: str) -> Artifact:
    """Trace the run's programs and compile each ahead of time."""
    try:
        bar = Bar("compiling", "Programs compiled ahead of time")
        return compilation.run(profile, store, folder, key, watched(bar))
    finally:
        show_graphs(folder / compilation.RECORD)


@task(task_run_name="train {profile.name}, {profile.train.steps} steps", **RETRIED)
def train(
    profile: Profile,
    store: Store,
    folder: Path,
    key: str,
    dataset: Artifact,
    graphs: Artifact | None,
    weights: Artifact | Path | None = None,
) -> Artifact:
    """Train on the cluster; a retry goes on from the newest complete checkpoint."""
    progress = Progress(profile, folder)
    return training.run(profile, store, folder, key, dataset, graphs, weights, watch=progress.watch)


@task(task_run_name="evaluate {profile.name}", **RETRIED)
def evaluate(
    profile: Profile,
    store: Store,
    folder: Path,
    key: str,
    dataset: Artifact,
    graphs: Artifact | None,
    trained: Artifact | None,
) -> Artifact:
    """Held-out loss and perplexity."""
    return evaluation.run(profile, store, folder, key, dataset, graphs)


@task(task_run_name="export {profile.name}", **RETRIED)
def export(
    profile: Profile, store: Store, folder: Path, key: str, tokenizer: Artifact, trained: Artifact | None
) -> Artifact:
    """Write the model and its tokenizer in Hugging Face's format."""
    return exports.run(profile, store, folder, key, tokenizer)


@task(task_run_name="report on {profile.name}", **UNKEYED)
def report(
    profile: Profile,
    store: Store,
    folder: Path,
    planned: planner.Plan,
    evaluated: Artifact,
    outcomes: Sequence[Outcome],
) -> Path:
    """Write the run's report; with it the run's folder is complete, also in a remote store."""
    page = reports.run(profile, folder, planned.to_json(), evaluated.summary, outcomes)
    store.run_folder(folder.name).sync().upload()
    return page
