"""Checkpoints of a run: which to resume from, save and keep, and retries of failed saves.

A corrupted checkpoint is moved to quarantine, and the run resumes from the latest intact one.

Kept are the latest `checkpoint.keep`, the multiples of `checkpoint.keep_every` steps, and the one with the lowest validation
loss, if an evaluation fell on its step. A failed save is logged and retried after 1, 2, 4, ... steps while training continues.
The final save is retried for an hour, or within the grace period of a job that is being stopped; if it still fails, training
fails. It also fails if its first FIRST_SAVES saves have all failed, because what it trains could not be kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from modeling.supervision.stragglers import node_name
from modeling.training.learning_rate import learning_rate
from modeling.training.metrics import record_event
from modeling.training.preference.reference_model import ReferenceModel
from modeling.training.recovery.resume import (
    AppliedRequest,
    Rejected,
    ResumeRequest,
    check_same_model,
    reject_beyond_last_step,
    reject_other_run,
)
from modeling.training.recovery.row_upload import RowUpload
from modeling.training.trainer import Trainer
from parallel import Mesh, ShardedAdamW
from parallel.checkpoint import checkpoint, locations
from parallel.checkpoint.locations import Location
from parallel.checkpoint.saver import SaveFailed, Saver, StaleAttempt
from profiles.files import retry_policies, run_files, state_files
from profiles.schema import Profile
from profiles.sections.base import required

log = logging.getLogger(__name__)

MARKER_TYPES = {"step": int, "profile": dict, "validation_loss": int | float | None, "guard": dict}
FIRST_SAVES = 8  # failed saves, without a successful one, after which a run ends: 127 steps after the first


class SaveGivenUp(RuntimeError):
    """The final checkpoint could not be written, or none since the run was started."""


@dataclass(frozen=True)
class Start:
    """Which weights and state training starts from: its own checkpoint, initial weights, or the seed."""

    resumes: bool  # whether it resumes from its own latest checkpoint
    weights: Location | None = None  # else the checkpoint with its initial weights; None: from the seed


class Checkpoints:
    """Resumes from, saves and prunes a run's checkpoints. Every method is called on all ranks.

    Args:
        run: the run folder.
        location: folder or URI of its checkpoints.
        attempt: number of this attempt, which may complete checkpoints while RUN/attempt contains it; None: not checked.
    """

    def __init__(
        self, trainer: Trainer, optimizer: ShardedAdamW, run: Path, location: Location, attempt: int | None
    ) -> None:
        self.profile, self.leader, self.optimizer = trainer.profile, trainer.leader, optimizer
        self.mesh, self._reference = trainer.mesh, trainer.reference_model
        self.run, self.location, self.attempt = run, location, attempt
        self._saver = Saver(
            optimizer, asynchronous=self.profile.checkpoint.async_, fencing_check=self._check_fencing
        )
        self._rows = RowUpload(run, location) if self.leader else None
        self._saved: dict[int, float | None] = {}  # validation loss of each complete checkpoint; leader only
        self._run_identity = run_identity(run)
        self._step = 0  # step of the current or latest save
        self._validation_loss: float | None = None
        self._prune = True
        self._flush: Callable[[], None] = lambda: None
        self._last = False  # whether it is the final one
        self._failures = 0  # consecutive failed saves
        self._has_saved = False  # whether a save succeeded since the run was started
        request = ResumeRequest.of(self.profile.checkpoint)
        self._applied = AppliedRequest(run / run_files.RESUMED, location, request)  # leader only
        # By which the latest attempt claims the location, also from another machine; leader only.
        self._claim = ""

    def resume(
        self, weights: Path | None, adapters: Path | None = None, *, keep_optimizer: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """Load what the run starts from; returns the last finished step and its checkpoint's marker.

        Args:
            weights: checkpoint with the initial weights of a run that has no checkpoint yet.
            adapters: checkpoint with its initial LoRA updates of these weights; None: new ones.
            keep_optimizer: also load the optimizer's state from what it starts from.

        Raises:
            Rejected: there is no such checkpoint, it belongs to another model, or none is intact.
            LoadFailed: it cannot be read.
            StaleAttempt: another attempt has begun.
        """
        load_reference(weights, self._reference)
        start: Start = call_on_leader(self.mesh, lambda: self._prepare_start(weights))
        keep_optimizer &= str(start.weights) == str(weights)  # not if a request restarts from other weights
        if self.profile.lora.rank:
            load_base(weights, self.optimizer)
            if str(start.weights) == str(weights):
                start = replace(start, weights=adapters)  # they contain none
        step = 0
        marker: dict[str, Any] = {}
        if start.resumes:
            found = self._load_latest(self.profile.train.last_step)
            if found is None:
                call_on_leader(self.mesh, self._applied.reject_without_intact_checkpoint)
            step, marker = required(found)
            message = f"resumed from step {step}"
        elif start.weights is not None:
            try:
                checkpoint.load(start.weights, self.optimizer, weights_only=not keep_optimizer)
            except ValueError as error:
                raise Rejected(error) from None
            loaded = "weights and optimizer" if keep_optimizer else "weights"
            restarts = "the schedule restarts" if keep_optimizer else "optimizer and schedule restart"
            message = f"{loaded} from {start.weights}; {restarts}"
        else:
            message = f"from scratch, seed {self.profile.train.seed}"
            if self.profile.lora.rank:
                message = f"LoRA of rank {self.profile.lora.rank} on weights from {weights}"
        if self.leader:
            log.info(message)
        return step, marker

    def roll_back(self, step: int) -> tuple[int, dict[str, Any]] | None:
        """Load the latest intact checkpoint from before `step` and discard later ones.

        Returns:
            Its step and marker; None if there is none.

        Raises:
            LoadFailed: it cannot be read.
            StaleAttempt: another attempt has begun, which may have resumed from a later checkpoint.
        """
        call_on_leader(self.mesh, self._check_fencing)
        if self._saver.pending:
            self.complete()
        found = self._load_latest(step - 1)
        if found is not None:
            call_on_leader(self.mesh, self._check_fencing)  # again, because loading may take minutes
            for later in [saved for saved in self._saved if saved > found[0]]:
                self._discard(later)
        return found

    def _load_latest(self, last: int) -> tuple[int, dict[str, Any]] | None:
        """Load the latest intact checkpoint up to step `last`; moves corrupted ones to quarantine.

        Returns:
            Its step and marker; None if there is none.
        """
        while True:
            step = call_on_leader(self.mesh, lambda: max((s for s in self._saved if s <= last), default=None))
            if step is None:
                return None
            try:
                return step, checkpoint.load(self._path(step), self.optimizer)
            except locations.CorruptCheckpoint as error:
                reason = str(error)
                call_on_leader(self.mesh, lambda: self._quarantine(step, reason))  # noqa: B023
            except checkpoint.OtherOptimizer as error:
                fresh = "keep train.optimizer, or start fresh states with checkpoint.weights_only=true"
                raise Rejected(f"{error}; {fresh}") from None
            except ValueError as error:
                raise Rejected(error) from None

    def _quarantine(self, step: int, reason: str) -> None:
        """Move a corrupted checkpoint to quarantine; leader only."""
        self._check_fencing()
        moved = locations.quarantine(self.location, step, reason)
        self._saved.pop(step, None)
        log.warning(f"checkpoint step_{step} is corrupted: {reason}; moved to {moved}")
        record_event(self.run, "corrupted checkpoint", step=step, reason=f"{reason}; moved to {moved}")

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing a checkpoint."""
        return self._saver.writing

    def written(self, writers: float) -> bool:
        """Whether a pending save can be completed, equal on all ranks; `writers`: number of ranks `writing`."""
        return self._saver.pending and not writers

    def due(self, step: int) -> bool:
        """Whether to save after this step: at the interval, or to retry a failed save."""
        every = self.profile.checkpoint.every
        if not every:
            return False
        retry = self._failures and not self._saver.pending and step - self._step >= 2 ** (self._failures - 1)
        return step % every == 0 or bool(retry)

    def save(
        self,
        step: int,
        validation_loss: float | None = None,
        *,
        last: bool = False,
        prune: bool = True,
        wait: Callable[[float], bool],
        flush: Callable[[], None],
        **state: Any,
    ) -> None:
        """Write step_<n>; `checkpoint.async` only starts it, but a `last` checkpoint is complete on return.

        Args:
            prune: whether to remove, once it is complete, checkpoints that the profile does not keep.
            wait: called before another attempt at a `last` checkpoint: waits so many seconds, or until the job is being stopped;
                returns whether it is, alike on all ranks.
            flush: called before each attempt: writes buffered metrics rows, so that none up to the checkpoint is missing.
            state: JSON values to add to the marker.

        Raises:
            SaveGivenUp: every attempt at a `last` checkpoint failed, or FIRST_SAVES saves without a successful one.
            StaleAttempt: another attempt has begun.
        """
        if self._saver.pending:
            self.complete()
        self._prune, self._last, self._flush = prune, last, flush
        error = self._begin(step, validation_loss, state)
        if last or not self.profile.checkpoint.async_:
            error = error or self.complete()
        if not last:
            return
        pauses, attempts, stopping = [*retry_policies.LAST_SAVE.delays], 1, False
        while error is not None:
            if not pauses:
                raise self._save_given_up(step, error, attempts)
            if wait(pauses.pop(0)) and not stopping:
                stopping, pauses = True, [*retry_policies.STOPPED_SAVE.delays]
            error = self._begin(step, validation_loss, state) or self.complete()
            attempts += 1

    def close(self) -> None:
        """Complete a pending save."""
        if self._saver.pending:
            self.complete()
        self._saver.close()
        if self._rows:
            self._rows.close()

    def _begin(self, step: int, validation_loss: float | None, state: dict[str, Any]) -> SaveFailed | None:
        """Start a save; returns the error if it failed."""
        self._step, self._validation_loss = step, validation_loss
        self._flush()
        settings = self.profile.train
        marker = {
            "step": step,
            "consumed_samples": step * settings.global_batch_size,
            "schedule": {"step": step, "learning_rate": learning_rate(settings, step)},
            "validation_loss": validation_loss,
            "profile": self.profile.model_dump(mode="json"),
            "versions": {"trainshed": version("trainshed")},
            "run": run_files.owner(state_files.parse(self._run_identity) or {}),
            **state,
        }
        try:
            self._saver.begin(self._path(step), marker)
            if self._rows:
                self._rows.begin()
        except SaveFailed as error:
            return self._record_failure(error)
        return None

    def complete(self) -> SaveFailed | None:
        """Complete the pending save; returns the error if it failed."""
        if self._rows:
            self._rows.wait()  # the rows up to a complete checkpoint are in the store
        try:
            self._saver.finish()
        except SaveFailed as error:
            return self._record_failure(error)
        self._failures, self._has_saved = 0, True
        if self.leader:
            self._saved[self._step] = self._validation_loss
            self._applied.record_saved()
            settings = self.profile.checkpoint
            kept = retained(self._saved, settings.keep, settings.keep_every)
            for step in set(self._saved) - kept if self._prune else ():
                self._discard(step)
        return None

    def _record_failure(self, error: SaveFailed) -> SaveFailed:
        self._failures += 1
        if self.leader:
            log.warning(f"step {self._step} could not be saved: {error}; retrying")
            record_event(self.run, "not saved", step=self._step, reason=str(error))
        if not self._last and not self._has_saved and self._failures >= FIRST_SAVES:
            raise self._save_given_up(self._step, error, self._failures)
        return error

    def _save_given_up(self, step: int, error: SaveFailed, attempts: int) -> SaveGivenUp:
        message = f"step {step} could not be saved: {error}; gave up after {attempts} attempts"
        if not self.leader:
            return SaveGivenUp(message)
        latest = max(self._saved, default=None)
        where = f"step_{latest} in {self.location}" if latest is not None else "none"
        return SaveGivenUp(f"{message}; the latest complete checkpoint is {where}")

    def _path(self, step: int) -> Location:
        return locations.join(self.location, f"step_{step}")

    def _discard(self, step: int) -> None:
        del self._saved[step]
        self._saver.discard(self._path(step))

    def _prepare_start(self, weights: Location | None) -> Start:
        """Decide what to start from, and move later checkpoints aside; leader only.

        A request other than the default (newest, weights: false) is followed once, and recorded in RUN/resumed.json. Otherwise
        the run starts from the first of these that exists: its latest checkpoint since, what the last request started from,
        `weights`, the seed. So a retried attempt resumes from its own latest checkpoint.
        """
        self._check_fencing()
        for name in locations.discard_incomplete(self.location):
            log.info(f"removed incomplete checkpoint {name}")
        saved = dict(locations.complete_checkpoints(self.location))
        saved = self._applied.apply(saved)
        reject_beyond_last_step(self.profile, saved)
        self._saved = self._read_markers(saved)
        if self._saved:
            self._applied.record_saved()
            return Start(resumes=True)
        parent = (state_files.parse(self._run_identity) or {}).get("parent")
        self._applied.reject_lost_training(parent)
        return Start(resumes=False, weights=self._applied.weights or weights)

    def _claim_location(self) -> None:
        """Let only this attempt write checkpoints from now on; a warning if the claim cannot be written.

        Raises:
            StaleAttempt: a later attempt, from another machine, or another run of the name has claimed it before.
        """
        run = hashlib.sha256(self._run_identity.encode()).hexdigest()
        owner = locations.claimed_by(self.location)
        found = state_files.parse(owner)  # None without a claim, or if it was cut off
        if found and (found["run"] != run or found["attempt"] > (self.attempt or found["attempt"])):
            raise StaleAttempt(f"{self.location}: claimed by {_describe(owner)}; this attempt ends")
        claim = {"run": run, "attempt": self.attempt or 0, "node": node_name(), "id": uuid4().hex}
        try:
            locations.claim(self.location, json.dumps(claim))
            self._claim = json.dumps(claim)
        except Exception as error:  # of any storage
            log.warning(
                f"{self.location}: cannot be claimed by this attempt: {error!r}; retrying when it saves"
            )

    def _read_markers(self, saved: dict[int, Location]) -> dict[int, float | None]:
        """`comparable_loss` of each checkpoint, by step; one with a corrupted marker is moved to quarantine.

        A marker is corrupted, too, if it is of another step, or has values that cannot be resumed from.
        """
        losses: dict[int, float | None] = {}
        latest: dict[str, Any] = {}
        for step, source in saved.items():
            try:
                marker = locations.read_marker(source)
                wrong = state_files.wrong_key(marker, MARKER_TYPES)
                if wrong or marker.get("step", step) != step:
                    reason = f"invalid {wrong}" if wrong else f"it is of step {marker['step']}"
                    raise locations.CorruptCheckpoint(f"{source}: {locations.MARKER} is corrupted: {reason}")
            except locations.CorruptCheckpoint as error:
                self._quarantine(step, str(error))
            else:
                reject_other_run(state_files.parse(self._run_identity) or {}, marker, source)
                latest, losses[step] = marker, comparable_loss(marker, self.profile)
        if losses:
            check_same_model(self.profile, latest, saved[max(losses)])
        return losses

    def _check_fencing(self) -> None:
        """Raise StaleAttempt if a later attempt has begun, or the folder is gone or belongs to another run.

        A rank that is cut off from its launcher may keep running. On another machine it may see a copy of the run folder, whose
        number of attempts proves nothing: an attempt also claims the checkpoints' location, as soon as it can write there.
        """
        identity = run_identity(self.run)
        if identity != self._run_identity:
            if identity:
                raise StaleAttempt(f"{self.run}: now belongs to another run; this attempt ends")
            raise StaleAttempt(f"{self.run}: moved or removed during training; this attempt ends")
        if self.attempt is not None:
            path = self.run / run_files.ATTEMPT
            text = state_files.read_text(path)
            if text is None:
                raise StaleAttempt(f"{path}: removed during training; this attempt ends")
            if not text.isdecimal():
                raise RuntimeError(f"{path}: corrupted: {text!r} is not a number")
            if int(text) != self.attempt:
                reason = f"attempt {int(text)} has taken over the run"
                raise StaleAttempt(f"attempt {self.attempt} ends: {reason}")
        if not self._claim:
            self._claim_location()
        elif (owner := locations.claimed_by(self.location)) != self._claim:
            reason = f"claimed by {_describe(owner)}" if owner else "moved or removed during training"
            raise StaleAttempt(f"{self.location}: {reason}; this attempt ends")


def _describe(claim: str) -> str:
    found = state_files.parse(claim)
    return f"attempt {found['attempt']} on {found['node']}" if found else "another attempt"


def load_base(weights: Location | None, optimizer: ShardedAdamW) -> None:
    """Load the frozen weights that adapters update. Raises Rejected if missing or of another model."""
    if weights is None:
        raise Rejected("lora.rank: needs the weights that it updates; set init.from")
    try:
        checkpoint.load_frozen(weights, optimizer)
    except ValueError as error:
        raise Rejected(error) from None


def load_reference(weights: Location | None, model: ReferenceModel | None) -> None:
    """Load the reference model, if any. Raises Rejected if its weights are missing or another model's."""
    if model is None:
        return
    if weights is None:
        raise Rejected("objective.precompute_reference: the reference model has no weights; set init.from")
    try:
        model.load(weights)
    except ValueError as error:
        raise Rejected(error) from None


def run_identity(run: Path) -> str:
    """Contents of run.json, which differ between runs of the same name; empty without the file."""
    return state_files.read_text(run / run_files.IDENTITY) or ""


def comparable_loss(marker: Mapping[str, Any], profile: Profile) -> float | None:
    """Validation loss of a checkpoint; None if it was not evaluated, or on another number of batches."""
    evaluate = marker.get("profile", {}).get("evaluate", {})
    return marker.get("validation_loss") if evaluate.get("batches") == profile.evaluate.batches else None


def retained(saved: dict[int, float | None], keep: int, keep_every: int) -> set[int]:
    """Steps of the checkpoints to keep, given the validation loss of each.

    Args:
        keep: number of the latest ones to keep; 0 keeps all.
        keep_every: also keep multiples of this many steps; 0: none.
    """
    steps = set(sorted(saved)[-keep:]) if keep else set(saved)
    if keep_every:
        steps |= {step for step in saved if step % keep_every == 0}
    if losses := {step: loss for step, loss in saved.items() if loss is not None and math.isfinite(loss)}:
        steps.add(min(losses, key=losses.__getitem__))
    return steps


def call_on_leader(mesh: Mesh, function: Callable[[], Any]) -> Any:
    """Call a function on the leading rank; every rank returns its result or raises its error."""
    outcome: list[Any] = [None]
    if mesh.rank == 0:
        try:
            outcome = [function()]
        except (ValueError, RuntimeError) as error:
            outcome = [error]
        except Exception as error:  # raised by any storage; may not be picklable
            log.exception("rank 0 failed")
            outcome = [RuntimeError(f"rank 0: {error!r}")]
    if mesh.host is not None:
        dist.broadcast_object_list(outcome, src=0, group=mesh.host)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
