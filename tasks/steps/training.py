"""Training step: runs `modeling.training.train` to its last step on the cluster, in the run folder.

A failed attempt leaves its checkpoints, and the next one resumes from the latest complete one. Attempts are numbered: RUN/attempt
has the current number, and only that attempt may complete checkpoints. The artifact points to the last checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modeling.supervision.time_account import record_attempt
from modeling.training.metrics import evaluated, record_event
from parallel.checkpoint.locations import MARKER
from profiles.errors import counted
from profiles.files import retry_policies, run_files, state_files
from profiles.schema import Profile
from tasks import failures, keys
from tasks.launchers import JobFailed, Status, create, execute
from tasks.reporting.format import format_duration
from tasks.step import Context, Step
from tasks.steps.jobs import LogForwarder, cluster_job
from tasks.store import run_artifacts
from tasks.store.artifacts import Artifact
from tasks.store.run_folder import RunFolder
from tasks.store.store import Store

log = logging.getLogger(__name__)

OUTAGE_PAUSES = retry_policies.TRAINING.delays
"""Seconds before each retry after an outage, without a new checkpoint."""


@dataclass
class TrainingStep(Step):
    """Trains to the last step. The artifact's summary: steps, and loss and tokens at the last one."""

    dataset: Artifact
    identity: str  # of the run's mathematics
    graphs: Artifact | None = None  # the compiled graphs; None compiles on first use
    # Initial weights, an artifact or a checkpoint folder; None starts from scratch.
    weights: Artifact | Path | None = None
    reference: Artifact | None = None  # log-probabilities of the reference model, for dpo
    # Checkpoint folder with the LoRA updates of the weights to start from; None: new ones.
    adapters: Path | None = None
    keep_optimizer: bool = False  # whether to start with the optimizer's state in the weights' checkpoint too

    kind = "training"
    name = "train"

    def title(self, profile: Profile) -> str:
        return f"train {profile.name} to step {profile.train.last_step:,}"

    def key(self, context: Context) -> str:
        return keys.training(context.run_folder.name, self.identity, context.profile.train)

    def find(self, context: Context, key: str) -> Artifact | None:
        return run_artifacts.find(context.store, self.id(key), context.run_folder.name)

    def make(self, context: Context, key: str) -> Artifact:
        """Train, or resume.

        Raises:
            JobFailed: the attempt failed; another one resumes from the latest checkpoint.
            FatalError: it failed, and another attempt would fail for the same reason; or the folder is no longer this run's.
        """
        profile, store, folder = context.profile, context.store, context.run_folder
        run = store.run_folder(folder.name)
        self._require_same_run(store, run)
        self._require_own_result(run, profile.train.last_step)
        job = cluster_job(
            *("train", context, key, self.dataset, self.graphs),
            weights=self.weights,
            adapters=self.adapters,
            keep_optimizer=self.keep_optimizer,
            reference=self.reference,
        )
        job = replace(job, attempt_file=folder / run_files.ATTEMPT)
        forwarder = LogForwarder(job.log_file)

        def watch() -> None:
            forwarder.forward()
            context.watch()

        steps = profile.train.last_step
        # Otherwise the job ended while no flow followed it.
        if steps not in run.checkpoint_steps() or _lacks_evaluation(profile, run):
            try:
                with run.sync():
                    launcher = create(profile.cluster)
                    queue = QueueRecorder(folder)
                    execute(
                        launcher,
                        job,
                        watch,
                        grace=profile.cluster.grace,
                        on_submit=queue.submitted,
                        on_status=queue.update,
                    )
            except JobFailed as failure:
                raise failures.explain(profile, failure) from failure
        if steps not in run.checkpoint_steps():
            raise JobFailed(f"training ended without a checkpoint of step {steps}; its log: {job.log_file}")
        part, marker = run_files.checkpoint(steps), _marker(run, steps)
        tokens = steps * profile.step_tokens
        summary = {"steps": steps, "loss": marker.get("loss", math.nan), "tokens": tokens}
        return run_artifacts.publish(store, self.id(key), folder.name, part, summary)

    def _require_same_run(self, store: Store, run: RunFolder) -> None:
        """Raise FatalError if the run was removed or replaced since it was opened, here or in the store."""
        local, stored = run.identity, run.stored_identity
        if local is None:
            reason = "moved or removed while the run was active; move it back, or start the run again"
            raise failures.FatalError(f"{run.path}: {reason}")
        if local != self.identity or stored not in (None, self.identity):  # None: not uploaded yet
            where = run.path if local != self.identity else f"{store.uri}/runs/{run.name}"
            reason = "now belongs to another run, which replaced this one; start this one under another name"
            raise failures.FatalError(f"{where}: {reason}")

    def _require_own_result(self, run: RunFolder, steps: int) -> None:
        """Raise FatalError if the last step's checkpoint is of another run, such as one that was replaced."""
        if run_files.is_other_run(_marker(run, steps).get("run"), run.owner):
            where = run.location(run_files.checkpoint(steps))
            reason = "written by another run; move the folder away, and start the run again"
            raise failures.FatalError(f"{where}: {reason}")

    def may_retry(self, context: Context) -> Callable[[BaseException], float | None]:
        run = context.store.run_folder(context.run_folder.name)
        return RetryBudget(run, context.profile.cluster.retries).spend

    def describe(self, summary: Mapping[str, Any]) -> str:
        return f"loss {summary['loss']:.4f} after {counted(summary['steps'], 'step')}"


def _marker(run: RunFolder, step: int) -> dict[str, Any]:
    """Contents of the marker of a run's checkpoint; empty if it is missing or corrupted."""
    data = run.read(f"{run_files.checkpoint(step)}/{MARKER}") or b""
    return state_files.parse(data.decode(errors="replace")) or {}


def _lacks_evaluation(profile: Profile, run: RunFolder) -> bool:
    """Whether a stop prevented the evaluation of the last step, which is saved, and it is still missing."""
    every, steps = profile.evaluate.every, profile.train.last_step
    if not every or steps % every or not _marker(run, steps).get("evaluation_due"):
        return False
    return not evaluated(run.path, steps)


class QueueRecorder:
    """Records in the run folder when its job is queued or requeued, and events of the launcher."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pending = folder, False

    def submitted(self) -> None:
        self._pending = True
        record_attempt(self._folder, "submitted")

    def update(self, status: Status) -> None:
        if status.pending and not self._pending:
            record_attempt(self._folder, "queued")
        self._pending = status.pending
        if status.event is not None:
            event, reason = status.event
            record_event(self._folder, event, reason=reason)


class RetryBudget:
    """Retry budget: `retries` failures without a new checkpoint; each new checkpoint refills it.

    Outages of the cluster or the storage are waited for, for OUTAGE_PAUSES in all, before they count.
    Attempts in log lines are counted from the latest checkpoint, too.
    """

    def __init__(self, run: RunFolder, retries: int) -> None:
        self._run, self._retries = run, retries
        self._failures = 0
        self._outages = 0  # that were waited for
        self._latest = self._latest_checkpoint() or 0

    def spend(self, failure: BaseException) -> float | None:
        """Count a failure; returns the seconds to wait before a retry, None if there is none."""
        latest = self._latest_checkpoint()
        if latest is None:
            latest = self._latest
        elif latest > self._latest:
            self._latest, self._failures, self._outages = latest, 0, 0
        start = f"from step {latest:,}" if latest else "from the beginning"
        if failures.is_outage(failure) and self._outages < len(OUTAGE_PAUSES):
            pause = OUTAGE_PAUSES[self._outages]
            self._outages += 1
            log.warning("storage or cluster unavailable; restarting %s in %s", start, format_duration(pause))
            return pause
        self._failures += 1
        if self._failures > self._retries:
            return None
        log.warning(failures.RESTARTING, start, self._failures + 1, self._retries + 1)
        return 0.0

    def _latest_checkpoint(self) -> int | None:
        """0 if there is none; None if the store cannot be read, which must not end training."""
        try:
            return max(self._run.checkpoint_steps(), default=0)
        except OSError as error:
            log.warning("the run's checkpoints cannot be listed: %s", error)
            return None
