"""Export of a run that trains on meanwhile."""

import pytest

from profiles.resolve import load
from tasks.failures import FatalError
from tasks.step import Context
from tasks.steps import export
from tasks.steps.export import ExportStep


def test_the_checkpoint_of_the_key_is_exported_though_a_later_one_exists(store, monkeypatch):
    def write(context, checkpoint, tokenizer, weights, folder):
        folder.mkdir()
        (folder / "source.txt").write_text(checkpoint)

    monkeypatch.setattr(export, "write_model", write)
    folder = store.run_folder("run").prepare("one")
    for step in (4, 8):
        store.backend.write(f"runs/run/checkpoints/step_{step}/complete.json", b"{}")
    context = Context(load("tiny", ["train.steps=8"], "run"), store, folder)
    for step, exported in ((4, "step_4"), (None, "step_8")):
        made = ExportStep(None, f"one {step}", step=step).run(context)
        assert (folder / made.summary["part"] / "source.txt").read_text() == f"checkpoints/{exported}"
    with pytest.raises(FatalError, match="run run: the checkpoint of step 2 was removed; export again"):
        ExportStep(None, "one 2", step=2).run(context)
