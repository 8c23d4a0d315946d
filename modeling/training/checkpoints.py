"""A run's checkpoints: what it goes on from, what a checkpoint says, which are kept, what follows when one fails.

Kept are the newest `checkpoint.keep`, those of every `checkpoint.keep_every` steps, and the one with the lowest validation
loss, where an evaluation fell on its step. A save that fails is reported, training goes on, and it is tried again after 1, 2, 4
and more steps; only where the last one cannot be written either does the run end badly.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from modeling.training.anomalies import record
from modeling.training.learning_rate import learning_rate
from modeling.training.trainer import Trainer
from parallel import ZeRO1
from parallel.checkpoint import checkpoint
from parallel.checkpoint.checkpoint import Location
from profiles.schema import Profile

log = logging.getLogger("trainshed")


class Rejected(ValueError):
    """What the user wants to go on from is not there, or is of another model."""


PAUSES = (
    1.0,
    2.0,
    4.0,
    8.0,
)  # seconds between attempts at the last save; within the grace of a job that is to end


class CannotSave(RuntimeError):
    """The last checkpoint could not be written, and there is no later step to try it again."""


@dataclass(frozen=True)
class Start:
    """What a run goes on from: a checkpoint, or nothing; of it all, or the weights alone; and how that is said."""

    source: Location | None
    weights_only: bool
    step: int
    said: str


class Checkpoints:
    """Reads and writes a run's checkpoints; all ranks call all of it.

    Args:
        trainer: what is trained.
        optimizer: of its parameters.
        run: the run's folder.
        place: where its checkpoints lie; a folder or URI.
        attempt: number of this attempt, where they are counted: what it writes counts while RUN/attempt says the same.
    """

    def __init__(
        self, trainer: Trainer, optimizer: ZeRO1, run: Path, place: Location, attempt: int | None
    ) -> None:
        self.profile, self.leader, self.optimizer = trainer.profile, trainer.mesh.rank == 0, optimizer
        self.run, self.place, self.attempt = run, place, attempt
        self._saver = checkpoint.Saver(
            optimizer, asynchronous=self.profile.checkpoint.async_, fencing_check=self._require_current
        )
        self._saved: dict[int, float | None] = {}  # validation loss of each complete one; known to the leader
        self._whose = whose(run)
        self._step = 0  # of the save under way, or of the last one
        self._loss: float | None = None  # its validation loss
        self._failures = 0  # in a row

    def resume(self, weights: Path | None) -> tuple[int, dict[str, Any]]:
        """Load what the run goes on from, say so, and return the step that is done and what else its checkpoint says.

        Args:
            weights: checkpoint to take the weights from where the run has none of its own.

        Raises:
            Rejected: there is no such checkpoint, or it is of another model.
            StaleAttempt: another attempt has begun.
        """
        start = from_leader(self.leader, lambda: self._choose(weights))
        about: dict[str, Any] = {}
        if start.source is not None:
            about = checkpoint.read_marker(start.source)
            if not start.weights_only:
                refuse_another_model(self.profile, about, start.source)
            try:
                checkpoint.load(start.source, self.optimizer, weights_only=start.weights_only)
            except ValueError as reason:
                raise Rejected(reason) from None
        if self.leader:
            log.info(start.said)
        return start.step, {} if start.weights_only else about

    def go_back(self, bad: int) -> tuple[int, dict[str, Any]] | None:
        """Load the newest checkpoint from before step `bad` and remove later ones, which are of what is given up.

        Returns:
            Its step and what else it says; None where there is none.
        """
        if self._saver.pending:
            self._finish()
        step = from_leader(
            self.leader, lambda: max((step for step in self._saved if step < bad), default=None)
        )
        if step is None:
            return None
        about = checkpoint.load(checkpoint.join(self.place, f"step_{step}"), self.optimizer)
        for later in [each for each in self._saved if each > step]:
            self._discard(later)
        return step, about

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing a checkpoint."""
        return self._saver.writing

    def poll(self, writing: float) -> None:
        """Complete the save under way, if there is one and no rank writes any more.

        Args:
            writing: ranks that said `writing`, summed; alike on all ranks.
        """
        if self._saver.pending and not writing:
            self._finish()

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step: at its interval, or because the last save failed."""
        every = self.profile.checkpoint.every
        if not every:
            return False
        again = self._failures and not self._saver.pending and step - self._step >= 2 ** (self._failures - 1)
        return step % every == 0 or bool(again)

    def save(
        self, step: int, validation_loss: float | None = None, *, last: bool = False, **others: Any
    ) -> None:
        """Write step_<n>, or with `checkpoint.async` begin to; a `last` one is complete on return.

        Args:
            others: JSON values that the checkpoint is to say besides.

        Raises:
            CannotSave: a `last` one failed, as often as it was tried.
            StaleAttempt: another attempt has begun.
        """
        if self._saver.pending:
            self._finish()
        reason = self._begin(step, validation_loss, others)
        if last or not self.profile.checkpoint.async_:
            reason = reason or self._finish()
        if not last:
            return
        for pause in PAUSES:
            if reason is None:
                return
            time.sleep(pause)
            reason = self._begin(step, validation_loss, others) or self._finish()
        if reason is not None:
            good = max(self._saved, default=None)  # as the leader knows
            rest = (
                "there is no good one"
                if good is None
                else f"the last good one is step_{good} in {self.place}"
            )
            raise CannotSave(
                f"step {step} could not be saved: {reason}; it was tried {len(PAUSES) + 1} times, and is the last"
                + (f"; {rest}" if self.leader else "")
            )

    def close(self) -> None:
        """Complete what is under way."""
        if self._saver.pending:
            self._finish()
        self._saver.close()

    def _begin(
        self, step: int, validation_loss: float | None, others: dict[str, Any]
    ) -> checkpoint.SaveFailed | None:
        """Begin to write; why that failed, where it did."""
        self._step, self._loss = step, validation_loss
        settings = self.profile.train
        about = {
            "step": step,
            "consumed_samples": step * settings.global_batch_size,
            "schedule": {"step": step, "learning_rate": learning_rate(settings, step)},
            "validation_loss": validation_loss,
            "profile": self.profile.model_dump(mode="json"),
            "versions": {"trainshed": version("trainshed")},
            **others,
        }
        try:
            self._saver.begin(checkpoint.join(self.place, f"step_{step}"), about)
        except checkpoint.SaveFailed as reason:
            return self._failed(reason)
        return None

    def _finish(self) -> checkpoint.SaveFailed | None:
        """Complete the save under way; why that failed, where it did."""
        try:
            self._saver.finish()
        except checkpoint.SaveFailed as reason:
            return self._failed(reason)
        self._failures = 0
        if self.leader:
            self._saved[self._step] = self._loss
            self._retain()
        return None

    def _failed(self, reason: checkpoint.SaveFailed) -> checkpoint.SaveFailed:
        self._failures += 1
        if self.leader:
            log.warning(f"warning: step {self._step} could not be saved: {reason}; it is tried again")
            record(self.run, "not saved", step=self._step, reason=str(reason))
        return reason

    def _retain(self) -> None:
        """Remove what is not to be kept; called on the leader."""
        settings = self.profile.checkpoint
        for step in set(self._saved) - kept(self._saved, settings.keep, settings.keep_every):
            self._discard(step)

    def _discard(self, step: int) -> None:
        del self._saved[step]
        self._saver.discard(checkpoint.join(self.place, f"step_{step}"))

    def _choose(self, weights: Path | None) -> Start:
        """What to go on from, on the leader, which makes the place ready for it.

        A wish other than "newest" is followed once, which RUN/resumed.json remembers: an attempt after that goes on from
        its own newest checkpoint. Checkpoints that are later than where it begins are moved aside, not overwritten.
        """
        self._require_current()
        for name in checkpoint.discard_incomplete(self.place):
            log.info(f"removed {name}, whose saving was not finished")
        saved = dict(checkpoint.complete_checkpoints(self.place))
        settings, note = self.profile.checkpoint, self.run / "resumed.json"
        wish = {"resume": settings.resume, "weights": settings.weights}
        done = json.loads(note.read_text()) if note.exists() else {}
        source: Location | None = weights
        if wish != {"resume": "newest", "weights": False} and done.get("wish") != wish:
            if isinstance(settings.resume, int) and settings.resume not in saved:
                valid = ", ".join(map(str, saved)) or "none"
                raise Rejected(f"checkpoint.resume = {settings.resume}: complete checkpoints are {valid}")
            begin = None
            if saved and settings.resume != "none":
                begin = settings.resume if isinstance(settings.resume, int) else max(saved)
            last = begin if begin is not None and not settings.weights else 0
            later = sorted((step for step in saved if step > last), key=lambda step: step == begin)
            if later:
                aside = checkpoint.move_aside(self.place, later)
                log.info(
                    f"moved to {checkpoint.name_of(aside)}: {', '.join(f'step_{step}' for step in sorted(later))}"
                )
                if settings.weights and begin is not None:
                    source = checkpoint.join(aside, f"step_{begin}")
            done = {"wish": wish, "weights": str(source) if settings.weights and source else None}
            note.write_text(json.dumps(done))
            saved = {step: where for step, where in saved.items() if step <= last}
        elif done.get("wish") == wish and done["weights"]:
            source = done["weights"]
        self._saved = {
            step: checkpoint.read_marker(where).get("validation_loss") for step, where in saved.items()
        }
        if saved:
            return Start(saved[max(saved)], False, max(saved), f"resumed from step {max(saved)}")
        if source is not None:
            said = f"weights from {source}; the optimizer and the schedule start anew"
            return Start(source, True, 0, said)
        return Start(None, False, 0, f"from scratch, seed {self.profile.train.seed}")

    def _require_current(self) -> None:
        """Raise `StaleAttempt` where a later attempt has begun, or the folder is another run's by now.

        A rank that is cut off from its launcher may still be running.
        """
        if whose(self.run) != self._whose:
            raise checkpoint.StaleAttempt(f"this run ends: {self.run} is another run's by now")
        if self.attempt is None:
            return
        current = int((self.run / "attempt").read_text())
        if current != self.attempt:
            reason = f"attempt {self.attempt} ends: attempt {current} has taken over the run"
            raise checkpoint.StaleAttempt(reason)


def whose(run: Path) -> bytes:
    """What tells the run in this folder from others of its name; empty where nothing does."""
    note = run / "run.json"
    return note.read_bytes() if note.exists() else b""


def kept(saved: dict[int, float | None], newest: int, every: int) -> set[int]:
    """The steps to keep of those with these validation losses; 0 newest keeps all, 0 every none for good."""
    keep = set(sorted(saved)[-newest:]) if newest else set(saved)
    if every:
        keep |= {step for step in saved if step % every == 0}
    losses = {step: loss for step, loss in saved.items() if loss is not None}
    if losses:
        keep.add(min(losses, key=losses.__getitem__))
    return keep


def refuse_another_model(profile: Profile, about: dict[str, Any], source: Location) -> None:
    """Raise `Rejected` with the first field in which a checkpoint's model differs from the profile's."""
    ours = profile.model.model_dump(mode="json")
    theirs = about.get("profile", {}).get("model", ours)
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            raise Rejected(
                f"{checkpoint.name_of(source)} is of another model: model.{name} is {theirs.get(name)} there, "
                f"{ours.get(name)} in the profile"
            )


def from_leader(leader: bool, act: Callable[[], Any]) -> Any:
    """What `act` returns on the leading rank, on every rank; where it raises, every rank raises."""
    outcome: list[Any] = [None]
    if leader:
        try:
            outcome = [act()]
        except (ValueError, RuntimeError) as error:
            outcome = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
