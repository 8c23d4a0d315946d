"""The search's step-by-step changes of a topology."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modeling.planning.planner import plan
from modeling.planning.search import SLOWER, RejectedDegrees, Topology, Variation, explain, search
from profiles import resolve

pytestmark = pytest.mark.slow


def test_search_changes_the_fastest_topologies_as_long_as_steps_get_shorter():
    """Microbatches, stages per rank and short contexts, which its combinations leave as they are."""
    small = ("model.num_hidden_layers=4", "train.global_batch_size=32", "cluster.devices_per_node=4")
    profile = resolve.load(
        "deepseek-coder-1.3b-h100", [*small, "parallel.tensor=1", "train.sequence_length=2048"]
    )
    combined, varied = (search(profile, vary)[0] for vary in (False, True))
    assert varied[0].plan.step_seconds < combined[0].plan.step_seconds
    assert varied[0].overrides["train.micro_batch_size"] > 1
    changes = [f"{key}={'null' if value is None else value}" for key, value in varied[0].overrides.items()]
    again = plan(resolve.load(profile.name, [*small, "train.sequence_length=2048", *changes]))
    assert again.step_seconds == varied[0].plan.step_seconds


def test_variations_of_a_topology_are_valid_and_include_several_stages_per_rank():
    profile = resolve.load("llama3.1-405b-h100", ["train.global_batch_size=1536"])
    start = Variation.of(
        profile, {"parallel.tensor": 8, "parallel.pipeline": 8, "parallel.shard_degree": None}
    )
    others = [*start.neighbours(profile)]
    assert len({*others}) == len(others)
    assert {each.stages for each in others} == {1, 2}
    assert {each.context for each in others} == {1, 2}
    four = replace(start, stages=4)
    keys = four.keys(profile)
    assert keys["parallel.schedule"] == "interleaved"
    assert len(keys["parallel.pipeline_cuts"]) == 8 * 4 - 1
    assert Variation.of(profile, keys) == four


def test_tensor_degrees_are_said_not_to_fit_only_if_all_of_them_were_planned():
    small = ("model.num_hidden_layers=4", "parallel.tensor=2", "parallel.data_sharding=zero1")
    best = plan(resolve.load("deepseek-coder-1.3b-h100", [*small, "parallel.keep_gathered=false"]))
    keys = {"parallel.data_sharding": "zero1", "parallel.shard_degree": None, "train.recompute": "none"}
    rejected = [RejectedDegrees({"tensor": 1}, "memory"), RejectedDegrees({"tensor": 1}, SLOWER)]
    for others, said in ((rejected[:1], True), (rejected, False)):
        assert ("smaller tensor degrees do not fit" in explain([Topology(keys, best)], others)) == said
