"""The search's step-by-step changes of a topology."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modeling.planning.planner import plan
from modeling.planning.search import SLOWER, RejectedDegrees, Topology, Variation, explain, search
from profiles import resolve

pytestmark = pytest.mark.slow


def test_search_changes_the_fastest_topologies_as_long_as_steps_get_shorter():
    """Microbatches, stages per rank and short contexts, which its combinations leave as they are.

    One of the combinations shards within a node.
    """
    small = ("model.num_hidden_layers=4", "train.global_batch_size=32")
    small += ("cluster.nodes=2", "cluster.devices_per_node=2")
    profile = resolve.load(
        "deepseek-coder-1.3b-h100", [*small, "parallel.tensor=1", "train.sequence_length=2048"]
    )
    combined, varied = (search(profile, vary)[0] for vary in (False, True))
    (hybrid,) = (each for each in combined if each.overrides["parallel.shard_degree"] is not None)
    assert hybrid.overrides["parallel.shard_degree"] == 2
    assert hybrid.plan.levels == {"data": "node", "replica": "network"}
    assert varied[0].plan.step_seconds < combined[0].plan.step_seconds
    assert varied[0].overrides["train.micro_batch_size"] > 1
    changes = [f"{key}={'null' if value is None else value}" for key, value in varied[0].overrides.items()]
    again = plan(resolve.load(profile.name, [*small, "train.sequence_length=2048", *changes]))
    assert again.step_seconds == varied[0].plan.step_seconds


def test_variations_of_a_topology_are_valid_and_include_several_stages_per_rank_and_hsdp_degrees():
    profile = resolve.load("llama3.1-405b-h100", ["train.global_batch_size=1536"])
    start = Variation.of(
        profile,
        {
            "parallel.tensor": 8,
            "parallel.pipeline": 8,
            "parallel.context": 1,
            "parallel.data_sharding": "fsdp",
        },
    )
    others = [*start.neighbours(profile)]
    assert len({*others}) == len(others)
    assert {each.stages for each in others} == {1, 2}
    assert {each.context for each in others} == {1, 2}
    in_node = replace(start, tensor=2, shard_degree=4)
    for place, degrees in ((replace(in_node, shard_degree=None), {4}), (in_node, {2, 8, None})):
        alike = [
            each
            for each in place.neighbours(profile)
            if replace(each, shard_degree=place.shard_degree) == place
        ]
        assert {each.shard_degree for each in alike} == degrees
        assert all(Variation.of(profile, each.keys(profile)) == each for each in alike)
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
