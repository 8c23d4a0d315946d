"""How a round of continual pretraining is judged: losses and scores before and after, and its gates.

All held-out sets are evaluated by one job before and one after, on the round's cluster; each lm-eval task is a job of its own.
The same table is in the final state, the alert, the run's report and Prefect's UI.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flows.runner import Runner
from flows.ui import pages
from flows.ui.artifacts import PrefectArtifact, show_table
from modeling.training.metrics import OF_TASKS
from profiles import resolve
from profiles.errors import ProfileError
from profiles.files import run_files
from profiles.local_paths import local_path
from profiles.rules.continual import stand_in_data
from profiles.schema import Continual, Profile
from profiles.sections.base import required
from tasks import keys
from tasks.continual import gates, held_out, page, rounds, series, stand_in
from tasks.continual.gates import Verdict
from tasks.evaluation import request
from tasks.evaluation.checkpoints import TaskStep, metrics_of, require_harness, require_tasks, scratch_name
from tasks.evaluation.held_out import NotFinite, SetsEvaluationStep
from tasks.step import Context, Step
from tasks.steps.dataset import read_file
from tasks.store import runs
from tasks.store.artifacts import Artifact
from tasks.store.run_folder import CheckpointId
from tasks.store.store import Store

# Keys of `train` that fit a cluster: the promoted model is evaluated with those of the round.
PER_CLUSTER = {*keys.NOT_MATHEMATICS, "global_batch_size"}
# Metrics of a task that gates are on, the first that it has; else its first one.
SCORES = ("acc", "exact_match")
log = logging.getLogger(__name__)


@dataclass
class Judge:
    """Evaluates a round's held-out sets and tasks, and decides by the gates of its profile."""

    runner: Runner
    promoted: series.Promoted
    tokenizer: Artifact
    dataset: Artifact  # the round's, whose validation split has all sets
    origin: str  # of the sets that the round holds out
    weights: Artifact | None = None  # that LoRA updates
    _before: gates.Sets = field(default_factory=dict, init=False)
    _scores: dict[str, float] = field(default_factory=dict, init=False)

    def evaluate_promoted(self, base: Path) -> None:
        """Evaluate the promoted model, in the run folder `base`, on the round's cluster."""
        checkpoint = Path(run_files.checkpoint(series.latest_step(self.runner.context.store, self.promoted)))
        profile, file = on_cluster_of(self.runner.context.profile, base, "evaluate")
        context = replace(self.runner.context, profile=profile, folder=base)
        what = keys.digest([self.promoted.identity, checkpoint.name, self._sets])
        step = SetsEvaluationStep(self.dataset, what, weights=self.weights, profile_file=file)
        self._before = self._run(step, context).summary["sets"]
        self._scores = self._run_tasks(context)

    def judge(self, identity: str, graphs: Artifact | None) -> tuple[Verdict, Artifact]:
        """Evaluate the trained round, and decide. Returns its evaluation too.

        Raises NotFinite if a loss is not a number; the round is then recorded as not promoted.
        """
        context, run = self.runner.context, self.runner.context.profile
        try:
            what = keys.digest([identity, self._sets])
            step = SetsEvaluationStep(self.dataset, what, graphs, self.weights)
            evaluated = self._run(step)
        except NotFinite as error:
            self._record(Verdict([], str(error)))
            series.record_not_promoted(context.store, run.name)
            raise
        scores = self._scores, self._run_tasks(context)
        after = evaluated.summary["sets"]
        verdict = gates.judge(run.continual.gates, self._before, after, self.origin, scores)
        self._record(verdict)
        rows = [dict(zip(gates.COLUMNS, row.cells, strict=True)) for row in verdict.rows]
        show_table(pages.GATES, f"Gates of {run.name}", rows)
        log.info("losses before and after:\n%s", verdict.text)
        return verdict, evaluated

    def _run(self, step: Step, context: Context | None = None) -> Artifact:
        return required(self.runner.run(step, context))

    @property
    def _sets(self) -> str:
        """Digest of the held-out sets: attempts of a round with other training data have the same."""
        contents = read_file(self.runner.context.store, self.dataset)
        return keys.digest([contents["validation"], contents["sources"]])

    def _record(self, verdict: Verdict) -> None:
        profile, store = self.runner.context.profile, self.runner.context.store
        rounds.record(store, profile.name, self.promoted, verdict, self.dataset.summary)

    def _run_tasks(self, context: Context) -> dict[str, float]:
        """Score of each task that a gate is on, of the latest checkpoint of the context's run."""
        settings = self.runner.context.profile.continual
        names, files = gates.tasks_of(settings.gates), _task_files(settings)
        run = context.store.run_folder(context.run_folder.name)
        checkpoint = CheckpointId.of(run, run.checkpoint_steps()[-1]) if names else None
        if checkpoint is None:
            return {}
        try:
            found = {}
            for name in names:
                task = TaskStep(name, checkpoint, self.tokenizer, self.weights, files)
                found[name] = _score(name, self._run(task, context))
            return found
        finally:
            context.store.remove_scratch_folder(scratch_name(run.name, checkpoint))


def check_gates(store: Store, profile: Profile, promoted: series.Promoted) -> None:
    """Check what gates are on, before a round reads new data. Raises ProfileError with the nearest names."""
    held_out.check_fraction(store, profile)
    settings, origin = profile.continual.gates, held_out.round_origin(promoted.next_round)
    contents = series.held_out_sets(store, profile.name, promoted)
    length = profile.train.sequence_length
    stand_in_sets = held_out.expected_sets(stand_in_data(profile), held_out.STAND_IN)
    known = [*contents.evaluated(length), *stand_in_sets, *held_out.expected_sets(profile.data, origin)]
    gates.check_gates(settings, known, origin)
    if settings == Continual().gates and stand_in.unknown_weights(store, profile, promoted):
        raise ProfileError("continual.gates.0.on", gates.OLD, gates.UNKNOWN_OLD)
    tasks = gates.tasks_of(settings)
    if not tasks:
        return
    try:
        require_harness(tasks, "")
        require_tasks(tasks, _task_files(profile.continual))
    except ProfileError as error:
        number = next(i for i, gate in enumerate(settings) if gate.on == f"{gates.TASK}{error.value}")
        choices = [f"{gates.TASK}{choice}" for choice in error.choices]
        raise ProfileError(
            f"continual.gates.{number}.on", settings[number].on, error.reason, choices
        ) from error


def _task_files(settings: Continual) -> Path | None:
    """The folder with the user's own task files; None without one."""
    return local_path(settings.include) if settings.include else None


def missing_held_out(profile: Profile, contents: Mapping[str, object], origin: str) -> str | None:
    """Why a round's new loss cannot be evaluated yet; None if it can be, or no gate needs it.

    Raises ProfileError for a gate on a set that the round's dataset does not have, or that is too short to be evaluated.
    """
    found, length = held_out.HeldOut.of(contents), profile.train.sequence_length
    settings = profile.continual.gates
    names = found.evaluated(length)
    if not any(held_out.origin_of(name) == origin for name in names):
        waiting = {gates.NEW, origin, *gates.selections(held_out.expected_sets(profile.data, origin), origin)}
        if any(gate.on in waiting - gates.selections(names, origin).keys() for gate in settings):
            tokens = found.tokens(origin)
            return f"the new data holds out {tokens:,} tokens, fewer than one window of {length:,} + 1"
    gates.check_gates(settings, names, origin, [name for name in found.names if name not in names])
    return None


def show_series(store: Store, name: str) -> None:
    """Update the series' page in the store and in Prefect's UI; errors of the display never stop a round."""
    try:
        found = rounds.read_series(store, name)
        location = page.write(store, found)
    except Exception as error:
        log.warning("series %s: its page cannot be written: %s", name, error)
        return
    artifact = PrefectArtifact("markdown", pages.SERIES, f"Series {name}: losses by round")
    artifact.update(lambda: pages.series_markdown(found, location), now=True)


def _score(name: str, result: Artifact) -> float:
    """The score of a task, of which gates are on one metric."""
    prefix = f"{OF_TASKS}{name}/"
    found = {
        metric.removeprefix(prefix): value
        for metric, value in metrics_of(result.summary).items()
        if metric.startswith(prefix) and "_stderr" not in metric
    }
    chosen: Sequence[str] = [metric for metric in SCORES if metric in found] or sorted(found)
    if not chosen:
        raise ProfileError("continual.gates", f"{gates.TASK}{name}", "has no score; use another task")
    log.info("%s%s: %s %.4f", gates.TASK, name, chosen[0], found[chosen[0]])
    return found[chosen[0]]


def on_cluster_of(run: Profile, base: Path, job: str) -> tuple[Profile, Path]:
    """The profile of the promoted model's run folder, with the cluster, topology and batch of a round.

    Returns the file that it was written to for a job, too. Raises ProfileError if they do not fit its other settings.
    """
    promoted = runs.load_profile(base)
    train = promoted.train.model_copy(update={name: getattr(run.train, name) for name in PER_CLUSTER})
    sections = {name: getattr(run, name) for name in ("cluster", "parallel", "compile")}
    profile = promoted.model_copy(update={**sections, "train": train})
    resolve.check(profile)
    return profile, request.write_profile(base, job, profile)
