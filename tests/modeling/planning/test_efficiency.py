"""Speeds that plans of GPUs assume without a measurement."""

from __future__ import annotations

from modeling.planning.planner import plan
from profiles import resolve


def test_float32_on_gpus_is_planned_at_its_own_peak_or_without_times():
    overrides = ["model.num_hidden_layers=2", "train.precision=float32"]
    (stage,) = plan(resolve.load("llama3-8b-h200", overrides)).stages
    assert 0.3 * 67e12 < stage.rate < 67e12
    unknown = plan(resolve.load("llama3-8b-h200", [*overrides, "cluster.accelerator=b200"]))
    assert (unknown.step_seconds, unknown.basis) == (None, "no published peak of cuda, uncalibrated")
