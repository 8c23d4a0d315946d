"""What flows do around their steps: check the plan, open the run folder, follow training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from flows.runner import Runner
from flows.ui.overview import Overview
from flows.ui.progress import TrainingProgress
from flows.ui.summaries import plan_summary
from modeling.planning import planner
from profiles.schema import Profile
from tasks.step import Context
from tasks.store import runs
from tasks.store.artifacts import Artifact


def check_plan(runner: Runner) -> planner.Plan:
    """Plan the run as a task. Raises ProfileError if it cannot fit or the devices are missing."""
    profile = runner.context.profile

    def plan() -> planner.Plan:
        planned = planner.plan(profile)
        planner.require_fit(profile, planned)
        planner.require_devices(profile)
        return planned

    return runner.check("plan", plan, plan_summary)


@contextmanager
def open_run(
    runner: Runner,
    profile: Profile,
    identity: str,
    tokenizer: Artifact,
    dataset: Artifact,
    plan: planner.Plan,
) -> Iterator[Overview]:
    """Open the run folder for the steps in the block; other flow runs that want it wait. Yields its page in the UI."""
    context = runner.context
    with runs.open_run(context.store, profile, identity, context.flow_run) as folder:
        runs.record_inputs(folder, identity, tokenizer, dataset)
        runner.open(profile, folder)
        overview = Overview(profile, folder)
        overview.begin(plan)
        yield overview


def following(context: Context) -> Context:
    """The context in which training shows its progress."""
    return replace(context, watch=TrainingProgress(context.profile, context.run_folder).update)
