"""Modules in the working folder do not shadow Trainshed's packages, and user functions are found there."""

from tests.flows.micro import losses, settings, write_shadowing_modules

LOSS = """
from torch.nn.functional import cross_entropy

def smoothed(logits, targets):
    return cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
"""


def test_run_ignores_shadowing_modules_and_finds_a_loss(command, profile, prefect_server, tmp_path):
    write_shadowing_modules(tmp_path)
    (tmp_path / "my_losses.py").write_text(LOSS)
    overrides = settings("train.loss=my_losses:smoothed", "train.steps=2")
    code, _, err = command("run", str(profile), *overrides, PREFECT_API_URL=prefect_server).result()
    assert code == 0, err
    assert losses(tmp_path / "store/runs/micro").keys() == {1, 2}
