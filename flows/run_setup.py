"""What a flow does around its steps: input resolution, plan check, run folder, training."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as replace_fields
from pathlib import Path

from prefect.runtime import flow_run

from flows.alerts.events import alerts
from flows.runner import Runner
from flows.server.secrets import hub_token
from flows.start_checks import RunCommand, admit, suggest_commands
from flows.ui.overview import Overview
from flows.ui.progress import ProgressReporter, TrainingProgress
from flows.ui.summaries import inputs_summary, plan_summary
from modeling.planning import planner
from profiles import resolve as resolve_profile
from profiles.check import with_value
from profiles.files import run_files, state_files
from profiles.files.retry_policies import STEP
from profiles.schema import Profile
from tasks import keys
from tasks.fork import rate_warnings
from tasks.inputs import Inputs, Lockfile, resolve
from tasks.reporting.advice import data_warnings
from tasks.step import Context
from tasks.steps.graphs import GraphsStep
from tasks.steps.training import TrainingStep
from tasks.store import activities, runs
from tasks.store.artifacts import Artifact
from tasks.store.run_folder import Parent, RunFolder
from tasks.store.store import Store, open_store
from tasks.tracking.process import labels_of, results, tracking

log = logging.getLogger(__name__)

# An attempt itself retries for four minutes, and waits out the hub's rate limits.
RESOLVE_RETRIES = len(STEP.delays)


def flow_context(profile: Profile, store: Store, folder: Path | None = None) -> Context:
    """Context for the steps of the current flow run, with the hub token if the profile needs one."""
    return Context(profile, store, folder, token=hub_token(profile), flow_run=str(flow_run.id))


@contextmanager
def admitted(
    profile: Profile, command: RunCommand, until: str = "", *, replace: bool = False
) -> Iterator[tuple[Runner, Parent | None]]:
    """Admit a run to its store, and hold its name for the block.

    Yields its runner, which ends with the step `until`, and the checkpoint that it is forked from. Errors: see `admit`.
    """
    store = open_store(command.store, profile.cluster.work_dir or "store")
    if not replace and activities.holder(store, "run", profile.name) is not None:
        # Rather than wait for a run that this one cannot continue.
        admit(store, profile, command, replace=False)
    with activities.begin(store, "run", profile.name) as lock:
        run, parent = admit(store, profile, command, replace=replace)
        with Runner(flow_context(run, store), lock, until) as runner:
            with runner.until_reached():
                yield runner, parent
            if runner.context.folder is None:  # ended with a step before the run was opened
                runner.keep_used(store.run_folder(run.name).path)


def read_lockfile(store: Store, name: str, parent: Parent | None = None) -> Lockfile | None:
    """The lockfile of a run, or of its parent if the run is new; None if there is none or it is empty.

    Raises CorruptedState.
    """
    for run in map(store.run_folder, (name, parent.run) if parent else (name,)):
        if data := run.read(run_files.LOCKFILE):
            return Lockfile.from_bytes(data, run.location(run_files.LOCKFILE))
    return None


def resolve_inputs(
    runner: Runner, lockfile: Lockfile | None, *, keep_exports: bool = False, data_only: bool = False
) -> None:
    """Resolve the run's inputs as a task, reusing what a lockfile pins; later steps use the result.

    Args:
        keep_exports: also reuse pins of runs' exports.
        data_only: see `inputs.resolve`.
    """
    context = runner.context
    progress = ProgressReporter("inputs", f"{context.profile.name}: progress of resolve")

    def work() -> Inputs:
        known = lockfile if lockfile is None or keep_exports else lockfile.without_exports()
        found = resolve(context.profile, context.store, context.token, known, progress, data_only=data_only)
        progress.finish()
        return found

    inputs = runner.run_function("resolve", work, inputs_summary, retries=RESOLVE_RETRIES)
    runner.context = replace_fields(context, resolved=inputs)


def write_lockfile(context: Context) -> None:
    """Write the lockfile of a new run, so that a retry before training uses the same inputs."""
    run = context.store.run_folder(context.profile.name)
    if run.stored_identity is None:
        run.write(run_files.LOCKFILE, context.inputs.lockfile.to_bytes())


def warn(
    runner: Runner, profile: Profile, tokenizer: Artifact, dataset: Artifact, parent: Parent | None
) -> list[str]:
    """Log warnings about tokenizer, amount of data and, of a new fork, learning rate; returns them."""
    warnings = data_warnings(profile, tokenizer.summary, dataset.summary)
    warnings += rate_warnings(runner.context.store, parent, profile) if parent else []
    for warning in warnings:
        log.warning("warning: %s", warning)
    return warnings


class TrainingRun:
    """A run from its plan to the end of its training, in every flow that trains one.

    Checks the plan and begins to compile the graphs; then the flow prepares the inputs, with which `open` opens the run folder.

    Attributes:
        plan: what the overview and the report show as the plan.
        identity: hash of the run's mathematics and inputs; empty before the folder is open.

    Raises:
        ProfileError: the run cannot fit, or the devices are missing.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, self.plan, self.identity = runner, _check_plan(runner), ""
        self._compiling = runner.start(GraphsStep())

    @contextmanager
    def open(
        self,
        profile: Profile,
        tokenizer: str,
        dataset: str,
        start: str | None,
        command: RunCommand | None = None,
        *,
        warnings: Sequence[str] = (),
        parent: Parent | None = None,
        replace: bool = False,
        reports: bool = False,
    ) -> Iterator[Overview]:
        """Open the run folder for the steps in the block.

        Yields its overview in Prefect's UI, which shows the plan and the warnings. Other arguments and errors: see
        `runs.open_run`.

        Args:
            tokenizer: its key.
            dataset: its key.
            start: key of the weights to start from, or digest of another run's checkpoint; None: from scratch.
            reports: whether the flow ends with a report.
        """
        runner = self._runner
        context, run = runner.context, runner.context.store.run_folder(profile.name)
        origin = keys.digest([parent.identity, parent.step]) if parent else None
        self.identity = keys.run_identity(profile, tokenizer, dataset, start, origin)
        inputs = {"tokenizer": tokenizer, "dataset": dataset, "checkpoint": start}
        runner.require_lock()  # another process may have taken over the run while this one was suspended
        with suggest_commands(command, profile.name):
            given = context.store, profile, self.identity, context.flow_run, inputs
            folder = runs.open_run(*given, parent=parent, replace=replace)
        run.write(run_files.LOCKFILE, context.inputs.lockfile.to_bytes())
        runner.open(profile, folder)
        overview = Overview(profile, folder)
        overview.begin(self.plan, warnings)
        labels = labels_of(
            profile,
            command.profile if command else profile.name,
            f"{parent.run}@{parent.step}" if parent else None,
        )
        with (
            alerts(profile, run, reports=reports) as alerting,
            tracking(profile, folder, labels) as final_state,
        ):
            runner.context = replace_fields(runner.context, watch=alerting.update)
            yield overview
            alerting.trained = runner.is_done(TrainingStep.name)
            if profile.tracking.trackers:
                final_state.files += results(context.store, folder, parent)
        if context.store.is_remote:
            _store_alerts(run)

    def graphs(self) -> Artifact | None:
        """Wait for the compiled graphs, and record whether training compiles; None if there are none."""
        graphs = self._compiling.result() if self._compiling else None
        settle_compilation(self._runner, graphs)
        return graphs

    def train(self, step: TrainingStep) -> None:
        """Train in the open folder, with progress and alerts."""
        context = self._runner.context
        progress, alert = TrainingProgress(context.profile, context.run_folder), context.watch

        def watch() -> None:
            progress.update()
            alert()

        self._runner.run(step, replace_fields(context, watch=watch))


def _check_plan(runner: Runner) -> planner.Plan:
    """Plan the run as a task. Raises ProfileError if it cannot fit or the devices are missing."""
    profile = runner.context.profile

    def plan() -> planner.Plan:
        planner.require_devices(profile)
        planned = planner.plan(profile)
        planner.require_fit(profile, planned)
        return planned

    return runner.run_function("plan", plan, plan_summary)


def _store_alerts(run: RunFolder) -> None:
    """Record emitted alerts in a remote store, so that another machine does not repeat "finished".

    The report step has uploaded the run folder before that alert. An interruption in between may repeat it, but not lose it.
    """
    try:
        if (emitted := state_files.read(run.path / run_files.ALERTS)) is not None:
            run.write(run_files.ALERTS, emitted)
    except Exception as error:  # of any object store
        log.warning("alerts of %s: not recorded in the store: %s; some may be repeated", run.name, error)


def settle_compilation(runner: Runner, graphs: Artifact | None) -> None:
    """Record in the run folder whether training compiles: not if the graphs step found otherwise."""
    context = runner.context
    enabled = context.profile.compile.possible and not (graphs and graphs.summary.get("eager"))
    if enabled != context.profile.compile.enabled:
        profile = with_value(context.profile, "compile.enabled", enabled)
        context.store.run_folder(profile.name).write(
            run_files.PROFILE, resolve_profile.dump(profile).encode()
        )
        runner.context = replace_fields(context, profile=profile)
