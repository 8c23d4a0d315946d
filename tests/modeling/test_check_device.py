"""`modeling.check_device`: checks pass on the CPU, in processes of their own; missing Neuron software is rejected by name."""

import json
from dataclasses import replace

import pytest

from modeling import check_device


def test_checks_pass_on_a_cpu():
    """Those of one process; the emulated device has the others (tests/emulation)."""
    checks = (
        check_device.check_matrix_products,
        check_device.check_memory_bandwidth,
        check_device.check_kernels,
    )
    results = [check("cpu") for check in checks]
    assert all(result.passed for result in results)
    assert "TFLOP/s" in results[0].measured


def test_check_runs_on_all_devices_in_processes_of_its_own(monkeypatch, capsys):
    """A launcher starts them; what they found is in the document, also of a check that failed."""
    broken = replace(check_device.CHECKS[0], name="missing")  # which its process does not know
    collective = next(check for check in check_device.CHECKS if check.name == "collectives")
    monkeypatch.setattr(check_device, "CHECKS", (broken, collective))
    assert check_device.main(["--device", "cpu", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["processes"] == 2
    missing, collectives = document["checks"]
    assert (missing["check"], missing["passed"]) == ("missing", False)
    assert "invalid choice" in missing["measured"]
    assert collectives["passed"], collectives["measured"]
    assert "all-gather" in collectives["measured"]


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
