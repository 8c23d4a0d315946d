"""Training step: runs `modeling.training.train` to its last step on the cluster, in the run folder.

A failed attempt leaves its checkpoints, and the next one resumes from the latest complete one. Attempts are numbered: RUN/attempt
has the current number, and only that attempt may complete checkpoints. The artifact points to the last checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from modeling.supervision.time_account import record_attempt
from profiles import state_files
from profiles.schema import Profile
from tasks import failures, keys
from tasks.launchers import Job, JobFailed, create, execute
from tasks.launchers.log_follower import LogFollower, size_of
from tasks.step import Context, Step
from tasks.store import run_artifacts, runs
from tasks.store.artifacts import Artifact
from tasks.store.run_folder import MARKER, RunFolder

log = logging.getLogger(__name__)


@dataclass
class TrainingStep(Step):
    """Trains to the last step. The artifact's summary: steps, and loss and tokens at the last one."""

    dataset: Artifact
    identity: str  # of the run's mathematics
    graphs: Artifact | None = None  # the compiled graphs; None compiles on first use
    # Initial weights, an artifact or a checkpoint folder; None starts from scratch.
    weights: Artifact | Path | None = None
    reference: Artifact | None = None  # log-probabilities of the reference model, for dpo

    kind = "training"
    name = "train"

    def title(self, profile: Profile) -> str:
        return f"train {profile.name}, {profile.train.steps} steps"

    def key(self, context: Context) -> str:
        return keys.training(context.run_folder.name, self.identity, context.profile.train)

    def find(self, context: Context, key: str) -> Artifact | None:
        return run_artifacts.find(context.store, self.kind, key, context.run_folder.name)

    def make(self, context: Context, key: str) -> Artifact:
        """Train, or resume.

        Raises:
            JobFailed: the attempt failed; another one resumes from the latest checkpoint.
            FatalError: it failed, and another attempt would fail for the same reason.
        """
        profile, store, folder = context.profile, context.store, context.run_folder
        job = cluster_job("train", context, key, self.dataset, self.graphs)
        job = replace(job, attempt_file=folder / runs.ATTEMPT)
        if self.weights is not None:
            local = self.weights if isinstance(self.weights, Path) else store.artifacts.path(self.weights)
            job = job.with_arguments("--weights", str(local))
        if self.reference is not None:
            job = job.with_arguments("--reference", str(store.artifacts.path(self.reference)))
        forwarder = LogForwarder(job.log_file)

        def watch() -> None:
            forwarder.forward()
            context.watch()

        steps, run = profile.train.steps, store.run_folder(folder.name)
        if steps not in run.checkpoint_steps():  # else the job ended while no flow followed it
            if not (folder / "profile.yaml").exists():
                reason = "moved or removed while the run was active; move it back, or start the run again"
                raise failures.FatalError(f"{folder}: {reason}")
            try:
                with run.sync():
                    launcher = create(profile.cluster.launcher, profile.cluster)
                    submitted = partial(record_attempt, folder, "submitted")
                    execute(launcher, job, watch, grace=profile.cluster.grace, on_submit=submitted)
            except JobFailed as failure:
                raise failures.explain(profile, failure) from failure
        if steps not in run.checkpoint_steps():
            raise JobFailed(f"training ended without a checkpoint of step {steps}; its log: {job.log_file}")
        part = f"checkpoints/step_{steps}"
        marker = state_files.parse((run.read(f"{part}/{MARKER}") or b"").decode(errors="replace")) or {}
        tokens = steps * profile.train.global_batch_size * profile.train.sequence_length
        # Markers of earlier versions have no loss.
        last = marker if "loss" in marker else runs.last_training_row(folder)
        summary = {"steps": steps, "loss": last["loss"] if last else math.nan, "tokens": tokens}
        return run_artifacts.publish(store, self.kind, key, folder.name, part, summary)

    def may_retry(self, context: Context) -> Callable[[], bool]:
        run = context.store.run_folder(context.run_folder.name)
        return RetryBudget(run, context.profile.cluster.retries).spend

    def describe(self, summary: Mapping[str, Any]) -> str:
        return f"loss {summary['loss']:.4f} after {summary['steps']:,} steps"


class RetryBudget:
    """Retry budget: `retries` failures without a new checkpoint; each new checkpoint refills it.

    Attempts in log lines are counted from the latest checkpoint, too.
    """

    def __init__(self, run: RunFolder, retries: int) -> None:
        self._run, self._retries = run, retries
        self._failures = 0
        self._latest = self._latest_checkpoint() or 0

    def spend(self) -> bool:
        """Count a failure; returns whether to retry."""
        latest = self._latest_checkpoint()
        if latest is None:
            latest = self._latest
        elif latest > self._latest:
            self._latest, self._failures = latest, 0
        self._failures += 1
        if self._failures > self._retries:
            return False
        start = f"from step {latest:,}" if latest else "from the beginning"
        log.warning("restarting %s, attempt %d of %d", start, self._failures + 1, self._retries + 1)
        return True

    def _latest_checkpoint(self) -> int | None:
        """0 if there is none; None if the store cannot be read, which must not end training."""
        try:
            return max(self._run.checkpoint_steps(), default=0)
        except OSError as error:
            log.warning("the run's checkpoints cannot be listed: %s", error)
            return None


def cluster_job(
    program: str, context: Context, key: str, dataset: Artifact, graphs: Artifact | None, *arguments: str
) -> Job:
    """The program `modeling.training.<program>` on every device of the profile's cluster."""
    store, folder, cluster = context.store, context.run_folder, context.profile.cluster
    options = ["--run-folder", str(folder), "--cache", str(store.work_dir / "cache")]
    options += ["--dataset", str(store.artifacts.path(dataset, with_required=False))]
    if store.is_remote:
        options += ["--artifacts", store.artifacts.remote_uri]
        options += ["--checkpoints", str(store.run_folder(folder.name).checkpoints_location)]
    if graphs is not None:
        options += ["--graphs", str(store.artifacts.path(graphs))]
    return Job(
        name=program.rpartition(".")[2],
        program=f"modeling.training.{program}",
        arguments=(*options, *arguments),
        folder=folder / "logs",
        nodes=cluster.nodes,
        processes=cluster.devices_per_node,
        threads=cluster.threads,
        key=key,
    )


class LogForwarder:
    """Forwards rank 0's log lines to the flow's log, except step lines, which the progress line replaces."""

    BURST = 10  # lines at once; then one per second, and the others stay in the job's log only

    def __init__(self, log_file: Path) -> None:
        self._follower = LogFollower(log_file, start=size_of(log_file))
        self._credit = float(self.BURST)
        self._asked = time.monotonic()

    def forward(self) -> None:
        """Forward new lines; call it several times a second."""
        now = time.monotonic()
        self._credit = min(self.BURST, self._credit + now - self._asked)
        self._asked = now
        for line in self._follower.lines():
            text = line.removeprefix("[rank 0] ")
            if text == line or text.startswith("step "):
                continue
            if "warning" in text.lower():
                log.warning("%s", text)
            elif self._credit >= 1:
                self._credit -= 1
                log.info("%s", text)
