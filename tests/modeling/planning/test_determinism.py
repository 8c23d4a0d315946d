"""Plans of both settings of `train.deterministic`, and the cost of the default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modeling.check_device import isolation
from modeling.planning import calibration, efficiency
from modeling.planning.calibration import Calibration
from modeling.planning.determinism import describe_cost
from modeling.planning.efficiency import ATTENTION
from modeling.planning.planner import plan
from parallel import device as devices
from profiles import resolve
from profiles.check import with_value


@pytest.fixture(scope="module")
def profile():
    return resolve.load("llama3-8b-h200")


def measured(deterministic: bool | None, attention: float) -> Calibration:
    rows = [("matmul", 1024, 4096, 4096, 600e12), ("attention", 8192, 8192, 128, attention)]
    table = Calibration("h200", "2026-11-29", "2.13.0", {"bf16": rows}, {"bf16": 2e12}, 3e12)
    return replace(table, deterministic=deterministic)


def test_each_setting_has_its_own_table_and_both_give_the_cost(profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fastest = with_value(profile, "train.deterministic", False)
    measured(False, 500e12).save(calibration.path_of("h200", False))
    assert plan(fastest).basis.startswith("calibrated: h200")
    assert plan(profile).basis == efficiency.basis(profile)
    assert plan(profile).basis.startswith("uncalibrated")  # the other setting's table is not used
    assert "neither measured nor estimated" in describe_cost(profile, plan(profile))
    measured(True, 200e12).save(calibration.path_of("h200", True))
    slow, fast = plan(profile), plan(fastest)
    assert slow.basis.endswith("(calibration/h200-deterministic.json)")
    longer = slow.step_seconds / fast.step_seconds - 1
    assert longer > 0.1
    assert f"{longer:.0%} longer" in describe_cost(profile, slow)
    assert "measured tables" in describe_cost(profile, slow)
    assert describe_cost(fastest, fast).startswith("off")


def test_unmeasured_cost_is_an_estimate_with_its_source(profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Of the 7 products of forward and backward, at the two published speeds in TFLOP/s, of a peak of 989.
    for kernel, forward, backward in (("deterministic", 306.2, 166.0), ("cudnn", 565.7, 469.8)):
        average = 7 / (2 / forward + 5 / backward)
        assert ATTENTION[kernel]["hopper"] == pytest.approx(average / 989, abs=0.005)
    text = describe_cost(profile, plan(profile))
    assert "not measured" in text
    assert "estimate: published speeds of FlashAttention-2 and cuDNN on a Hopper GPU" in text
    elsewhere = resolve.load("llama3-8b-h200", ["cluster.accelerator=b200"])
    assert "neither measured nor estimated" in describe_cost(elsewhere, plan(elsewhere))
    trn2 = resolve.load("llama3-8b")
    assert describe_cost(trn2, plan(trn2)) is None


def test_calibration_writes_a_table_for_each_setting_that_chooses_kernels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = []
    gpu = replace(devices.CPU, nondeterministic=True)
    monkeypatch.setattr(devices.Device, "choose_kernels", lambda _, setting: chosen.append(setting))
    monkeypatch.setattr(isolation, "calibrate", lambda *_, **__: measured(None, 1e12))
    for device, written in ((devices.CPU, ["h200"]), (gpu, ["h200-deterministic", "h200-fastest"])):
        monkeypatch.setattr(isolation, "local_device", lambda _, device=device: (device, None))
        paths = isolation.write_calibration("cpu", 1)
        assert [path.stem for path in paths] == written
        assert all(path.exists() for path in paths)
    assert chosen == [True, True, False]
