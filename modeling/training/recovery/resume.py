"""Resume requests: the checkpoint that a profile asks for, and rejection of checkpoints of other runs.

Which checkpoint a run starts from, and what happens to a corrupted one, is decided in checkpoints.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from modeling.training.metrics import checkpoint_completed
from parallel.checkpoint import locations
from parallel.checkpoint.locations import Location
from profiles.files import run_files, state_files
from profiles.schema import Checkpoint, Profile

log = logging.getLogger(__name__)


class Rejected(ValueError):
    """Training cannot start as requested: a checkpoint is missing, corrupted or another model's."""


@dataclass(frozen=True)
class ResumeRequest:
    """What `checkpoint.resume` and `checkpoint.weights_only` ask for."""

    resume: str | int = "newest"
    weights: bool = False  # its name in resumed.json

    @classmethod
    def of(cls, settings: Checkpoint) -> Self:
        return cls(settings.resume, settings.weights_only)

    def step(self, saved: dict[int, Location]) -> int | None:
        """Requested checkpoint's step, None if there is none to use. Raises Rejected if it is not complete."""
        if self.resume == "none":
            return None
        if self.resume == "newest":
            return max(saved, default=None)
        if self.resume not in saved:
            available = ", ".join(map(str, saved)) or "none"
            raise Rejected(
                f"checkpoint.resume = {self.resume}: is not a complete checkpoint; complete checkpoints are {available}"
            )
        return int(self.resume)


class AppliedRequest:
    """RUN/resumed.json: the request that training applied last, so that a request is applied once.

        {request: the request,
         weights: checkpoint whose weights it started from, or null,
         saved: whether a checkpoint has been completed since, also without a request,
         quarantined: names in quarantine when it was applied; only later ones mean that training was lost,
         moving: {steps, to}: checkpoints to move aside, until they are moved}

    Args:
        path: of the file.
        location: folder or URI of the run's checkpoints.
        request: the profile's.
    """

    def __init__(self, path: Path, location: Location, request: ResumeRequest) -> None:
        self._path, self._location, self._request = path, location, request
        self._record: dict[str, Any] = {}

    @property
    def weights(self) -> str | None:
        """The checkpoint whose weights the run started from; None if it is not one of its own."""
        return self._record.get("weights")

    def apply(self, saved: dict[int, Location]) -> dict[int, Location]:
        """Apply a new request: move aside the checkpoints after the requested one, or all for weights.

        Recorded first, so that the next attempt completes a move that is interrupted.

        Returns:
            The checkpoints that remain.
        """
        is_default = self._request == ResumeRequest()
        self._record = self._read(required=not is_default or not saved)
        saved = self._complete_move(saved)
        request, applied = asdict(self._request), self._record.get("request")
        if is_default and saved and applied not in (None, request):
            # A later request is new, also one equal to the last.
            self._record = {"request": request, "weights": None, "saved": True}
            self._write()
        if is_default or applied == request:
            return saved
        step = self._request.step(saved)
        if step is None and self._request.resume != "none":
            self.reject_lost_training()
        last_kept = 0 if step is None or self._request.weights else step
        self._record = {"request": request, "weights": None, "saved": False}
        if step is not None or self._request.resume == "none":
            self._record["quarantined"] = locations.quarantined(self._location)
        if later := [s for s in saved if s > last_kept]:
            aside = locations.free_aside(self._location)
            self._record["moving"] = {"steps": later, "to": str(aside)}
            if self._request.weights and step is not None:
                identity = state_files.read(self._path.parent / run_files.IDENTITY)
                with suppress(locations.CorruptCheckpoint):  # rejected when it is loaded
                    marker = locations.read_marker(saved[step])
                    reject_other_run(state_files.parse(identity or b"") or {}, marker, saved[step])
                self._record["weights"] = str(locations.join(aside, f"step_{step}"))
        self._write()
        return self._complete_move(saved)

    def _complete_move(self, saved: dict[int, Location]) -> dict[int, Location]:
        """Move aside the recorded checkpoints; returns those that remain."""
        if "moving" not in self._record:
            return saved
        moving = self._record.pop("moving")
        locations.move_aside(self._location, [s for s in moving["steps"] if s in saved], moving["to"])
        names = ", ".join(f"step_{s}" for s in moving["steps"])
        log.info(f"moved to {locations.name_of(moving['to'])}: {names}")
        self._write()
        return {s: at for s, at in saved.items() if s not in moving["steps"]}

    def record_saved(self) -> None:
        """Record that the run has a complete checkpoint: without one later, it is rejected, not started over."""
        if self._record.get("saved"):
            return
        try:
            if state_files.exists(self._path.parent):  # a moved run folder is not recreated
                self._record["saved"] = True
                self._write()
        except OSError as error:
            self._record["saved"] = False
            log.warning(f"{self._path}: cannot be written: {error}; retrying after the next save")

    def reject_lost_training(self, parent: Mapping[str, Any] | None = None) -> None:
        """Raise Rejected for a run that has lost its checkpoints, unless a start without is requested.

        Args:
            parent: the run and step that it was forked from, if it was.
        """
        if {*locations.quarantined(self._location)} - {*self._record.get("quarantined", ())}:
            self.reject_without_intact_checkpoint()
        if parent and "quarantined" not in self._record and not self._record.get("saved"):
            raise Rejected(
                f"{self._location}: the checkpoint of the parent, {parent['run']}@{parent['step']}, is missing; restore it, or "
                "fork again under another name"
            )
        if self._has_saved():
            raise Rejected(
                f"{_describe(self._location)}: no checkpoint, although this run has saved some: mount or restore the folder, "
                f"or {self._way_to_start_over()} to train from the beginning"
            )

    def reject_without_intact_checkpoint(self) -> NoReturn:
        names = ", ".join(locations.quarantined(self._location))
        raise Rejected(
            f"{self._location}: no intact checkpoint; {names} are corrupted, in {locations.QUARANTINE}: restore a checkpoint "
            f"from a backup, or {self._way_to_start_over()} to train from the beginning"
        )

    def _has_saved(self) -> bool:
        """Whether the run has completed a checkpoint since it was last started over."""
        saved = self._record.get("saved")
        return checkpoint_completed(self._path.parent) if saved is None else saved

    def _way_to_start_over(self) -> str:
        if self._request.resume != "none":
            return "set checkpoint.resume=none"
        return f"remove {self._path}, so that checkpoint.resume=none is applied again,"

    def _write(self) -> None:
        state_files.write(self._path, json.dumps(self._record))

    def _read(self, *, required: bool) -> dict[str, Any]:
        """Contents of the file; empty without one. Raises Rejected if corrupted and `required`.

        If it is corrupted and not `required`, the run has checkpoints; the file stays as it is.
        """
        text = state_files.read_text(self._path)
        if text is None:
            return {}
        applied = state_files.parse(text)
        if applied is None and not required:
            return {"saved": True}
        if applied is None:  # applying the request again would repeat all training since
            raise Rejected(
                f"{self._path}: corrupted, so it is unknown whether checkpoint.resume and checkpoint.weights_only were "
                "applied already; remove it to apply them now, or remove these keys to resume from the latest checkpoint"
            )
        return applied


def _describe(location: Location) -> str:
    """A location, and where it points to if it is a symbolic link."""
    if isinstance(location, Path) and state_files.is_link(location):
        return f"{location} (a link to {location.readlink()})"
    return str(location)


def reject_beyond_last_step(profile: Profile, saved: dict[int, Location]) -> None:
    """Raise `Rejected` for a checkpoint of a step after the run's last: another run's, or copied by hand."""
    for step, source in saved.items():
        if step > profile.train.last_step:
            raise Rejected(
                f"{source}: its step is after the run's last step, train.steps = {profile.train.steps}; raise train.steps to "
                "continue from it, or move the folder away"
            )


def reject_other_run(record: Mapping[str, Any], marker: Mapping[str, Any], source: Location) -> None:
    """Raise `Rejected` for a checkpoint that another run has written.

    A replaced run has left it behind, or it was copied by hand.

    Args:
        record: contents of run.json.
    """
    if run_files.is_other_run(marker.get("run"), record):
        name = marker.get("profile", {}).get("name")
        raise Rejected(
            f"{source}: written by another run{f', {name}' if name else ''}; move the folder away, or start a run from its "
            "weights with init.from"
        )


def check_same_model(profile: Profile, marker: dict[str, Any], source: Location) -> None:
    """Raise `Rejected` with the first model field in which a checkpoint differs from the profile."""
    ours = profile.model.model_dump(mode="json")
    theirs = marker.get("profile", {}).get("model", ours)
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise Rejected(
                f"{locations.name_of(source)} belongs to another model: model.{name} is {theirs.get(name)} in the "
                f"checkpoint, {ours.get(name)} in the profile"
            )
