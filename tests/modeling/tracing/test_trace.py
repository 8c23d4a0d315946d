"""Tracing: the same few graphs for every layer, stage and rank; statistics that agree with real runs."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from modeling.compilation import manifest
from modeling.compilation.compilers import Inductor
from modeling.models.build import partition_layers
from modeling.models.families import llama
from modeling.models.flops import flops_per_token
from modeling.planning.memory import activation_bytes, plan_buckets
from modeling.planning.planner import plan
from modeling.planning.stage_costs import StageCosts
from modeling.tracing import compile, graph_stats, operators
from modeling.tracing.trace import Trace, fake_world, trace
from modeling.tracing.traced_plan import apply_trace, traced_ranks
from modeling.training.trainer import Trainer
from parallel import device, initialize
from parallel.attention import kernels
from parallel.layers.norms import ProjectionNorm
from profiles.resolve import load
from tests.modeling import micro

pytestmark = pytest.mark.slow

# every mesh axis: KV heads replicated on two ranks each, two stages, context 2; products in two chunks
SPREAD = (
    "model.num_attention_heads=8",
    "parallel.tensor=4",
    "parallel.pipeline=2",
    "parallel.context=2",
    "parallel.overlap_chunks=2",
    "cluster.devices_per_node=16",
    "train.micro_batch_size=1",
)
ALONE = ("parallel.tensor=1", "cluster.devices_per_node=1", "train.global_batch_size=2")  # one process
# two stages on a device that compiles each operator
STAGES = (
    *("cluster.device=neuron", "compile.enabled=true", "model.num_hidden_layers=4"),
    *("parallel.tensor=1", "parallel.pipeline=2"),
)
GPT = (
    *("model.architecture=gpt", "model.num_key_value_heads=4", "model.dropout=0.1", "model.hidden_act=gelu"),
    *("model.tie_word_embeddings=true", "model.attention_bias=true", "model.mlp_bias=true"),
)


def profile(tmp_path, *overrides: str):
    folder = micro.run_folder(tmp_path / "run", *overrides)
    return load(str(folder / "profile.yaml"))


@cache
def traced(*overrides: str, rank: int = 0) -> Trace:
    """The trace of a profile, made once; each takes some seconds of CPU."""
    with TemporaryDirectory() as folder:
        return trace(profile(Path(folder), *overrides), rank)


def digests(found: Trace) -> dict[str, str]:
    return {program.name: program.digest for program in found.programs}


def test_run_has_a_few_graphs_of_known_names():
    assert {program.name: len(program.graphs) for program in traced().programs} == {
        "block, evaluation": 1,
        "block, training": 2,
        "loss, evaluation": 1,
        "loss, training": 1,  # its gradients are part of forward
    }


def test_document_masks_change_the_block_graphs(tmp_path):
    masked = digests(trace(profile(tmp_path, "train.document_masks=true")))
    plain = digests(traced())
    assert {name for name in plain if masked[name] != plain[name]} == {"block, evaluation", "block, training"}


def test_user_defined_loss_has_no_graph(tmp_path):
    found = trace(profile(tmp_path, "train.loss=mine:loss"))
    assert {program.name for program in found.programs} == {"block, evaluation", "block, training"}


def test_traced_costs_include_a_user_defined_loss(tmp_path):
    large = ("model.vocab_size=16000", "tokenizer.vocabulary_size=16000")
    one = profile(tmp_path, *ALONE, *large, "train.loss=mine:loss")
    planned, found = plan(one), trace(one)
    (after,) = apply_trace(one, planned, found.to_json()).stages
    assert after.flops == pytest.approx(planned.stages[0].flops, rel=0.05)
    logits = 4 * 2 * 32 * one.model.vocab_size
    assert after.bytes["activations"] > found.stages[0].saved + 2.5 * logits


def test_device_that_compiles_each_operator_has_graphs_of_the_complete_model_and_step():
    found = traced(*STAGES, "parallel.schedule=interleaved")
    regions = ("embedding", "rotations", "block", "norm", "loss")
    names = {f"{region}, {mode}" for region in regions for mode in ("training", "evaluation")}
    assert {program.name for program in found.programs} == names | {"step"}
    assert all(len(program.graphs) == 1 for program in found.programs if program.name == "step")


def test_deferred_weight_gradients_are_separate_graphs():
    """Those of QKV, attention output and both MLP products, on a device that compiles each operator."""
    zero_bubble, interleaved = (
        traced(*STAGES, f"parallel.schedule={schedule}") for schedule in ("zero_bubble", "interleaved")
    )
    assert zero_bubble.graphs == interleaved.graphs + 4


@pytest.fixture
def compiles_blocks(monkeypatch):
    """Neuron compiles only blocks and the loss: to trace each operator takes several times as long."""
    monkeypatch.setitem(device.KINDS, "neuron", replace(device.NEURON, compiles_operators=False))


@pytest.mark.usefixtures("compiles_blocks")
def test_fsdp_gathers_in_both_graphs_of_a_block_and_saves_no_weights(tmp_path):
    """On Neuron, whose compiler schedules the collectives; also with activation checkpointing."""
    settings = ("cluster.device=neuron", "compile.enabled=true", "parallel.tensor=1")
    sharding = "parallel.data_sharding=fsdp"
    plain, *traces = (
        trace(profile(tmp_path / "-".join(more), *settings, *more))
        for more in ((), (sharding,), (sharding, "train.recompute=full"))
    )
    assert traces[0].stages[0].saved == plain.stages[0].saved
    for sharded in traces:
        (block,) = (program for program in sharded.programs if program.name.endswith("block, training"))
        forward, backward = (graph.operators for graph in block.graphs)
        gather, scatter = (
            f"_c10d_functional.{name}_tensor" for name in ("all_gather_into", "reduce_scatter")
        )
        assert (forward[gather], backward[gather], backward[scatter]) == (1, 1, 1)


def test_graphs_and_operators_are_the_same_on_every_rank():
    first, last = traced(*SPREAD), traced(*SPREAD, rank=7)  # on which all ranks of the axes differ
    assert digests(first) == digests(last)
    assert operators.count_operators(first) == operators.count_operators(last)


def test_graph_that_depends_on_the_rank_has_another_digest(tmp_path, monkeypatch):
    import modeling.models.families.llama

    split = profile(tmp_path)
    forward = modeling.models.families.llama.MLP.forward

    def scaled_by_rank(self, x, keys=None):
        return forward(self, x, keys) * (1.0 + self.down.axis.rank)

    monkeypatch.setattr(modeling.models.families.llama.MLP, "forward", scaled_by_rank)
    assert digests(trace(split, 0))["block, training"] != digests(trace(split, 1))["block, training"]


@pytest.mark.parametrize("more", [(), GPT], ids=["llama", "gpt"])
def test_number_of_graphs_is_independent_of_layers_and_ranks(tmp_path, more):
    wide = ("cluster.devices_per_node=16", "train.global_batch_size=16", "parallel.pipeline=2")
    large = trace(profile(tmp_path, *more, *wide, "model.num_hidden_layers=6"))
    assert digests(large) == digests(traced(*more))
    assert len(large.stages) == 2


def test_each_mode_of_recomputation_has_its_block_programs_for_any_stage(tmp_path):
    layers = "model.num_hidden_layers=3"
    mixed = profile(tmp_path / "mixed", layers, *ALONE, "train.recompute=full 1 + selective 1")
    found = trace(mixed)
    assert {program.name for program in found.programs if "block" in program.name} == {
        f"{kind}, {mode}"
        for kind in ("block", "selective block", "recomputed block")
        for mode in ("training", "evaluation")
    }
    staged = "train.recompute=[full 1 + selective, none]", "parallel.pipeline_cuts=[2]", "parallel.pipeline=2"
    pipelined = profile(tmp_path / "staged", layers, *staged, "parallel.tensor=1")
    assert digests(trace(pipelined)) == digests(found)
    (stage,), (after,) = plan(mixed).stages, apply_trace(mixed, plan(mixed), found.to_json()).stages
    assert after.flops == pytest.approx(stage.flops, rel=0.1)
    assert after.total == pytest.approx(stage.total, rel=0.1)


def test_traced_costs_agree_with_analytic_flops_and_eager_memory(tmp_path):
    one, found = profile(tmp_path, *ALONE), traced(*ALONE)
    # Traced FLOPs include attention's recomputed scores, which are few for 32 tokens.
    tokens = one.train.global_batch_size * one.train.sequence_length
    (rank,) = traced_ranks(one, found.to_json())
    assert rank.flops == pytest.approx(flops_per_token(one) * tokens, rel=0.05)

    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Trainer(one) as trainer:
        initialize(trainer.stages[0].named_parameters(), trainer.mesh.tensor, 0)
        known = {
            x.untyped_storage().data_ptr()
            for x in [*trainer.stages[0].parameters(), *trainer.stages[0].buffers()]
        }
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = trainer.stages[0].loss(trainer.stages[0](tokens, trainer.positions), tokens)
    assert loss.isfinite()
    eager = sum(saved.values())
    assert 0.4 * eager < found.stages[0].saved <= 1.05 * eager  # compiled graphs save less than eager layers


def test_traced_costs_replace_the_plans_estimates(tmp_path):
    spread = profile(tmp_path, *SPREAD)
    planned, found = plan(spread), traced(*SPREAD).to_json()
    after = apply_trace(spread, planned, found)
    first, costs = found["stages"][0], StageCosts(spread)
    working = 2 * first["saved"] + first["peak"]  # two microbatches in flight
    buckets = plan_buckets(spread, [costs.module(partition_layers(spread)[0])])
    with_buffers = activation_bytes(spread, working, 2, costs.hidden_bytes, buckets)
    assert after.stages[0].bytes["activations"] == with_buffers > working
    assert after.stages[0].bytes["parameters"] == planned.stages[0].bytes["parameters"]
    assert after.stages[0].flops == pytest.approx(planned.stages[0].flops, rel=0.1)


def test_traced_flops_include_the_pass_that_counts_choices_of_experts(tmp_path):
    experts = ("model.architecture=mixtral", "model.num_experts=4", "model.num_experts_per_tok=2")
    sparse = profile(tmp_path, *ALONE, *experts, "train.balance=global")
    planned = plan(sparse)
    (after,) = apply_trace(sparse, planned, trace(sparse).to_json()).stages
    assert after.flops == pytest.approx(planned.stages[0].flops, rel=0.05)


def test_flops_of_a_program_of_different_layers_are_those_of_the_plan(tmp_path):
    one, found = profile(tmp_path, *ALONE), traced(*ALONE).to_json()
    planned = plan(one)
    block = next(each for each in found["programs"] if each["name"] == "block, training")
    graphs = [{**graph, "flops": 9 * graph["flops"]} for graph in block["graphs"]]
    for digest in ("0" * 32, "f" * 32):
        other = {**block, "digest": digest, "graphs": graphs}
        programs = sorted([*found["programs"], other], key=lambda each: (each["name"], each["digest"]))
        after = apply_trace(one, planned, {**found, "programs": programs})
        assert after.stages[0].flops == planned.stages[0].flops


def test_communication_volume_follows_from_the_degrees():
    forward, _ = block_graphs()
    # Sequence parallelism over 2: two gathers and two scatters of 2 x 32 tokens x 32 features x 4 bytes, half of each sent.
    assert forward.communication == {"tensor": 4 * 2 * 32 * 32 * 4 // 2}


def test_products_in_chunks_cost_what_they_cost_without():
    """Each is one operator, whose order no compiler changes, as is a collective beside another product."""
    for graph, chunked in zip(block_graphs(), block_graphs("parallel.overlap_chunks=2"), strict=True):
        assert (chunked.flops, chunked.communication) == (graph.flops, graph.communication)
        collectives = [name for name in chunked.operators if "c10d" in name]
        assert not collectives
        assert graph.peak < chunked.peak < 1.5 * graph.peak  # chunks are copied


def block_graphs(*overrides: str) -> tuple[graph_stats.GraphStats, ...]:
    """Forward and backward of a block."""
    return next(p for p in traced(*overrides).programs if p.name == "block, training").graphs


def test_projection_norms_save_no_float32_copy_of_their_heads(tmp_path):
    """Between two ranks, whose sum forward waits for: graphs save what backward needs from after it."""
    with fake_world(profile(tmp_path), 0, 0) as mesh:
        norm = ProjectionNorm(8, 16, mesh, dtype=torch.bfloat16)
        compiled = torch.compile(norm, backend=lambda *region: manifest.capture(*region)[0], fullgraph=True)
        heads = torch.zeros(2, 32, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        saved = graph_stats.saved_bytes(compiled(heads), [heads, norm.weight])
    assert saved == 4 * 2 * 32  # the inverse root of each token


def test_backward_graph_gathers_inputs_again_instead_of_saving_them():
    graphs = block_graphs()
    forward, backward = (graph.operators["_c10d_functional.all_to_all_single"] for graph in graphs)
    assert forward == 4  # of column and row layers, twice each
    assert backward == 6  # theirs, and X twice


def test_compile_error_names_module_and_source_line(tmp_path, monkeypatch):
    with torch.library._scoped_library("trainshed_tests", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", lambda x: x.clone(), "CPU")  # which has no fake implementation
        monkeypatch.setitem(llama.ACTIVATIONS, "silu", torch.ops.trainshed_tests.unknown)
        result = compile.compile_program(profile(tmp_path), 0, "block, training", (), Inductor("cpu"))
    assert result["error"].startswith("MLP.forward (modeling/models/families/llama.py:")
    assert "self.activation(gate) * up" in result["error"]
    assert "trainshed_tests.unknown" in result["error"]


class MockCompiler:
    """Counts the graphs instead of compiling them."""

    compiled, deterministic = 0, None

    def cache_counts(self) -> tuple[int, int]:
        return self.compiled, 0

    def compile(self, graph, inputs) -> None:
        self.compiled += 1
        self.deterministic = torch.are_deterministic_algorithms_enabled()


def test_program_whose_code_names_its_device_is_compiled_for_each_device_of_a_node(tmp_path, monkeypatch):
    """Without a GPU: the CPU stands for two devices."""
    settings = profile(tmp_path, *ALONE, "cluster.devices_per_node=2")
    program = traced(*ALONE).programs[0]
    monkeypatch.setitem(device.KINDS, "cpu", replace(device.CPU, code_names_device=True))
    compiler = MockCompiler()
    result = compile.compile_program(settings, 0, program.name, program.regions, compiler)
    assert (result["error"], compiler.compiled) == (None, 2)


@pytest.mark.parametrize("deterministic", [True, False])
def test_graphs_are_compiled_for_the_kernels_that_training_chooses(tmp_path, monkeypatch, deterministic):
    """The CPU stands in for a device with nondeterministic kernels; Inductor's cache keys have the choice."""
    program = traced(*ALONE).programs[0]
    monkeypatch.setitem(device.KINDS, "cpu", replace(device.CPU, nondeterministic=True))
    settings = profile(tmp_path, *ALONE, f"train.deterministic={deterministic}")
    compiler = MockCompiler()
    result = compile.compile_program(settings, 0, program.name, program.regions, compiler)
    assert (result["error"], compiler.deterministic) == (None, deterministic)
    assert not torch.are_deterministic_algorithms_enabled()


def test_digest_is_the_same_on_every_device():
    found = set()
    for index in range(2):
        graph = torch.fx.Graph()
        zeros = graph.call_function(
            torch.ops.aten.zeros.default, ([2],), {"device": torch.device("cuda", index)}
        )
        graph.output(zeros)
        found.add(manifest.digest(manifest.describe([torch.fx.GraphModule({}, graph)])))
    assert len(found) == 1


def test_user_function_that_reads_a_value_is_rejected_where_everything_is_compiled(tmp_path, monkeypatch):
    (tmp_path / "reads.py").write_text(
        "def loss(logits, targets):\n    return logits.sum() if targets.max().item() else 0\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"reads:loss: .*reads.py:2 cannot be captured"):
        trace(profile(tmp_path, "cluster.device=neuron", "train.loss=reads:loss"))


def test_peak_excludes_views_freed_results_and_sums_that_are_added_to():
    from torch.fx.experimental.proxy_tensor import make_fx

    def chain(x):
        for _ in range(5):
            x = x.view(-1).view(4, 256) + 1
        return x

    def add(total, x):  # as functionalization makes it of `total += x.exp()`
        total.copy_(total + x.exp())

    x = torch.zeros(4, 256)
    graph, sums = make_fx(chain, tracing_mode="fake")(x), make_fx(add, tracing_mode="fake")(x, x)
    assert [graph_stats.measure(each, {}).peak for each in (graph, sums)] == [2 * 4096, 4096]


def test_flops_of_operators_that_change_their_inputs_are_counted():
    graphs = []
    capture = aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or graph)
    add = torch.compile(torch.ops.trainshed.add_product, backend=capture, fullgraph=True)
    add(torch.zeros(3, 5), torch.zeros(3, 4), torch.zeros(4, 5))
    assert graph_stats.measure(graphs[0], {}).flops == 2 * 3 * 4 * 5


def test_flops_of_operators_called_by_others_are_counted():
    """As torch calls its attention in recomputed layers on GPUs, if random numbers may be involved."""
    graph = torch.fx.Graph()
    q, k = graph.placeholder("q"), graph.placeholder("k")
    q.meta["val"], k.meta["val"] = (torch.empty(2, n, 8, 4, device="meta") for n in (4, 2))
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    call = torch.ops.higher_order.graphsafe_run_with_rng_state
    graph.call_function(call, (operator, q, k, k, 0.0, True), {"scale": 0.5})
    graph.output(graph.call_function(torch.ops.higher_order.flex_attention, (q, k, k)))
    stats = graph_stats.measure(torch.fx.GraphModule({}, graph), {})
    assert stats.flops == 2 * (2 * 2 * 2 * 4 * 8 * 4 * 4)  # 4 of 8 keys are seen on average


def test_recomputed_attention_of_torch_has_no_random_state(tmp_path, monkeypatch):
    """On devices whose attention is torch's own operator, which could drop out."""
    monkeypatch.setattr(kernels, "default_kernel", lambda q: "math")  # named so that the operator is used
    found = trace(profile(tmp_path, "train.recompute=full"))
    (block,) = [program for program in found.programs if program.name == "recomputed block, training"]
    assert all(stats.operators["aten._scaled_dot_product_flash_attention_for_cpu"] for stats in block.graphs)


def test_forward_results_held_only_by_autograd_are_freed_in_backward():
    from torch.fx.experimental.proxy_tensor import make_fx

    def forward(x):
        a = x + 1
        b = a + 1
        return b, x, a, b.view(-1)  # the user holds b too, and x is an input

    def backward(x, a, b):
        return a.exp().exp() + x + b.view(4, 256)

    x = torch.zeros(4, 256)
    forward = make_fx(forward, tracing_mode="fake")(x)
    backward = make_fx(backward, tracing_mode="fake")(*forward(x)[1:])
    results = forward.graph.output_node().args[0][1:]
    for node, result in zip(backward.graph.nodes, results, strict=False):
        node.name = result.name
    consumed = graph_stats.consumed_inputs(forward, backward)
    assert consumed == {results[1].name: 4096}
    assert graph_stats.measure(backward, {}).peak == 2 * 4096
    assert graph_stats.measure(backward, {}, consumed).peak == 4096


@pytest.mark.usefixtures("compiles_blocks")
def test_gathered_weights_of_experts_are_not_kept_for_backward(tmp_path):
    """If graphs gather them; they would be most of what a layer saves."""
    experts = ("model.architecture=mixtral", "model.num_experts=8", "model.num_experts_per_tok=2")
    sharded = (
        "train.capacity_factor=1.0",
        "model.intermediate_size=512",
        "parallel.tensor=1",
        "parallel.data_sharding=fsdp",
    )
    compiled = ("compile.enabled=true", "cluster.device=neuron", "model.num_hidden_layers=1")
    padded = ("objective.kind=sft", "objective.packing=false")  # layers and programs have one more input
    sparse = profile(tmp_path, *experts, *sharded, *compiled, *padded)
    (layer,) = StageCosts(sparse).layers(range(1))
    assert trace(sparse).stages[0].saved <= layer.saved
