"""What a changed profile would run again of an existing run, and whether it would still be that run.

Compares the cache keys that `trainshed run` would compute with what the store has, without making anything; the roles of the keys
that differ (profiles/sections/roles.py) say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.errors import format_value
from profiles.files import run_files, state_files
from profiles.schema import Profile
from profiles.sections.base import Section, sections_in
from profiles.sections.roles import Role, closure, own_role, roles
from tasks import keys
from tasks.evaluation.held_out import EvaluationStep
from tasks.inputs import Lockfile, locate_runs, resolve
from tasks.reporting.comparison_page import flat_profile
from tasks.step import Context, Step
from tasks.steps.checkpoint import CheckpointStep
from tasks.steps.dataset import DatasetStep, with_steps
from tasks.steps.export import ExportStep
from tasks.steps.graphs import GraphsStep
from tasks.steps.reference import ReferenceStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.steps.training import TrainingStep
from tasks.store import runs
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

REUSED, RUNS, RESUMES, SKIPPED = "reused", "runs again", "resumes", "skipped"
UNEXPLAINED = {GraphsStep.name: "another compiler, processor or version of Trainshed"}


@dataclass(frozen=True)
class Change:
    """A key of the profile with another value than in the run's profile."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} {format_value(self.before)} → {format_value(self.after)}"


@dataclass(frozen=True)
class StepOutcome:
    """What would happen to a step: `reused`, `runs again`, `resumes` or `skipped`; and why."""

    step: str
    outcome: str
    reasons: Sequence[str] = ()


@dataclass(frozen=True)
class Rerun:
    """What running a changed profile under the name of an existing run would do."""

    run: str
    checkpoint: int  # step of its latest checkpoint; 0 without one
    last_step: int | None  # of the changed profile
    changes: Sequence[Change]
    steps: Sequence[StepOutcome]
    another_run: Sequence[str]  # why it would be another run; empty: the same one
    forkable: bool  # whether such another run can start from that checkpoint


def compare(store: Store, profile: Profile, name: str) -> Rerun:
    """Compare a changed profile, without `auto` values, with the run of this name.

    Raises:
        ProfileError: there is no such run, or an input of the profile does not exist.
        SourceError: a corrupted source file.
    """
    folder = runs.fetch(store, name)
    existing = runs.load_profile(folder)
    profile = locate_runs(profile.model_copy(update={"name": name}), store)
    profile = runs.recorded_compilation(store, profile)
    return _Comparison(store, folder, existing, profile).result()


def role_of(path: str) -> Role:
    """The role of a key by its path in a profile, such as `data.sources.0.path`."""
    *parents, key = (name for name in path.split(".") if not name.isdecimal())
    sections: list[type[Section]] = [Profile]
    for parent in parents:
        fields = {
            field.alias or name: field for each in sections for name, field in each.model_fields.items()
        }
        if own := own_role(fields[parent]):
            return own
        sections = sections_in(fields[parent].annotation)
    return {name: role for each in sections for name, role in roles(each).items()}[key]


class _Comparison:
    """The steps of a run, compared one after another."""

    def __init__(self, store: Store, folder: Path, existing: Profile, profile: Profile) -> None:
        self.store, self.existing, self.profile = store, existing, profile
        self.run = store.run_folder(profile.name)
        self.used = state_files.read_json(folder / run_files.ARTIFACTS) or {}
        recorded = self.run.read(run_files.LOCKFILE)
        lockfile = Lockfile.from_bytes(recorded, run_files.LOCKFILE).without_exports() if recorded else None
        inputs = resolve(profile, store, lockfile=lockfile)
        self.context = Context(profile, store, folder, resolved=inputs)
        self.steps: list[StepOutcome] = []

    def result(self) -> Rerun:
        graphs = self._compare(GraphsStep())
        weights = self._compare(CheckpointStep())
        tokenizer = self._compare(TokenizerStep())
        step = DatasetStep(tokenizer) if tokenizer else None
        dataset = self._compare(step) if step else None
        if step is None:
            self._follows(DatasetStep.name, TokenizerStep.name)
        if dataset and self.profile.train.epochs is not None:
            self.profile = with_steps(self.profile, dataset)
        if self.profile.precomputes_reference:
            if dataset and weights:
                self._compare(ReferenceStep(dataset, weights, graphs))
            else:
                self._follows(ReferenceStep.name, CheckpointStep.name if dataset else DatasetStep.name)
        checkpoint = runs.latest_checkpoint(self.run)
        differences = self._differences(tokenizer, step, checkpoint)
        if differences:
            self.steps.append(StepOutcome(TrainingStep.name, RUNS, differences))
            for later in (EvaluationStep, ExportStep):
                self._follows(later.name, TrainingStep.name)
        else:
            self._compare_training(checkpoint, tokenizer, dataset, weights)
        last = self.profile.train.steps
        forkable = bool(differences) and runs.can_fork(self.existing, self.profile, checkpoint)
        changes = self._changes()
        return Rerun(self.run.name, checkpoint, last, changes, self.steps, differences, forkable)

    def _changes(self) -> list[Change]:
        theirs, ours = flat_profile(self.existing), flat_profile(self.profile)
        paths = sorted(theirs.keys() | ours.keys())
        return [
            Change(path, theirs.get(path), ours.get(path))
            for path in paths
            if theirs.get(path) != ours.get(path)
        ]

    def _reasons(self, part: str) -> list[str]:
        """The changes of keys that a part's key contains, itself or through that of another part."""
        found = []
        for change in self._changes():
            role = role_of(change.key)
            if part in closure(role.direct(self.existing) | role.direct(self.profile)):
                found.append(str(change))
        return found

    def _compare(self, step: Step) -> Artifact | None:
        """Add a step's outcome; returns its artifact if the store has it."""
        if reason := step.skip_reason(self.profile):
            self.steps.append(StepOutcome(step.name, SKIPPED, [reason]))
            return None
        key = step.key(self.context)
        assert key is not None  # only those of plan, resolve and report are None
        if found := step.find(self.context, key):
            self.steps.append(StepOutcome(step.name, REUSED))
            return found
        if key in self.used.get(step.kind, ()):
            reasons = [f"the store lacks {step.kind} {key[:8]}…, or it is corrupted"]
        else:
            reasons = self._reasons(step.kind) or [UNEXPLAINED.get(step.name, "another version of Trainshed")]
        self.steps.append(StepOutcome(step.name, RUNS, reasons))
        return None

    def _follows(self, step: str, earlier: str) -> None:
        self.steps.append(StepOutcome(step, RUNS, [f"after {earlier}"]))

    def _differences(
        self, tokenizer: Artifact | None, step: DatasetStep | None, checkpoint: int
    ) -> Sequence[str]:
        """Why it would be another run; empty if it would be the same one."""
        context, parent = self.context, self.run.parent
        tokens = tokenizer.key if tokenizer else TokenizerStep().key(context)
        dataset = step.key(context) if step else None  # contains the tokenizer's
        weights = CheckpointStep().key(context) if self.profile.init.from_ else None
        origin = keys.digest([parent.identity, parent.step]) if parent else None
        identity = dataset and keys.run_identity(self.profile, tokens, dataset, weights, origin)
        inputs = {"tokenizer": tokens, "dataset": dataset, "checkpoint": weights}
        folder = context.run_folder
        found = runs.differences(self.run, self.existing, self.profile, folder, identity, inputs)
        part = "schedule" if identity == self.run.stored_identity else "identity"
        return found and (self._reasons(part) or found)

    def _compare_training(
        self, checkpoint: int, tokenizer: Artifact | None, dataset: Artifact | None, weights: Artifact | None
    ) -> None:
        """Add the outcomes of the last steps of the same run."""
        identity, train = self.run.stored_identity, self.profile.train
        assert identity is not None  # `runs.fetch` has found it
        name = self.run.name
        runs.reject_resume_of_finished(self.run, self.profile, self.context.run_folder)
        if checkpoint == train.steps:
            self.steps.append(StepOutcome(TrainingStep.name, REUSED))
        else:
            steps = "all" if train.steps is None else f"{train.steps:,}"
            resume = self.profile.checkpoint.resume
            start = resume if isinstance(resume, int) else checkpoint if resume == "newest" else 0
            reasons = [f"from step {start:,} of {steps}" if start else "it starts at its first step"]
            outcome = RESUMES if start else RUNS
            self.steps.append(StepOutcome(TrainingStep.name, outcome, [*reasons, *self._reasons("schedule")]))
            for later in (EvaluationStep.name, ExportStep.name):
                self._follows(later, TrainingStep.name)
            return
        key = keys.evaluation(name, identity, train, self.profile.evaluate)
        evaluated = self.store.artifacts.find(EvaluationStep.id(key))
        reasons = [] if evaluated else self._reasons("evaluate") or ["the store lacks its result"]
        self.steps.append(StepOutcome(EvaluationStep.name, REUSED if evaluated else RUNS, reasons))
        if tokenizer is None:
            self._follows(ExportStep.name, TokenizerStep.name)
            return
        self._compare(ExportStep(tokenizer, identity, weights))
