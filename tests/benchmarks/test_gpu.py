"""benchmarks.gpu, rehearsed on the CPU: rows run end to end, kernels agree with their libraries, and lacking peers are named."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from benchmarks.harness.comparisons import TOLERANCES, Result
from benchmarks.operators import kernels
from benchmarks.operators.ring_attention import relative_error


def test_rehearsed_rows_run_and_agree():
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--rounds", "1", "--json"]
    command += ["--only", "adamw", "ring-32k", "tensor-async", "8b-layers-fp8"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert {row["row"]: row["difference"] <= row["tolerance"] for row in found["rows"]} == {
        "adamw": True,
        "ring-32k": True,
    }
    assert found["not_run"] == {"tensor-async": "CUDA devices", "8b-layers-fp8": "the package torchao"}


@pytest.mark.parametrize("kernel", ["attention", "documents", "adamw"])
def test_kernels_agree_with_the_library(kernel):
    make, (ours, library, *_) = kernels.KERNELS[kernel]
    sizes = replace(kernels.SIZES["small"], sequence=128, document=32)
    results = [make(side, sizes, kernels.Inputs(torch.device("cpu")))() for side in (ours, library)]
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual.float(), expected.float()) < TOLERANCES["bf16"]


def test_rows_need_their_peer_and_gpus(monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda package: None if package == "torchao" else object())
    lacking = {row.name: gpu.missing(row, gpus=1) for row in gpu.COMPARISONS}
    two = ("fsdp", "tensor", "tensor-chunks", "tensor-async", "ring-32k", "ring-128k")
    needs = dict.fromkeys(two, "2 GPUs") | dict.fromkeys(("1b-fp8", "8b-layers-fp8"), "the package torchao")
    assert lacking == {**dict.fromkeys(lacking), **needs}
    assert not any(gpu.missing(row, gpus=2) for row in gpu.COMPARISONS if row.name in two)


def test_speed_at_full_depth_extrapolates_seconds_by_layer():
    rows = {
        name: Result(name, "", "", target=1.0, tokens=8192, ours=[seconds], peer=[1.0])
        for name, seconds in {"8b-2-layers": 0.16, "8b-layers": 0.20}.items()
    }
    assert gpu.full_depth_speed(rows) == pytest.approx(8192 / (0.12 + 32 * 0.02))
    assert gpu.full_depth_speed({"8b-layers": rows["8b-layers"]}) is None


def test_profiles_of_the_rows_train_what_they_say():
    """MFU and the plan are those of the profile of our side."""
    rows = {
        row.name: gpu.profile_of(row) for row in gpu.COMPARISONS if isinstance(row, gpu.TrainingComparison)
    }
    assert rows["1b"].model.num_hidden_layers == 16
    assert rows["8b-2-layers"].model.num_hidden_layers == 2
    assert rows["1b-fp8"].train.precision == "fp8"
    assert rows["tensor-async"].compile.async_tensor
    assert (rows["tensor"].parallel.tensor, rows["fsdp"].parallel.data_sharding) == (2, "fsdp")
    assert {profile.train.sequence_length for profile in rows.values()} == {8192}
