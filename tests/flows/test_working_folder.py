"""A user's own modules in the working folder are never imported in the place of Trainshed's packages."""

from pathlib import Path

from tests.flows.micro import losses, settings

LOSS = """
from torch.nn.functional import cross_entropy

def smoothed(logits, targets):
    return cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
"""


def write_modules_of_the_same_names(folder: Path) -> None:
    """Modules named as each of our packages, which raise when imported."""
    for name in ("flows", "tasks", "modeling", "parallel"):
        (folder / f"{name}.py").write_text(f"raise ImportError('the user\\'s own {name}')\n")
    (folder / "profiles").mkdir()
    (folder / "profiles/__init__.py").write_text("raise ImportError('the user\\'s own profiles')\n")


def test_run_beside_modules_of_the_same_names_uses_a_loss_from_there(
    command, profile, prefect_server, tmp_path
):
    write_modules_of_the_same_names(tmp_path)
    (tmp_path / "my_losses.py").write_text(LOSS)
    overrides = settings("train.loss=my_losses:smoothed", "train.steps=2")
    code, _, err = command("run", str(profile), *overrides, PREFECT_API_URL=prefect_server).result()
    assert code == 0, err
    assert losses(tmp_path / "store/runs/micro").keys() == {1, 2}
