"""The ladder of checks for new hardware, climbed on the CPU, and what it says where there is nothing to climb on."""

import json
import os
import subprocess
import sys

import pytest


def check_device(*arguments, **environment):
    command = [sys.executable, "-m", "modeling.check_device", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500
    )


def test_every_rung_holds_on_a_cpu():
    ran = check_device("--device", "cpu", "--json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rungs = {rung["rung"]: rung for rung in json.loads(ran.stdout)["rungs"]}
    assert [rung for rung in rungs.values() if not rung["holds"]] == []
    assert {"attention", "collectives", "training, all devices"} <= rungs.keys()
    assert "TFLOP/s" in rungs["matrix products"]["words"]


@pytest.mark.parametrize(
    ("version", "says"),
    [(None, "not installed"), ("1.0", "placeholder"), ("2.9.0.2.15", "not built for torch 2.13.0")],
)
def test_neuron_without_its_software_is_refused_by_name(tmp_path, version, says):
    if version:
        folder = tmp_path / f"torch_neuronx-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n")
    ran = check_device("--device", "neuron", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 2
    assert says in ran.stderr
    assert "AWS's package index" in ran.stderr
