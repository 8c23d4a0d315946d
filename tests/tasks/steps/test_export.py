"""Export of a run that continues to train."""

import pytest

from profiles.resolve import load
from tasks.failures import FatalError
from tasks.step import Context
from tasks.steps import export
from tasks.steps.export import ExportStep
from tasks.store.run_folder import CheckpointId


def test_only_the_checkpoint_of_the_key_is_exported(store, monkeypatch):
    def write(context, checkpoint, tokenizer, weights, folder):
        folder.mkdir()
        (folder / "source.txt").write_text(checkpoint)

    def replace(context, checkpoint, *_):
        run.write(f"{checkpoint}/complete.json", b'{"written": "after a rollback"}')

    monkeypatch.setattr(export, "write_model", write)
    run = store.run_folder("run")
    folder = run.prepare("one")
    for step in (4, 8):
        run.write(f"checkpoints/step_{step}/complete.json", b"{}")
    first = CheckpointId.of(run, 4)
    context = Context(load("tiny", ["train.steps=8"], "run"), store, folder)
    for checkpoint, exported in ((first, "step_4"), (None, "step_8")):
        made = ExportStep(None, f"one {exported}", checkpoint=checkpoint).run(context)
        assert (folder / made.summary["part"] / "source.txt").read_text() == f"checkpoints/{exported}"
    monkeypatch.setattr(export, "write_model", replace)
    with pytest.raises(FatalError, match="run run: the checkpoint of step 4 was replaced during the export"):
        ExportStep(None, "one 4 again", checkpoint=first).run(context)
    assert (folder / made.summary["part"] / "source.txt").read_text() == "checkpoints/step_8"
    with pytest.raises(FatalError, match="run run: the checkpoint of step 2 was removed; export again"):
        ExportStep(None, "one 2", checkpoint=CheckpointId(2, "")).run(context)
