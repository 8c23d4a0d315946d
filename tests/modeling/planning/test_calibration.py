"""Plans by the speeds that were measured on a device."""

import os
from dataclasses import replace

import pytest
import torch

from benchmarks.memory import CASES, case
from modeling.planning import calibration
from modeling.planning.calibration import Calibration
from modeling.planning.measure import FP8, ROUNDS, calibrate
from modeling.planning.planner import plan
from modeling.planning.stage_costs import StageCosts
from parallel import device as devices
from parallel.layers.products import Float8
from profiles import resolve
from profiles.check import with_value
from profiles.errors import ProfileError
from tests.profiles.pair import PAIR

pytestmark = pytest.mark.slow


def test_planned_step_uses_the_calibration_measured_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile = case(CASES["one process"])
    without = plan(profile)
    assert (without.step_seconds, without.basis) == (None, "no published peak of cpu, uncalibrated")
    sizes = ((256,), (256, 704), (256,), (256, 256), 1 << 20)
    table = calibrate(devices.resolve("cpu"), torch.device("cpu"), "cpu", sizes)
    assert set(table.products) == set(table.others) == {"float32", "bf16"}
    table.save(calibration.path_of("cpu"))
    planned = plan(profile)
    assert planned.basis.startswith("calibrated: cpu measured on ")
    slower = replace(
        table,
        products={kind: [(*row[:4], row[4] / 2) for row in rows] for kind, rows in table.products.items()},
        others={kind: rate / 2 for kind, rate in table.others.items()},
        memory=table.memory / 2,
    )
    slower.save(calibration.path_of("cpu"))
    os.utime(calibration.path_of("cpu"), (1, 1))
    assert plan(profile).step_seconds == pytest.approx(2 * planned.step_seconds)


def test_calibration_measures_fp8_if_the_device_supports_it(monkeypatch):
    """With torch's product on the CPU, which no profile can use there."""
    called, multiply = [], Float8.multiply

    def recorded(products, *given, **options):
        result = multiply(products, *given, **options)
        called.append((products, result.device.type))
        return result

    monkeypatch.setattr(Float8, "multiply", recorded)
    device = replace(devices.resolve("cpu"), peak_flops={"fp8": 1e12})
    table = calibrate(device, torch.device("cpu"), "cpu", ((32,), (32, 64), (32,), (128, 32), 256))
    shapes = [("matmul", 32, k, n) for k in (32, 64) for n in (32, 64)]
    assert [row[:4] for row in table.products["fp8"]] == shapes
    heads = [("attention", 32, 32, d) for d in (64, 128)]
    assert [row[:4] for row in table.products["bf16"]] == [*shapes, *heads]
    assert called.count((FP8, "cpu")) == len(shapes) * (ROUNDS + 1)
    assert table.others["fp8"] > 0


def test_calibration_prefers_the_nearest_shape():
    rows = [("matmul", 64, 64, 64, 1e9), ("matmul", 4096, 4096, 4096, 1e12)]
    table = Calibration("cpu", "", "", {"bf16": rows}, {"bf16": 1e9}, 1e9)
    assert table.rate("bf16", ("matmul", 2048, 8192, 1024)) == 1e12
    assert table.seconds("bf16", {("matmul", 32, 64, 128): 2e9}, 3e9) == pytest.approx(2 + 3)


def test_head_and_attention_of_an_fp8_model_are_planned_in_bf16():
    rows = {
        "fp8": [("matmul", 64, 64, 64, 4e9)],
        "bf16": [("matmul", 64, 64, 64, 1e9), ("attention", 8, 8, 64, 2e9)],
    }
    table = Calibration("h100", "", "", rows, {"fp8": 1e9}, 1e9)
    shapes = ("fp8", 64, 64, 64), ("matmul", 64, 64, 64), ("attention", 8, 8, 64)
    assert [table.rate("fp8", shape) for shape in shapes] == [4e9, 1e9, 2e9]
    profile = resolve.load("llama3-8b-h100", ["train.precision=fp8", "train.deterministic=false"])
    products = [
        layer.products for layer in StageCosts(profile).layers(range(profile.model.num_hidden_layers))
    ]
    eight = sum(n for each in products for shape, n in each.items() if shape[0] == "fp8")
    rest = sum(n for each in products for shape, n in each.items() if shape[0] != "fp8")
    assert 0.5 < eight / (eight + rest) < 0.9
    bf16 = plan(with_value(profile, "train.precision", "bf16"))
    # Published: 1.15 to 1.29, with quantization and all that stays in bf16.
    assert 1.1 < bf16.step_seconds / plan(profile).step_seconds < 1.35


def test_unreadable_calibration_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calibration.path_of("cpu").parent.mkdir()
    calibration.path_of("cpu").write_text("{")
    with pytest.raises(ProfileError, match=r"calibration.*cpu\.json.*check_device --calibrate"):
        plan(resolve.load(PAIR))
