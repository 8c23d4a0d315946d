"""Makefile: what its targets install, by `make -n`, which runs nothing."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEURON = "NEURON_INDEX=https://example.com/simple"


def commands(folder: Path, *arguments: str) -> str:
    """The commands that `make` would run."""
    make = ["make", "--no-print-directory", "-n", *arguments]
    return subprocess.run(make, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_extra_neuron_is_installed_after_an_installation_without_it(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/installed").touch()
    assert "install" not in commands(tmp_path, "check-device")
    printed = commands(tmp_path, NEURON, "check-device")
    assert """-e '.[neuron]'""" in printed
    assert '--extra-index-url "https://example.com/simple"' in printed
    (tmp_path / ".venv/installed-neuron").touch()
    assert "install" not in commands(tmp_path, NEURON, "check-device")
