"""Tracing: the same few graphs for every layer, stage and rank, from the profile alone; figures that agree with real runs."""

import pytest
import torch

from modeling.compilation.compilers import Inductor
from modeling.models.flops import flops_per_token
from modeling.planning.planner import plan
from modeling.tracing import compile, graph_stats
from modeling.tracing import traced_plan as traced
from modeling.tracing.trace import trace
from modeling.training.trainer import Trainer
from profiles.resolve import load
from tests.modeling import micro

# Every axis at work: KV heads shared by two ranks each, two stages, two parts of a sequence, two copies.
SPREAD = (
    "model.num_attention_heads=8",
    "parallel.tensor=4",
    "parallel.pipeline=2",
    "parallel.context=2",
    "cluster.devices_per_node=16",
    "train.micro_batch_size=1",
)
GPT = (
    *("model.architecture=gpt", "model.num_key_value_heads=4", "model.dropout=0.1", "model.hidden_act=gelu"),
    *("model.tie_word_embeddings=true", "model.attention_bias=true", "model.mlp_bias=true"),
)


def profile(tmp_path, *overrides: str):
    folder = micro.run_folder(tmp_path / "run", *overrides)
    return load(str(folder / "profile.yaml"))


def digests(traced) -> dict[str, str]:
    return {program.name: program.digest for program in traced.programs}


def test_a_run_has_a_handful_of_graphs_of_known_names(tmp_path):
    found = trace(profile(tmp_path))
    assert {program.name: len(program.graphs) for program in found.programs} == {
        "block, evaluation": 1,
        "block, training": 2,
        "loss, evaluation": 1,
        "loss, training": 2,
    }


def test_document_masks_are_in_the_graphs(tmp_path):
    masked = digests(trace(profile(tmp_path / "masked", "train.document_masks=true")))
    plain = digests(trace(profile(tmp_path / "plain")))
    assert {name for name in plain if masked[name] != plain[name]} == {"block, evaluation", "block, training"}


def test_a_loss_of_the_users_own_has_no_graph(tmp_path):
    found = trace(profile(tmp_path, "train.loss=mine:loss"))
    assert {program.name for program in found.programs} == {"block, evaluation", "block, training"}


def test_where_torch_has_no_kernel_of_adamw_its_update_is_one_graph(tmp_path):
    elsewhere = trace(profile(tmp_path, "cluster.device=neuron", "parallel.pipeline=2", "parallel.tensor=1"))
    update = next(program for program in elsewhere.programs if program.name == "optimizer")
    assert len(update.graphs) == 1


def test_the_graphs_are_the_same_on_every_rank(tmp_path):
    spread = profile(tmp_path, *SPREAD)
    assert len({tuple(digests(trace(spread, place)).items()) for place in (0, 1, 2, 3, 4, 7)}) == 1


def test_a_rank_in_a_graph_shows_as_another_graph(tmp_path, monkeypatch):
    import modeling.models.llama

    spread = profile(tmp_path, *SPREAD)
    forward = modeling.models.llama.MLP.forward

    def of_the_rank(self, x):
        return forward(self, x) * (1.0 + self.down.axis.rank)

    monkeypatch.setattr(modeling.models.llama.MLP, "forward", of_the_rank)
    assert digests(trace(spread, 0))["block, training"] != digests(trace(spread, 1))["block, training"]


@pytest.mark.parametrize("more", [(), GPT], ids=["llama", "gpt"])
def test_the_number_of_graphs_grows_with_neither_layers_nor_ranks(tmp_path, more):
    small = trace(profile(tmp_path / "small", *more))
    wide = ("cluster.devices_per_node=16", "train.global_batch_size=16", "parallel.pipeline=2")
    large = trace(profile(tmp_path / "large", *more, *wide, "model.num_hidden_layers=12"))
    assert digests(large) == digests(small)
    assert len(large.stages) == 2


def test_layers_of_which_some_are_recomputed_have_two_blocks(tmp_path):
    some = ("model.num_hidden_layers=3", "train.recompute=full", "train.recompute_layers=2")
    found = trace(profile(tmp_path, *some))
    assert {program.name for program in found.programs if "block" in program.name} == {
        f"{kind}, {mode}" for kind in ("block", "recomputed block") for mode in ("training", "evaluation")
    }


def test_traced_figures_agree_with_the_arithmetic_and_with_memory(tmp_path):
    one = profile(tmp_path, "parallel.tensor=1", "cluster.devices_per_node=1", "train.global_batch_size=2")
    found = trace(one)
    # Attention's backward makes its scores again; of a square of 32 tokens that is little.
    tokens = one.train.global_batch_size * one.train.sequence_length
    (rank,) = traced.ranks(one, found.to_json())
    assert rank.flops == pytest.approx(flops_per_token(one) * tokens, rel=0.05)

    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Trainer(one, start=False) as trainer:
        known = {
            x.untyped_storage().data_ptr()
            for x in [*trainer.stages[0].parameters(), *trainer.stages[0].buffers()]
        }
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = trainer.stages[0].loss(trainer.stages[0](tokens, trainer.positions), tokens)
    assert loss.isfinite()
    eager = sum(held.values())
    assert 0.4 * eager < found.stages[0].kept <= 1.05 * eager  # compiled graphs keep less than eager ones


def test_traced_figures_replace_the_plans(tmp_path):
    spread = profile(tmp_path, *SPREAD)
    planned, found = plan(spread), trace(spread).to_json()
    after = traced.replaced(spread, planned, found)
    first = found["stages"][0]
    assert (
        after.stages[0].bytes["activations"] == 2 * first["kept"] + first["peak"]
    )  # two microbatches in flight
    assert after.stages[0].bytes["parameters"] == planned.stages[0].bytes["parameters"]
    assert after.stages[0].flops == pytest.approx(planned.stages[0].flops, rel=0.1)


def test_bytes_sent_follow_from_the_degrees(tmp_path):
    found = trace(profile(tmp_path, "train.micro_batch_size=1"))
    forward = next(p for p in found.programs if p.name == "block, evaluation").graphs[0]
    # Sequence parallelism over 2: two gathers and two scatters of 32 tokens x 32 features x 4 bytes, half of each sent.
    assert forward.sent == {"tensor": 4 * 32 * 32 * 4 // 2}


def test_a_compiled_graph_gathers_again_in_backward_instead_of_keeping_what_it_gathered(tmp_path):
    block = next(p for p in trace(profile(tmp_path)).programs if p.name == "block, training")
    forward, backward = (graph.operators["_c10d_functional.all_to_all_single"] for graph in block.graphs)
    assert forward == 4  # of column and row layers, twice each
    assert backward == 6  # theirs, and X twice


def test_an_error_names_the_module_and_the_line_of_the_model(tmp_path, monkeypatch):
    with torch.library._scoped_library("trainshed_tests", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", lambda x: x.clone(), "CPU")  # which has no fake implementation
        monkeypatch.setattr(torch.nn.functional, "silu", torch.ops.trainshed_tests.unknown)
        result = compile.compile_program(profile(tmp_path), 0, "block, training", "", Inductor("cpu"))
    assert result["error"].startswith("MLP.forward (modeling/models/llama.py:")
    assert "F.silu(gate) * up" in result["error"]
    assert "trainshed_tests.unknown" in result["error"]


def test_views_and_what_is_dead_take_no_memory():
    from torch.fx.experimental.proxy_tensor import make_fx

    def chain(x):
        for _ in range(5):
            x = x.view(-1).view(4, 256) + 1
        return x

    graph = make_fx(chain, tracing_mode="fake")(torch.zeros(4, 256))
    assert graph_stats.of(graph).peak == 2 * 4096
