"""Export of a run's latest checkpoint in Hugging Face format, even if the run is unfinished."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from flows.final_states import final_states
from flows.hooks import SHOW_FAILURE
from flows.runner import Runner
from profiles.errors import ProfileError
from profiles.files import run_files, state_files
from profiles.sections.base import required
from tasks.inputs import EXPORT
from tasks.reporting.outcome import is_finished
from tasks.step import Context
from tasks.steps.checkpoint import CheckpointStep
from tasks.steps.export import ExportStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import activities, runs
from tasks.store.run_folder import CheckpointId
from tasks.store.store import open_store


def _require_last(folder: Path, latest: int, steps: int | None) -> None:
    """Raise ProfileError if a finished run lacks its last checkpoint: an earlier one would be exported."""
    if steps is None or latest >= steps:
        return
    report, alerts = (
        state_files.read_json(folder / file) for file in (run_files.REPORT_JSON, run_files.ALERTS)
    )
    row = runs.last_training_row(folder)
    if is_finished(report, alerts, row["step"] if row else None, steps):
        missing = folder / run_files.checkpoint(steps)
        reason = (
            f"is finished, but {missing} is missing or incomplete; start the run again, which makes it again"
        )
        raise ProfileError("run", folder.name, reason)


@flow(name="export", flow_run_name="{run}", **SHOW_FAILURE)
@final_states
def export(run: str, store: str = "./store", work_dir: str = "./store") -> str:
    """Write a run's latest checkpoint as a Hugging Face model; returns its folder.

    Args:
        run: Name of the run.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
        work_dir: With a store on S3, the local folder of run folders, like cluster.work_dir of a profile; a run missing there is
            restored from the store.
    """
    opened = open_store(store, work_dir, existing=True)
    runs.fetch(opened, run)  # rejects an unknown run
    with activities.begin(opened, "exporting", run) as lock:
        folder = runs.fetch(opened, run)  # again: it may have been replaced during the wait
        saved = opened.run_folder(run).checkpoint_steps()
        latest = CheckpointId.of(opened.run_folder(run), saved[-1]) if saved else None
        if latest is None:
            raise ProfileError("run", run, f"has no complete checkpoint in {store}")
        profile = runs.load_profile(folder)
        inputs = runs.read_inputs(folder)
        _require_last(folder, latest.step, profile.train.steps)
        # Until the last step, a rollback may replace the checkpoint of a step by another one.
        is_last = latest.step == profile.train.steps
        identity = required(inputs["identity"])
        if not is_last:
            identity = f"{identity} {latest.digest}"
        tokenizer = runs.require_artifact(opened, run, TokenizerStep.id(required(inputs["tokenizer"])))
        weights = inputs.get("checkpoint")  # not an artifact in a round of continual pretraining
        base = opened.artifacts.find(CheckpointStep.id(weights), hash_limit=0) if weights else None
        if profile.lora.rank and base is None:
            base = runs.require_artifact(opened, run, CheckpointStep.id(required(weights)))
        with Runner(Context(profile, opened, folder, flow_run=str(flow_run.id)), lock) as runner:
            exported = required(runner.run(ExportStep(tokenizer, identity, base, latest)))
        opened.run_folder(run).sync(EXPORT).upload()  # only this part: the run may resume elsewhere
    return str(folder / exported.summary["part"])
