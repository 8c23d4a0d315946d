"""`modeling.check_device`: checks pass on the CPU, in processes of their own; missing Neuron software is rejected by name."""

import json
import sys
from collections import defaultdict
from dataclasses import replace

import pytest
from torch import Tensor

from modeling import check_device, exit_codes, kernel_errors
from profiles import resolve


def test_checks_pass_on_a_cpu():
    """Those of one process that do not take a profile; the emulated device has the others (tests/emulation)."""
    checks = check_device.check_matrix_products, check_device.check_memory_bandwidth
    results = [check("cpu") for check in checks]
    assert all(result.passed for result in results)
    assert "TFLOP/s" in results[0].measured


def test_kernels_are_checked_on_the_shapes_of_the_profile(monkeypatch):
    """Those of one rank: here of 2, with a rest of the vocabulary, a window, and documents."""
    model = {"architecture": "mistral", "hidden_size": 48, "intermediate_size": 64, "vocab_size": 331}
    model |= {"num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    changes = {f"model.{key}": value for key, value in model.items()} | {"model.sliding_window": 20}
    changes |= {"parallel.tensor": 2, "cluster.devices_per_node": 2, "train.document_masks": "true"}
    changes |= {"train.sequence_length": 72, "parallel.data_sharding": "zero1"}
    profile = resolve.load("tiny", [f"{key}={value}" for key, value in changes.items()])
    seen = defaultdict(set)

    def recorded(name, function):
        def call(*inputs, **options):
            masks = options.get("documents") is not None, options.get("window")
            seen[name].add((tuple(tuple(x.shape) for x in inputs if isinstance(x, Tensor)), masks))
            return function(*inputs, **options)

        return call

    for name in ("attention", "linear_cross_entropy", "adamw"):
        monkeypatch.setattr(kernel_errors, name, recorded(name, getattr(kernel_errors, name)))
    assert check_device.check_kernels("cpu", profile).passed
    assert seen["attention"] == {(((1, 3, 72, 8), (1, 1, 72, 8), (1, 1, 72, 8)), (True, 20))}
    assert seen["linear_cross_entropy"] == {(((72, 48), (166, 48), (72,)), (False, None))}
    h, f, d = 48, 64, 8
    vocabulary = 8000  # 166 x 48, aligned to 128 bytes
    matrices = 2 * vocabulary + (3 + 2 * 1) * d * h + h * 3 * d + 3 * h * f // 2  # of one rank, in one shard
    assert seen["adamw"] == {(((matrices,),) * 4, (False, None))}


def test_the_profile_named_on_the_command_line_is_that_of_the_kernels(monkeypatch):
    given = []
    (kernels,) = [check for check in check_device.CHECKS if check.takes_profile]
    checks = (replace(kernels, run=lambda *subjects: given.append(subjects) or check_device.Result("")),)
    monkeypatch.setattr(check_device, "CHECKS", checks)
    monkeypatch.setattr(exit_codes, "leave", lambda code: sys.exit(code))
    with pytest.raises(SystemExit, match="0"):
        check_device.main(["--device", "cpu", "--check", "kernels", "--profile", "llama3-8b-h100"])
    ((kind, profile),) = given
    assert (kind, profile) == ("cpu", resolve.load("llama3-8b-h100"))


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
