"""Compiled training on a GPU: resume is bit-identical, and the host waits for a step's results only."""

import json
import shutil
import subprocess
import sys

import pytest

from parallel import device
from tests.modeling import micro

SETTINGS = ("cluster.device=cuda", "cluster.devices_per_node=1", "parallel.tensor=1", "compile.enabled=true")
SETTINGS += ("train.steps=4", "train.precision=bf16", "evaluate.every=0", "model.head_dim=32")


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A dataset, and the environment that launchers set for a run."""
    for name, value in device.CUDA.environment:
        monkeypatch.setenv(name, value)
    return micro.dataset(tmp_path / "data")


@pytest.mark.cuda
def test_resumed_run_is_bit_identical(dataset, tmp_path):
    run = micro.run_folder(tmp_path / "run", *SETTINGS, "checkpoint.every=2")
    arguments = "training.train", "--run-folder", run, "--dataset", dataset
    micro.finish(micro.start(*arguments, processes=0))
    losses = micro.losses(run)
    assert sorted(losses) == [1, 2, 3, 4]
    shutil.rmtree(run / "checkpoints" / "step_4")
    assert "resumed from step 2" in micro.finish(micro.start(*arguments, processes=0))
    assert micro.losses(run) == losses


@pytest.mark.cuda
def test_host_waits_for_nothing_but_the_results_of_a_step(dataset, tmp_path):
    run = micro.run_folder(tmp_path / "run", *SETTINGS, "checkpoint.every=0")
    command = [sys.executable, "-m", "tests.modeling.training.host_waits"]
    command += ["--run-folder", str(run), "--dataset", str(dataset)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {}
    assert sorted(micro.losses(run)) == [1, 2, 3, 4]
