"""benchmarks.gpu rehearsed on CPU: rows run, kernels agree with libraries, missing peers are named."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import gpu
from benchmarks.harness import processes
from benchmarks.harness.results import read
from benchmarks.operators import kernels, ring_attention
from benchmarks.operators.ring_attention import relative_error
from benchmarks.rows.checks import CheckResult, DeviceChecks, MarkedTests
from benchmarks.rows.comparisons import TOLERANCES, Result
from modeling.check_device import checks, isolation
from modeling.models.build import build_mesh
from profiles import resolve
from tests.forked_jobs import run_forked

pytestmark = pytest.mark.slow


def test_rows_without_a_package_measure_ours_alone_unless_another_row_does(monkeypatch):
    lacking = ("torchao", "torchtitan")
    monkeypatch.setattr(gpu.kernels, "has_cudnn", lambda kind: True)
    monkeypatch.setattr(gpu, "find_spec", lambda package: None if package in lacking else object())
    runnable, left = gpu.divide(gpu.COMPARISONS, gpus=1)
    alone = {row.name: row.lacks for row in runnable if getattr(row, "lacks", None)}
    assert alone == dict.fromkeys(("1b-fp8", "8b-layers-fp8", "8b-2-layers-fp8"), "the package torchao")
    assert {name for name, needs in left.items() if needs == "the package torchtitan"} == {
        "1b-titan",
        "8b-titan",
    }
    assert [row.name for row in runnable] == [row.name for row in gpu.COMPARISONS if row.name not in left]


def test_blocks_of_one_rank_agree_with_full_attention():
    """On one device, without communication, for the first of several ranks."""
    sides = ring_attention.make_sides("cpu", blocks=4)
    error, seconds = ring_attention.compare(sides, ring_attention.Workload(256, "float32"), rounds=1)
    assert error < TOLERANCES["float32"]
    assert all(value > 0 for (value,) in seconds.values())


def test_scripts_run_with_the_environment_of_a_run(monkeypatch):
    started = []
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, env, **__: started.append(env) or fail())
    with pytest.raises(RuntimeError, match="not started"):
        processes.run_script(processes.Script("operators.kernels", ("attention", "ours"), device="cuda"))
    assert started[0].items() >= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PATH": os.environ["PATH"]}.items()


def fail():
    raise RuntimeError("not started")


class HangingScript(processes.Script):
    command = ("sh", "-c", "seq 99 >&2; exec sleep 600")


def test_last_lines_of_a_script_that_times_out_are_in_its_error():
    with pytest.raises(processes.ScriptError) as raised:
        processes.run_script(HangingScript("operators.kernels"), timeout=5)
    message, *lines = str(raised.value).splitlines()
    assert message == "operators.kernels: timed out after 5 s"
    assert lines == [str(number) for number in range(70, 100)]


@pytest.mark.parametrize("kernel", ["attention", "documents", "adamw"])
def test_kernels_agree_with_the_library(kernel):
    make, (ours, library, *_) = kernels.KERNELS[kernel]
    sizes = replace(kernels.SIZES["small"], sequence=128, document=32)
    results = [make(side, sizes, kernels.Inputs(torch.device("cpu")))() for side in (ours, library)]
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual.float(), expected.float()) < TOLERANCES["bf16"]


def test_rows_need_their_peer_and_gpus(monkeypatch):
    monkeypatch.setattr(gpu.kernels, "has_cudnn", lambda kind: True)
    monkeypatch.setattr(gpu, "find_spec", lambda package: None if package == "torchao" else object())
    lacking = {row.name: gpu.missing(row, gpus=1) for row in gpu.COMPARISONS}
    tensor = ("tensor", "tensor-chunks", "tensor-chunks-fp8", "tensor-async")
    two = ("fsdp", *tensor, "expert", "ring-32k", "ring-128k")
    eight = ("1b-fp8", "8b-layers-fp8", "8b-2-layers-fp8")
    needs = dict.fromkeys(two, "2 GPUs") | dict.fromkeys(eight, "the package torchao")
    assert lacking == {**dict.fromkeys(lacking), **needs}
    assert not any(gpu.missing(row, gpus=2) for row in gpu.COMPARISONS if row.name in two)


def test_speed_at_full_depth_extrapolates_seconds_by_layer():
    rows = {
        name: Result(name, "", "", target=1.0, tokens=8192, ours=[seconds], peer=[1.0])
        for name, seconds in {"8b-2-layers": 0.16, "8b-layers": 0.20}.items()
    }
    assert gpu.full_depth(rows, "") == pytest.approx(8192 / (0.12 + 32 * 0.02))
    assert gpu.full_depth({"8b-layers": rows["8b-layers"]}, "") is None
    eight = {f"{name}-fp8": result for name, result in rows.items()}
    assert gpu.full_depth(eight, "-fp8") == gpu.full_depth(rows, "")


class ForkedCheck:
    """Subset of Popen that checks use: forked from a process with torch imported."""

    def __init__(self, command: list[str], **_: object) -> None:
        self._arguments = command[command.index("modeling.check_device") + 1 :]

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.returncode, output = run_forked("modeling.check_device.__main__", self._arguments, 0, timeout)
        return output, output


def test_checks_of_profiles_are_counted_and_failures_have_a_reason(monkeypatch):
    """Checks kernels of the rehearsed rows and of experts, and runs a check that does not exist."""
    monkeypatch.setattr(isolation, "subprocess", Mock(Popen=ForkedCheck))
    kernels = next(check for check in checks.CHECKS if check.takes_profile)
    broken = replace(checks.CHECKS[0], name="missing")
    monkeypatch.setattr(checks, "CHECKS", (kernels, broken))
    row, *_ = gpu.checks_and_comparisons(rehearse=True)
    row = replace(row, made=tuple(profile for profile in row.made if profile.train.precision == "fp8"))
    proof = row.run(None, lambda _: None)
    assert (proof.status, proof.counted) == (
        "failed",
        f"{len(row.made) + 1} passed, 1 failed",
    )  # one of experts
    assert proof.failure.startswith("missing: failed (2): ")
    assert "missing is not a valid value" in proof.failure


def test_checked_profiles_are_those_that_rows_train():
    row, *_ = gpu.checks_and_comparisons(rehearse=False)
    trained = [gpu.profile_of(each) for each in gpu.COMPARISONS if isinstance(each, gpu.TrainingComparison)]
    assert all(
        any(profile.model_copy(update={"name": made.name}) == made for made in row.made)
        for profile in trained
    )
    assert len({profile.name for profile in row.made}) == len(row.made) < len(trained)
    assert "fp8" in {profile.train.precision for profile in row.made}
    assert resolve.load(*row.shipped).model.num_experts


def test_skipped_gpu_tests_pass_a_rehearsal_and_fail_a_row_on_a_gpu():
    given = "tests/parallel/attention/test_attention.py"
    rehearsed = MarkedTests((given,), device="cpu")
    proof = rehearsed.run(None, lambda _: None)
    assert (proof.status, proof.counted) == ("passed", "0 passed, 2 skipped without a GPU")
    cases = [ElementTree.fromstring(case) for case in SKIPPED]
    proof = MarkedTests()._outcome(cases, code=0)
    assert (proof.status, proof.failure) == ("failed", "test_b: needs a CUDA accelerator")


SKIPPED = (
    '<testcase name="test_a" />',
    '<testcase name="test_b"><skipped message="needs a CUDA accelerator" /></testcase>',
)
FAILED = '<testcase name="test_c"><failure message="AssertionError: 0.3&#10;more">trace</failure></testcase>'
COLLECTED = (
    '<testcase name="tests.x"><error message="collection failure">No module named trl</error></testcase>'
)


@pytest.mark.parametrize(
    ("cases", "code", "counted", "failure"),
    [
        ((SKIPPED[0],), 0, "1 passed", None),
        ((SKIPPED[0], FAILED), 1, "1 passed, 1 failed", "test_c: AssertionError: 0.3"),
        ((COLLECTED,), 2, "0 passed, 1 failed", "tests.x: collection failure"),
        ((), 5, "0 passed", "no test has the marker cuda"),
        ((SKIPPED[0],), 3, "1 passed", "pytest: exit code 3"),
    ],
)
def test_gpu_tests_pass_only_if_some_ran_and_none_failed(cases, code, counted, failure):
    proof = MarkedTests()._outcome([ElementTree.fromstring(case) for case in cases], code)
    assert (proof.counted, proof.failure) == (counted, failure)


def test_failed_check_does_not_stop_other_rows_and_its_reason_is_printed(monkeypatch, tmp_path, capsys):
    failed = CheckResult(
        "check-device", "check_device", "the CPU", "8 passed, 1 failed", "kernels: experts of …: bf16 0.3"
    )
    passed = replace(failed, name="cuda-tests", counted="9 passed", failure=None)
    monkeypatch.setattr(DeviceChecks, "run", lambda *_: failed)
    monkeypatch.setattr(MarkedTests, "run", lambda *_: passed)
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--rehearse", "--out", str(tmp_path / "rows.jsonl"), "--only", *gpu.CHECKS]
    )
    assert gpu.main() == 1
    printed = capsys.readouterr()
    assert "8 passed, 1 failed" in printed.out
    assert "9 passed" in printed.out
    kept = read(tmp_path / "rows.jsonl")
    assert [(row["row"], row["machine"]["card"]) for row in kept] == [
        (name, "a rehearsal on the CPU") for name in gpu.CHECKS
    ]
    assert "check-device: kernels: experts of …: bf16 0.3" in printed.err


def training_result(name: str, seconds: float) -> tuple[gpu.TrainingComparison, Result]:
    comparison = next(row for row in gpu.COMPARISONS if row.name == name)
    return gpu.rehearsed(comparison), Result(name, "", "", target=1.0, ours=[seconds], peer=[1.0])


def test_plans_are_compared_with_measured_steps_after_a_calibration(monkeypatch):
    calibrated = []
    monkeypatch.setattr(isolation, "write_calibration", lambda kind, **_: calibrated.append(kind))
    monkeypatch.setattr(gpu, "plan", lambda profile: SimpleNamespace(step_seconds=1.0))
    trained = {
        name: training_result(name, seconds)
        for name, seconds in (("1b", 1.05), ("8b-layers", 2.0), ("fsdp", 1.0))
    }
    figures = list(gpu.plan_figures(trained))
    assert calibrated == ["cpu"]
    assert [(figure.row, figure.status) for figure in figures] == [("1b", "met"), ("8b-layers", "missed")]


def test_failed_calibration_is_a_failed_figure_with_its_reason(monkeypatch):
    def fail(*_: object, **__: object):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(isolation, "write_calibration", fail)
    (figure,) = gpu.plan_figures({"1b": training_result("1b", 1.0)})
    assert (figure.status, figure.failure) == ("failed", "calibration: out of memory")


def test_mfu_at_1b_and_speed_at_full_depth_have_targets():
    speeds = [
        {"row": "1b", "side": side, "mfu": 0.49, "tokens_per_second": 1.0} for side in ("ours", "plain torch")
    ]
    figures = list(gpu.speed_figures(speeds, {"bf16": 6668.0, "FP8": 6666.0}))
    assert [(figure.row, figure.name.split()[0], figure.status) for figure in figures] == [
        ("1b", "MFU", "missed"),
        ("8b-layers", "tokens/s", "met"),
        ("8b-layers-fp8", "tokens/s", "missed"),
    ]


def test_profiles_of_rows_have_their_sizes_and_options():
    rows = {
        row.name: gpu.profile_of(row) for row in gpu.COMPARISONS if isinstance(row, gpu.TrainingComparison)
    }
    assert rows["1b"].model.num_hidden_layers == 16
    assert rows["8b-2-layers"].model.num_hidden_layers == 2
    assert rows["1b-fp8"].train.precision == "fp8"
    assert rows["tensor-async"].compile.async_tensor
    chunks = {
        name: build_mesh(rows[name], rank=0).tensor.chunks for name in ("tensor-chunks", "tensor-async")
    }
    assert chunks == {"tensor-chunks": None, "tensor-async": 1}
    assert all(rows[name].compile.enabled for name in chunks)
    assert (rows["tensor"].parallel.tensor, rows["fsdp"].parallel.data_sharding) == (2, "fsdp")
    assert {profile.train.sequence_length for profile in rows.values()} == {8192}
