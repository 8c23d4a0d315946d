"""`modeling.check_device`: every check passes on the CPU; missing Neuron software is rejected by name."""

import json
import os
import subprocess
import sys

import pytest

from modeling import check_device


def run_check_device(*arguments):
    command = [sys.executable, "-m", "modeling.check_device", *arguments]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=500)


def test_every_check_passes_on_a_cpu():
    process = run_check_device("--device", "cpu", "--json")
    assert process.returncode == 0, process.stdout + process.stderr
    checks = {check["rung"]: check for check in json.loads(process.stdout)["rungs"]}
    assert [check for check in checks.values() if not check["holds"]] == []
    assert checks.keys() == {check.name for check in check_device.CHECKS}
    assert "TFLOP/s" in checks["matrix products"]["words"]


@pytest.mark.parametrize(
    ("version", "message"),
    [(None, "not installed"), ("1.0", "placeholder"), ("2.9.0.2.15", "not built for torch 2.13.0")],
)
def test_neuron_without_its_software_is_rejected_by_name(tmp_path, monkeypatch, capsys, version, message):
    if version:
        folder = tmp_path / f"torch_neuronx-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        check_device.main(["--device", "neuron"])
    error = capsys.readouterr().err
    assert message in error
    assert "AWS's package index" in error
