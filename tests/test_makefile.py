"""Makefile: what its targets install, by `make -n`, which runs nothing."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEURON = "NEURON_INDEX=https://example.com/simple"


def commands(folder: Path, *arguments: str) -> str:
    """The commands that `make` would run."""
    make = ["make", "--no-print-directory", "-n", *arguments]
    return subprocess.run(make, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def folder(tmp_path):
    """A folder in which nothing is installed."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_install_runs_nothing_else(folder):
    printed = commands(folder, "install")
    assert "-e '.'" in printed
    assert ".venv/bin/trainshed" not in printed


def test_extra_neuron_is_installed_after_an_installation_without_it(folder):
    (folder / ".venv").mkdir()
    (folder / ".venv/installed").touch()
    assert "install" not in commands(folder, "check-device")
    printed = commands(folder, NEURON, "check-device")
    assert """-e '.[neuron]'""" in printed
    assert '--extra-index-url "https://example.com/simple"' in printed
    (folder / ".venv/installed-neuron").touch()
    assert "install" not in commands(folder, NEURON, "check-device")
