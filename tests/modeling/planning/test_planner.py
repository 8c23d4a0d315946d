"""Plans against measurements: real runs' memory, published throughputs, suggested changes that fit."""

from dataclasses import replace
from functools import partial

import pytest

from benchmarks.memory import CASES, case, measure
from modeling.models import language_model
from modeling.models.build import layer_modes
from modeling.planning import planner
from modeling.planning.auto import TOLERANCE, resolve_auto
from modeling.planning.links import bandwidth
from modeling.planning.memory import choice_bytes
from modeling.planning.planner import fits, require_fit
from modeling.planning.search import explain, search
from modeling.planning.stage_costs import CostCache, StageCosts
from parallel import device as devices
from parallel.loss import Chunks
from profiles import resolve
from profiles.check import with_value
from profiles.errors import ProfileError
from profiles.recompute import MODES
from tests.profiles.pair import PAIR
from tests.profiles.published import published

pytestmark = pytest.mark.slow

LONGER = ["train.sequence_length=32768", "model.max_position_embeddings=32768"]
RUNS = "one process", "tensor 2, full", "data 2", "pipeline 2 x tensor 2", "context 2, hybrid, selective"
ZERO1 = ("parallel.data_sharding=zero1",)
CACHE: CostCache = {}  # of these tests' plans: many have layers in common
plan = partial(planner.plan, cache=CACHE)


@pytest.mark.parametrize("name", RUNS)
def test_planned_bytes_match_a_real_run(pool, name):
    profile = case(CASES[name])
    planned = plan(profile).stages
    ranks = pool.run(measure, profile.world_size, overrides=CASES[name])
    for rank, stage in enumerate(planned):
        measured = [(states, peak) for at, states, peak in ranks if at == rank]
        states = {kind: size for kind, size in stage.bytes.items() if kind != "activations"}
        assert all(found == states for found, _ in measured)  # to the byte
        assert stage.total == pytest.approx(max(peak for _, peak in measured), rel=0.15)


# AWS's published figures for trn1.32xlarge: nodes, tensor, pipeline, tokens per second.
PUBLISHED = {
    "gpt3-23b-trn1": (32, 8, 4, 219.5e3),
    "gpt3-46b-trn1": (32, 8, 8, 98.8e3),
    "gpt3-175b-trn1": (32, 32, 8, 29.9e3),
    "llama2-7b-trn1": (16, 8, 1, 402e3),
    "llama2-13b-trn1": (32, 8, 4, 358e3),
    "llama2-70b-trn1": (32, 32, 4, 73e3),
    "llama3-8b-trn1": (32, 32, 1, 438e3),
    "llama3.1-70b-trn1": (32, 32, 8, 65e3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_planned_throughput_is_near_the_published_one(name):
    nodes, tensor, pipeline, speed = PUBLISHED[name]
    degrees = (f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}", f"cluster.nodes={nodes}")
    planned = plan(resolve.load(published(name), [*degrees, "train.global_batch_size=1024"]))
    assert planned.tokens_per_second == pytest.approx(speed, rel=0.2)
    assert planned.mfu == pytest.approx(
        planned.tokens_per_second * planned.flops_per_token / (nodes * 32 * 95e12)
    )


def test_times_and_price_are_consistent():
    planned = plan(resolve.load(published("llama3-70b-trn1"), ["cluster.node_price=40"]))
    assert planned.days == pytest.approx(planned.step_seconds * 30000 / 86400)
    assert planned.node_hours == pytest.approx(planned.days * 24 * 16)
    assert planned.price == pytest.approx(planned.node_hours * 40)
    assert planned.bubble == pytest.approx(7 / 512)
    assert plan(resolve.load(published("llama3-70b-trn1"))).price is None


def test_planned_step_includes_the_memory_traffic_of_the_optimizer():
    alone = ("cluster.devices_per_node=1", "parallel.data_sharding=none", "train.global_batch_size=2")
    traffic = {}
    for size in (2, 1):  # one microbatch, two
        profile = resolve.load("deepseek-coder-1.3b-h100", [*alone, f"train.micro_batch_size={size}"])
        planned = plan(profile)
        (stage,) = planned.stages
        traffic[size] = [bytes / planned.parameters for bytes in (stage.accumulated, stage.updated)]
        work = stage.flops / stage.rate
        optimizer = (stage.accumulated + stage.updated) / (0.8 * 3.35e12)
        assert planned.step_seconds == pytest.approx(work + optimizer)
        assert "optimizer at 2,680 GB/s of memory per device, 80% of 3,350" in planned.assumptions
    # 6 to accumulate, 8 for the norms of gradients and weights, 28 for AdamW, 6 for the bf16 copy
    assert traffic[2] == pytest.approx([6, 42], rel=1e-3)
    assert traffic[1] == pytest.approx([16, 42], rel=1e-3)


def test_muon_has_one_state_and_its_products_and_exchange_take_time():
    changes = ["train.precision=bf16", "parallel.data_sharding=fsdp"]
    adamw, muon = (
        plan(resolve.load("llama3-8b-h200", [*changes, f"train.optimizer={name}"]))
        for name in ("adamw", "muon")
    )
    model, ranks = resolve.load("llama3-8b-h200").model, 8
    h, f, kv = model.hidden_size, model.intermediate_size, model.num_key_value_heads * model.head_dim
    weights = model.num_hidden_layers * (2 * h * h + 2 * h * kv + 3 * h * f)
    freed = adamw.stages[0].bytes["optimizer"] - muon.stages[0].bytes["optimizer"]
    assert freed == pytest.approx(4 * weights / ranks, rel=1e-3)
    small, large = 2 * kv**2 * h + kv**3, 2 * h**2 * f + h**3
    products = 5 * model.num_hidden_layers * (2 * 3 * h**3 + 2 * small + 3 * large)
    assert muon.stages[0].update_flops == pytest.approx(2 * products / ranks, rel=1e-3)
    sent = muon.communication["data"] - adamw.communication["data"]
    assert sent == pytest.approx(2 * 2 * weights / ranks * (ranks - 1) / ranks, rel=1e-3)
    assert muon.step_seconds > adamw.step_seconds


def test_optimizer_traffic_is_divided_by_the_shards():
    traffic = {}
    for sharding in ("zero1", "fsdp"):
        planned = plan(resolve.load("llama3-8b-h200", [f"parallel.data_sharding={sharding}"]))
        (stage,) = planned.stages
        traffic[sharding] = [bytes / planned.parameters for bytes in (stage.accumulated, stage.updated)]
    m, d, ends = 128, 8, 2 * 128256 * 4096 / 8.03e9  # microbatches, ranks, share of embedding and head
    assert traffic["zero1"] == pytest.approx([10 * m - 4, (8 + 42) / d], rel=1e-3)
    gathers = 2 * m * (1 - ends) + ends
    assert traffic["fsdp"] == pytest.approx([6 * m + (12 * m - 4 + 6 * gathers) / d, 36 / d], rel=1e-3)


def test_communication_volume_follows_from_the_degrees():
    communication = plan(resolve.load(published("llama3-70b-cp-trn1"))).communication
    assert all(communication[axis] > 0 for axis in ("tensor", "context", "pipeline", "data"))
    communication = plan(
        resolve.load(PAIR, ["parallel.tensor=1", "cluster.devices_per_node=1"])
    ).communication
    assert set(communication.values()) == {0}
    # float32 gradients are reduce-scattered and bf16 weights all-gathered, half of each on two ranks.
    both = plan(resolve.load(PAIR, ["parallel.tensor=1", "train.micro_batch_size=1"]))
    assert (
        both.communication["data"]
        == both.stages[0].bytes["gradients"] // 2 + both.stages[0].bytes["parameters"] // 2
    )


def test_flops_count_the_keys_in_a_sliding_window():
    full, windowed = (
        plan(resolve.load("llama3-8b", [*change, "parallel.context=2"]))
        for change in ((), ("model.architecture=mistral", "model.sliding_window=1024"))
    )
    s, w, width, layers = 8192, 1024, 4096, 32
    hidden_keys = s / 2 - (w - w**2 / (2 * s))
    flops = 12 * layers * width * hidden_keys  # of 2 products, which count 3 times in training
    assert full.flops_per_token - windowed.flops_per_token == pytest.approx(flops)
    assert full.step_seconds > windowed.step_seconds


def test_lora_plans_gradients_of_updates_only_and_counts_the_flops_of_updated_experts():
    alone = (
        "parallel.tensor=1",
        "parallel.data_sharding=none",
        "train.recompute=none",
        "train.micro_batch_size=1",
        "train.precision=bf16",
    )
    profile = resolve.load(
        "tiny-moe", [*alone, "parallel.expert=1", "lora.rank=64", "lora.targets=[output, gate_up, down]"]
    )
    model, planned = profile.model, plan(profile)
    h, f, heads = model.hidden_size, model.expert_width, model.num_attention_heads * model.head_dim
    updates = 64 * (heads + h) + model.num_experts * 64 * ((h + 2 * f) + (f + h))
    assert planned.stages[0].bytes["gradients"] == 4 * updates * model.num_hidden_layers
    assert planned.stages[0].bytes["optimizer"] == 12 * updates * model.num_hidden_layers
    idle = (model.num_experts - model.num_experts_per_tok) * 64 * (2 * h + 3 * f) * model.num_hidden_layers
    assert planned.active_parameters == model.active_parameters + updates * model.num_hidden_layers - idle
    counted = sum(layer.flops for layer in StageCosts(profile).layers(range(model.num_hidden_layers)))
    assert counted == pytest.approx(planned.flops_per_token * profile.train.sequence_length, rel=0.02)


def test_pass_that_counts_choices_of_experts_is_planned_but_is_no_work_of_the_model():
    split = ("parallel.pipeline=2", "parallel.data_sharding=fsdp", "train.recompute=none")
    profile = resolve.load("qwen3-30b-a3b-h200", split)
    alone, counted = (plan(with_value(profile, "train.balance", kind)) for kind in ("sequence", "global"))
    # Another forward pass of all layers, without the loss; these gather bf16 weights and scatter float32 gradients.
    assert counted.stages[0].flops == pytest.approx(4 / 3 * alone.stages[0].flops, rel=0.02)
    assert counted.communication["data"] == pytest.approx(
        (3 * 2 + 4) / (2 * 2 + 4) * alone.communication["data"], rel=0.01
    )
    assert counted.communication["pipeline"] == 3 / 2 * alone.communication["pipeline"]
    assert counted.stages[0].accumulated > alone.stages[0].accumulated
    assert counted.needs == alone.needs
    shared = with_value(with_value(profile, "train.balance", "global"), "parallel.expert", 4)
    choices = profile.accumulation_steps * profile.micro_batch_rows * profile.train.sequence_length * 8
    assert choice_bytes(shared, [range(3), range(24, 26)]) == 5 * 2 * choices  # of 16 bits
    assert choice_bytes(with_value(shared, "train.capacity_factor", 1.25), [range(3)]) == 0
    ahead = resolve.load("glm4.5-106b-a12b-h200", ["train.balance=global"])  # predicts two tokens
    last = ahead.model.num_hidden_layers - 1
    earlier, later = (choice_bytes(ahead, [range(first, first + 1)]) for first in (last - 1, last))
    assert later == 2 * earlier > 0
    assert counted.mfu * counted.step_seconds == pytest.approx(alone.mfu * alone.step_seconds)


def test_plans_of_gpus_count_the_loss_that_runs(monkeypatch):
    """Gradients of logits, not a float32 sum of the head's; all logits for a user-defined loss.

    With modules for multi-token prediction, one loss of the complete sequence after the other.
    """
    profile = resolve.load("llama3-8b-h100")

    def last_layer(profile):
        costs = StageCosts(profile).layer(profile.model.num_hidden_layers - 1, "none")
        return max(costs.forward_peak, costs.backward_peak), costs.moved

    def loss(modules):
        profile = resolve.load("glm4.5-106b-a12b-h200", [f"model.num_nextn_predict_layers={modules}"])
        costs, layers = StageCosts(profile), profile.model.num_hidden_layers
        return costs.loss(costs.module(range(layers - 1, layers)))

    (peak, flops), alone = loss(1), loss(0)
    assert (peak, flops) == (pytest.approx(alone[0], rel=1e-3), 2 * alone[1])
    kept, full = last_layer(profile), last_layer(with_value(profile, "train.loss", "mine:loss"))
    monkeypatch.setattr(language_model, "choose_chunks", lambda *_: Chunks(2048, False))
    summed = last_layer(profile)
    vocabulary, tokens = profile.model.vocab_size, profile.train.sequence_length
    weight = vocabulary * profile.model.hidden_size
    assert kept[0] < summed[0] - 2 * weight
    assert kept[1] < summed[1] - tokens // 2048 * 4 * weight
    assert full[0] > kept[0] + 1.5 * 4 * tokens * vocabulary


def test_plan_for_gpus_gathers_keys_and_values_once_where_attention_has_masks():
    cut = ["parallel.context=4", "parallel.tensor=2"]
    communication = [
        plan(resolve.load("llama3-8b-h100", [*cut, f"train.document_masks={masks}"])).communication["context"]
        for masks in ("true", "false")
    ]
    # Gathered forward and reduced backward, 2(c-1), in the place of a ring of keys, values and their gradients.
    assert communication[0] < 0.6 * communication[1]


def test_both_rows_of_a_preference_pair_count_as_tokens():
    single, pairs = (plan(resolve.load(f"llama3-8b-{kind}")) for kind in ("sft", "dpo"))
    assert pairs.tokens_per_second == pytest.approx(single.tokens_per_second, rel=0.05)
    assert pairs.mfu == pytest.approx(single.mfu, rel=0.05)


def test_recomputation_trades_memory_for_time():
    plans = [
        plan(resolve.load(published("llama3-70b-trn1"), [f"train.recompute={mode}"]))
        for mode in ("none", "selective", "full")
    ]
    memory = [planned.stages[0].bytes["activations"] for planned in plans]
    assert memory[0] > 1.5 * memory[1] > 1.5 * memory[2]
    assert plans[0].step_seconds < plans[1].step_seconds < plans[2].step_seconds


def test_plans_that_share_measurements_are_those_of_separate_plans():
    """Of two accelerators, whose bandwidths let them split the loss of a frozen head into 1 and 2 chunks."""
    profile = resolve.load("llama3-8b-h200", ["train.sequence_length=2304", "lora.rank=8"])
    cache: CostCache = {}
    h100, h200 = (with_value(profile, "cluster.accelerator", name) for name in ("h100", "h200"))
    shared = [planner.plan(each, cache).needs for each in (h100, h200)]
    assert shared[0] > shared[1] == planner.plan(h200).needs


@pytest.mark.parametrize("tensor", [8, 16, 32])
def test_auto_recomputation_differs_by_stage_and_is_faster_than_one_mode(tensor):
    pipelined = [*ZERO1, "parallel.pipeline=4", f"parallel.tensor={tensor}"]
    profile = resolve.load("llama3-70b", [*pipelined, "train.recompute=auto"])
    chosen = resolve_auto(profile, CACHE)
    planned = plan(chosen)
    assert planned.fits
    value = chosen.train.recompute
    assert value == "none" if tensor == 32 else isinstance(value, list)
    modes, stages = (
        layer_modes(chosen),
        [range(*layers) for stage in planned.stages for layers in stage.layers],
    )
    weights = [sum(MODES.index(modes[layer]) for layer in layers) for layers in stages]
    assert weights == sorted(weights, reverse=True)  # the first stage has the most microbatches in flight
    for mode in MODES:
        other = plan(with_value(profile, "train.recompute", mode))
        assert not other.fits or planned.step_seconds <= other.step_seconds * (1 + TOLERANCE[0])


def test_auto_recomputation_of_layers_of_two_kinds_mixes_the_modes():
    """GPT-OSS alternates layers with a window and without; DeepSeek's first layers are dense."""
    one_stage = ["parallel.pipeline=1", "parallel.data_sharding=fsdp", "parallel.expert=256"]
    for name, overrides, modes in (
        ("gpt-oss-20b", [], {"full", "selective"}),
        ("deepseek-v3", one_stage, {"full", "none"}),
    ):
        chosen = resolve_auto(resolve.load(name, ["train.recompute=auto", *overrides]), CACHE)
        assert set(layer_modes(chosen)) == modes
        planned = plan(chosen)
        assert planned.fits
        assert planned.step_seconds < plan(with_value(chosen, "train.recompute", "full")).step_seconds


def test_plan_that_does_not_fit_is_rejected_with_its_bytes():
    profile = resolve.load(published("llama3-70b-trn1"), ["parallel.pipeline=1", "cluster.nodes=2"])
    planned = plan(profile)
    assert not planned.fits
    with pytest.raises(ProfileError, match=r"stage 0 needs \d+\.\d GiB per device .*, which has 16\.0 GiB"):
        require_fit(profile, planned)


@pytest.mark.parametrize(
    ("name", "overrides", "among", "not_among"),
    [
        ("llama3-8b", [*ZERO1, "parallel.tensor=1"], "parallel.tensor=8", "train.recompute=full"),
        (
            "llama3-8b",
            [*ZERO1, "parallel.tensor=16", "train.micro_batch_size=8"],
            "train.recompute=selective",
            "train.recompute=full",
        ),
        (
            "llama3-8b",
            [*ZERO1, "train.recompute=full", "parallel.tensor=1"],
            "parallel.data_sharding=fsdp",
            None,
        ),
        ("llama3-8b-h200", [*LONGER, "parallel.data_sharding=fsdp"], "parallel.context=2", None),
        (
            published("llama3-70b-trn1"),
            ["parallel.pipeline=1", "cluster.nodes=2"],
            None,
            "train.recompute=full",
        ),
    ],
)
def test_rejection_suggests_single_changes_that_fit(name, overrides, among, not_among):
    profile = resolve.load(name, overrides)
    with pytest.raises(ProfileError) as caught:
        require_fit(profile, plan(profile))
    choices = caught.value.choices
    assert among is None or among in choices
    assert not_among not in choices
    assert choices or "no single change is enough" in caught.value.reason
    for change in choices:
        changed = resolve.load(name, [*overrides, change])
        resolve.check(changed)
        assert plan(changed).fits


def test_cpu_plan_includes_the_process_itself():
    planned = plan(resolve.load(PAIR))
    assert planned.host_bytes > 300 << 20
    assert planned.needs == planned.stages[0].total + planned.host_bytes
    tight = replace(planned, device_bytes=planned.needs, fits=False)
    with pytest.raises(
        ProfileError, match=r"needs 0\.5 GiB per device \(.*process 0\.4\), which has 0\.5 GiB"
    ):
        require_fit(resolve.load(PAIR), tight)
    assert plan(resolve.load("llama3-8b")).host_bytes == 0


@pytest.mark.parametrize(("device", "fit"), [("trn2", False), ("trn3", False), ("h100", True)])
def test_plans_leave_more_memory_free_on_neuron_where_it_fragments(device, fit):
    share = devices.ACCELERATORS[device].reserve
    stages = plan(resolve.load("llama3-8b")).stages
    needed = max(stage.total for stage in stages)
    assert fits(stages, 0, int(needed / 0.93), share) == fit
    assert fits(stages, 0, int(needed / 0.89), share)


def test_gpu_of_unknown_memory_needs_an_accelerator_name():
    overrides = ["cluster.device=cuda", "parallel.tensor=1", "cluster.devices_per_node=1"]
    with pytest.raises(ProfileError, match=r"cluster\.accelerator.*a100, h100, h100_96, h800, h200, b200"):
        plan(resolve.load(PAIR, overrides))


def test_search_ranks_topologies_that_fit_and_explains_the_others():
    profile = resolve.load(published("deepseek-coder-6.7b-trn1"), ["cluster.devices_per_node=8"])
    found, rejected = search(profile)
    speeds = [topology.plan.tokens_per_second for topology in found]
    assert speeds == sorted(speeds, reverse=True)
    shipped = plan(profile)
    assert speeds[0] >= shipped.tokens_per_second or not shipped.fits
    assert all(topology.plan.fits for topology in found)
    reasons = {tuple(each.degrees.values()): each for each in rejected}
    assert reasons[1, 1, 1].reason == "memory"
    assert reasons[1, 1, 1].needs > 0.9 * 16 * 2**30
    for topology in found[:2]:
        changes = [f"{key}={'null' if value is None else value}" for key, value in topology.overrides.items()]
        again = resolve.load(published(profile.name), ["cluster.devices_per_node=8", *changes])
        assert plan(again).step_seconds == topology.plan.step_seconds


def test_search_explains_invalid_tensor_degrees():
    _, rejected = search(resolve.load(published("deepseek-coder-33b-trn1"), ["cluster.nodes=1"]))
    reasons = {each.degrees["tensor"]: each.reason for each in rejected if len(each.degrees) == 1}
    assert "does not divide 56 query heads" in reasons[16]


@pytest.mark.parametrize(("sequence", "own", "tried"), [(131072, 1, {1, 2, 4, 8, 16}), (4096, 16, {1, 16})])
def test_search_tries_context_degrees_for_long_sequences_and_the_profiles_own(sequence, own, tried):
    cluster = ("cluster.nodes=2", "cluster.launcher=slurm", "train.global_batch_size=16")
    small = ("model.num_hidden_layers=1", "train.micro_batch_size=1")
    length = (
        f"train.sequence_length={sequence}",
        "model.max_position_embeddings=131072",
        f"parallel.context={own}",
    )
    found, rejected = search(resolve.load("deepseek-coder-1.3b-h100", [*cluster, *small, *length]))
    degrees = {topology.plan.mesh["context"] for topology in found}
    assert degrees | {each.degrees["context"] for each in rejected} == tried
    assert max(tried) in degrees


def test_search_proposes_fsdp_on_chips_with_its_reasons():
    profile = resolve.load("llama3-8b", ["model.vocab_size=32000", "tokenizer.vocabulary_size=null"])
    found, rejected = search(profile)
    best = found[0].overrides
    assert (best["parallel.tensor"], best["parallel.pipeline"]) == (4, 1)
    assert (best["parallel.data_sharding"], best["parallel.shard_degree"]) == ("fsdp", None)
    assert found[0].plan.levels == {"tensor": "chip", "data": "node"}
    text = "; ".join(explain(found, rejected))
    assert "tensor 4 communicates on one chip" in text
    assert "over 16 ranks inside a node" in text
    assert "slower" in text


def test_links_follow_from_the_position_of_a_group():
    hybrid = [
        "parallel.data_sharding=fsdp",
        "parallel.shard_degree=16",
        "parallel.tensor=4",
        "parallel.pipeline=1",
    ]
    profile = resolve.load("llama3-70b", [*hybrid, "train.recompute=full"])
    assert plan(profile).levels == {"tensor": "chip", "data": "node", "replica": "network"}
    trn2 = devices.ACCELERATORS["trn2"]
    assert bandwidth(profile, "tensor") == pytest.approx(0.6 * trn2.bandwidth / 2)
    assert bandwidth(profile, "data") == pytest.approx(0.6 * trn2.link)
    assert bandwidth(profile, "replica") == pytest.approx(0.3 * trn2.network)
    # A group with 16 ranks per node has 16 devices' share of the network.
    across_nodes = with_value(profile, "parallel.shard_degree", None)
    assert bandwidth(across_nodes, "data") == pytest.approx(0.3 * 16 * trn2.network)
    # Of an all-to-all, each rank sends what goes to other nodes over its own share.
    experts = resolve.load("deepseek-v3", ["parallel.pipeline=1", "parallel.expert=256"])
    inside, outside = 31 / 255 / (0.6 * trn2.link), 224 / 255 / (0.3 * trn2.network)
    assert bandwidth(experts, "expert") == pytest.approx(1 / (inside + outside))
    # The groups that share experts have fewer ranks in a node than the others.
    sharded = resolve.load("dbrx", ["parallel.tensor=2", "parallel.expert=8"])
    assert bandwidth(sharded, "expert_data") == pytest.approx(0.3 * 4 * trn2.network)
    assert bandwidth(sharded, "data") == pytest.approx(0.3 * 32 * trn2.network)
