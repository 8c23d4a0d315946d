"""Training: runs `modeling.training.train` on the profile's cluster, in the run's folder, and sees it to its last step.

An attempt that fails leaves its checkpoints, and the next one resumes from the newest complete one. Attempts are numbered,
RUN/attempt says which one is current, and no other's checkpoints are completed. The artifact points to the last checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from profiles.schema import Profile
from tasks import failures
from tasks.launchers import Job, JobFailed, create, execute
from tasks.launchers.log_follower import LogFollower
from tasks.store import run_artifacts, runs
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

log = logging.getLogger(__name__)

KIND = "training"


def run(
    profile: Profile,
    store: Store,
    folder: Path,
    key: str,
    dataset: Artifact,
    graphs: Artifact | None = None,
    weights: Artifact | Path | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Artifact:
    """Train to the last step; `watch` is called several times a second.

    The artifact's summary: steps, and loss and tokens at the last one.

    Raises:
        JobFailed: the attempt failed; another one goes on from its newest checkpoint.
        Hopeless: it failed for a reason that another one would meet again.
    """
    job = cluster_job("train", profile, store, folder, key, dataset, graphs)
    job = replace(job, attempt_file=folder / runs.ATTEMPT)
    if weights is not None:
        job = job.with_arguments(
            "--weights", str(weights if isinstance(weights, Path) else store.artifacts.path(weights))
        )
    words = Words(job.log_file)

    def watch_all() -> None:
        words.forward()
        watch()

    with store.artifacts.lock(KIND, key):
        found = run_artifacts.find(store, KIND, key, folder.name)
        if found:
            return found
        steps, run_folder = profile.train.steps, store.run_folder(folder.name)
        if steps not in run_folder.checkpoint_steps():  # else it ended while nobody watched
            try:
                with run_folder.sync():
                    launcher = create(profile.cluster.launcher, profile.cluster)
                    execute(launcher, job, watch_all, grace=profile.cluster.grace)
            except JobFailed as failure:
                log.warning("%s\n%s", failure, failure.detail)
                raise failures.classified(profile, failure) from failure
        if steps not in run_folder.checkpoint_steps():
            raise JobFailed(f"training ended without a checkpoint of step {steps}; its log: {job.log_file}")
        last = next(row for row in reversed(runs.read_metrics(folder)) if "loss" in row)
        summary = {"steps": steps, "loss": last["loss"], "tokens": last["consumed_tokens"]}
        return run_artifacts.publish(store, KIND, key, folder.name, f"checkpoints/step_{steps}", summary)


def cluster_job(
    name: str,
    profile: Profile,
    store: Store,
    folder: Path,
    key: str,
    dataset: Artifact,
    graphs: Artifact | None,
) -> Job:
    """`modeling.training.<name>` on every device of the profile's cluster, as training and evaluation need it."""
    tokens = store.artifacts.path(dataset, with_required=False)
    arguments = ["--run-folder", str(folder), "--dataset", str(tokens)]
    arguments += ["--cache", str(store.work_dir / "cache")]
    if store.is_remote:
        arguments += ["--artifacts", store.artifacts.remote_uri]
        arguments += ["--checkpoints", str(store.run_folder(folder.name).checkpoints_location)]
    if graphs is not None:
        arguments += ["--graphs", str(store.artifacts.path(graphs))]
    cluster = profile.cluster
    return Job(
        name=name,
        program=f"modeling.training.{name}",
        arguments=tuple(arguments),
        folder=folder / "logs",
        nodes=cluster.nodes,
        processes=cluster.devices_per_node,
        threads=cluster.threads,
        key=key,
    )


class Words:
    """Rank 0's own words, for the flow's log; its line a step is left to the progress line, which stands for it."""

    BURST = 10  # lines at once; beyond them one a second, and the rest is in the job's log only

    def __init__(self, log_file: Path) -> None:
        self._tail = LogFollower(log_file, start=log_file.stat().st_size if log_file.exists() else 0)
        self._credit = float(self.BURST)
        self._asked = time.monotonic()

    def forward(self) -> None:
        now = time.monotonic()
        self._credit = min(self.BURST, self._credit + now - self._asked)
        self._asked = now
        for line in self._tail.lines():
            text = line.removeprefix("[rank 0] ")
            if text == line or text.startswith("step "):
                continue
            if "warning" in text.lower():
                log.warning("%s", text)
            elif self._credit >= 1:
                self._credit -= 1
                log.info("%s", text)
