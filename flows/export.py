"""Export alone: a run's newest checkpoint in Hugging Face's format, also of a run that is not finished."""

from __future__ import annotations

from prefect import flow
from prefect.runtime import flow_run

from flows import steps, working_folder
from flows.hooks import explain
from flows.runner import Runner, forward_logs
from profiles import resolve
from profiles.errors import ProfileError
from tasks import export as exports
from tasks import keys, tokenizer
from tasks.store import runs
from tasks.store.store import Store


def run_name() -> str:
    """The run's own."""
    return str(flow_run.parameters["run"])


@flow(name="export", flow_run_name=run_name, on_failure=[explain], on_crashed=[explain])
def export(run: str, store: str = "./store", work_dir: str = "./store") -> str:
    """Write a run's newest checkpoint as a Hugging Face model; returns its folder.

    Args:
        run: Name of the run.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
        work_dir: The folder that runs lie in where the store is on S3, as the profile's cluster.work_dir; one that does not have
            the run gets it from the store.
    """
    working_folder.enter()
    forward_logs()
    kept = Store(store, work_dir)
    folder = runs.fetch(kept, run)
    saved = kept.run_folder(run).checkpoint_steps()
    if not saved:
        raise ProfileError("run", run, f"has no complete checkpoint in {store}")
    profile = resolve.load(str(folder / "profile.yaml"))
    inputs, step = runs.read_inputs(folder), saved[-1]
    key = keys.export(
        run, inputs["identity"] if step == profile.train.steps else f"{inputs['identity']} {step}"
    )
    vocabulary = kept.artifacts.expect(tokenizer.KIND, inputs["tokenizer"])
    arguments = (profile, kept, folder, key, vocabulary, None)
    made = Runner(kept).once(steps.export, exports.KIND, key, *arguments, run_folder=folder)
    kept.run_folder(run).sync(exports.PART).upload()  # of the folder only this: the run may resume elsewhere
    return str(folder / made.summary["part"])
