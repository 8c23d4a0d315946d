"""Branches: a constant-rate trunk, branches that decay from its checkpoints, averages, a comparison.

    plan ─> trunk ┬─> branch ┬─> average ┬─> comparison
                  ├─> branch ┤           │
                  └──────────┴─> average ┘

Trunk and branches are ordinary runs of the pretraining flow, so finished ones are cached and interrupted ones resume. Adding
a branch trains only that branch, and extends the trunk if the branch starts beyond its end.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from prefect import flow

from flows.experiments.plans import load_branches, require_startable
from flows.experiments.side_by_side import file_name, run_side_by_side, train_alone
from flows.final_states import final_states
from flows.hooks import EXPERIMENT_HOOKS
from flows.run_setup import flow_context
from flows.runner import THREADS, Runner
from modeling.scaling.planned_run import PlannedRun
from profiles import resolve
from profiles.experiments import Branches, load_experiment
from profiles.files import run_files
from profiles.sections.base import required
from tasks.evaluation.average import MODEL, AverageStep, identity_of
from tasks.experiments.branches import members_of
from tasks.reporting import branches_page, html
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import activities, runs
from tasks.store.store import Store, open_store


@flow(name="branches", flow_run_name=file_name, task_runner=THREADS, **EXPERIMENT_HOOKS)
@final_states
def branches(file: str, store: str = "./store") -> dict[str, Any]:
    """Train a trunk and branches, average checkpoints, compare them; returns losses and the page's path.

    Args:
        file: The branches file.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
    """
    first = load_experiment(Branches, file)
    work_dir = resolve.load(first.target, first.overrides).cluster.work_dir
    opened = open_store(store, work_dir or "store")
    described, trunk, found, _ = load_branches(file, opened)
    require_startable([trunk, *found])
    results = [train_alone(trunk, store), *run_side_by_side(described, found, store)]
    rows = [
        {
            "run": run.name,
            "step": run.first_step,
            "steps": run.profile.train.steps,
            "tokens": run.tokens,
            "validation_loss": result["validation_loss"],
            "report": result["report"],
        }
        for run, result in zip((trunk, *found), results, strict=True)
    ]
    averages = _average(described, trunk, found, opened)
    page = opened.work_dir / "branches" / f"{described.name}.html"
    html.write(page, branches_page.render(described, opened, rows, averages))
    return {"branches": described.name, "runs": rows, "averages": averages, "page": str(page)}


def _average(
    described: Branches, trunk: PlannedRun, found: list[PlannedRun], store: Store
) -> list[dict[str, Any]]:
    """Make the averages that the store lacks; returns all averages."""
    if not described.averages:
        return []
    with ExitStack() as stack:
        # In one order, so that flows that share runs do not wait for each other; then the runs are not replaced.
        names = sorted({run.name for run in (trunk, *found)})
        locks = {name: stack.enter_context(activities.begin(store, "averaging", name)) for name in names}
        folder = runs.fetch(store, trunk.name)
        profile = resolve.load(str(folder / run_files.PROFILE), (), trunk.name)
        inputs = runs.read_inputs(folder)
        dataset, tokenizer = (
            store.artifacts.expect(step.id(required(inputs[step.kind])))
            for step in (DatasetStep, TokenizerStep)
        )
        context = flow_context(profile, store, folder)
        runner = stack.enter_context(Runner(context, locks[trunk.name], keeps_recorded=True))
        rows = []
        for average in described.averages:
            members = members_of(described, average, trunk, found, store)
            identity = identity_of(store, members)
            step = AverageStep(
                dataset, identity, tokenizer=tokenizer, members=tuple(members), label=average.name
            )
            made = required(runner.run(step))
            rows.append(
                {
                    "average": average.name,
                    "members": made.summary["members"],
                    "validation_loss": made.summary["validation_loss"],
                    "model": str(store.artifacts.path(made) / MODEL),
                }
            )
    return rows
