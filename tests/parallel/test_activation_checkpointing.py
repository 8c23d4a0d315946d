"""Activation checkpointing: identical bits with less memory, eager and compiled."""

from collections import Counter
from functools import cache

import pytest
import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from modeling.models.families import model_class
from parallel import Mesh, RowParallelLinear, initialize
from parallel.activation_checkpointing import MODES, apply_activation_checkpointing
from parallel.attention.zigzag import zigzag_positions
from parallel.experts.layer import ExpertOptions, MixtureOfExperts
from parallel.experts.router import Routing
from parallel.host_products import ONEDNN_PRODUCTS
from parallel.random import sample_keys
from parallel.torch_internals import all_to_all_single
from profiles.sections.model import Model
from tests.pool import mesh

SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
DESCRIPTIONS = {
    "llama": Model(**SIZES, num_key_value_heads=2, vocab_size=64, max_position_embeddings=128),
    "gpt": Model(architecture="gpt", **SIZES, vocab_size=64, max_position_embeddings=128, dropout=0.1),
}
TOKENS = torch.arange(129).expand(2, -1) % 61


def build(architecture: str, modes: str | list[str], backend: str = ""):
    model = model_class(architecture)(DESCRIPTIONS[architecture], Mesh())
    initialize(model.named_parameters(), Mesh().tensor, 1)
    apply_activation_checkpointing(model.layers.values(), modes)
    if backend:
        for layer in model.layers.values():
            layer.compile(backend=backend, fullgraph=True, dynamic=False)
    return model


def forward(model) -> torch.Tensor:
    keys = sample_keys(1, torch.arange(len(TOKENS)))
    return model.loss(model(TOKENS[:, :-1], torch.arange(128), sample_keys=keys), TOKENS[:, 1:])


@cache
def results(architecture: str, mode: str, backend: str) -> tuple[torch.Tensor, ...]:
    """Loss and gradients."""
    model = build(architecture, mode, backend)
    loss = forward(model)
    loss.backward()
    return loss.detach(), *(parameter.grad for parameter in model.parameters())


# aot_eager_decomp_partition splits graphs into forward and backward like a compiler, without code generation.
@pytest.mark.parametrize("backend", ["", "aot_eager_decomp_partition"], ids=["eager", "graphs"])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_results_are_bit_identical(architecture, mode, backend):
    recomputed, saved = results(architecture, mode, backend), results(architecture, "none", backend)
    assert all(torch.equal(x, y) for x, y in zip(recomputed, saved, strict=True))


@pytest.mark.slow
def test_compiled_results_are_bit_identical():
    recomputed, saved = results("llama", "selective", "inductor"), results("llama", "none", "inductor")
    assert all(torch.equal(x, y) for x, y in zip(recomputed, saved, strict=True))


def saved_bytes(model) -> int:
    """Memory allocated by forward and still alive after it, without the loss."""
    outputs = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        outputs.append(model(TOKENS[:, :-1], torch.arange(128), sample_keys=sample_keys(1, torch.arange(2))))
    events = record.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_each_mode_needs_less_memory(architecture):
    none, selective, full = (saved_bytes(build(architecture, mode)) for mode in MODES)
    assert full < selective < none
    hidden = 2 * 128 * 64 * 4
    assert full < (3 + 3) * hidden  # one input per block, and what embedding and head save
    assert selective < 0.6 * none


def test_blocks_may_have_different_modes():
    mixes = (["full"] * 3, ["full", "selective", "full"], ["full", "selective", "none"], ["none"] * 3)
    saved = [saved_bytes(build("llama", modes)) for modes in mixes]
    assert saved == sorted(set(saved))


def test_forward_without_gradients_is_unchanged():
    model = build("llama", "selective")
    with torch.no_grad():
        assert torch.equal(forward(model), forward(build("llama", "none")))


def test_unknown_mode_is_rejected():
    with pytest.raises(ValueError, match="recompute = 'some' is not one of none, selective, full"):
        apply_activation_checkpointing([torch.nn.Identity()], "some")


class CallCount(TorchDispatchMode):
    """Number of calls of each operator."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.calls[product] for product in (torch.ops.aten.mm.default, *ONEDNN_PRODUCTS))


model_class("llama")  # imports the operators
ATTENTION = torch.ops.trainshed.attention.default


def test_only_full_recomputes_products_and_attention():
    calls = {}
    for mode in MODES:
        loss = forward(build("llama", mode))
        with CallCount() as count:
            loss.backward()
        calls[mode] = count.products, count.calls[ATTENTION]
    assert calls["none"] == calls["selective"] == (24, 0)  # two products of four projections in three layers
    # The last projection of a block, whose output only the block's output needs, is not recomputed.
    assert calls["full"] == (24 + 9, 3)


def attention_in_backward(mode: str, context: int, graph_kernel: str | None = None) -> int:
    """Number of ring attentions in backward, or for in-graph attention, of its batched products."""
    torch.compiler.reset()  # earlier graphs are of another mesh
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=keep, partition_fn=partition)
    with mesh(context=context, graph_kernel=graph_kernel) as m:
        model = model_class("llama")(DESCRIPTIONS["llama"], m)
        initialize(model.named_parameters(), m.tensor, 1)
        apply_activation_checkpointing(model.layers.values(), mode)
        if graph_kernel:  # one of the layers, which are alike
            model.layers["0"].compile(backend=backend, fullgraph=True, dynamic=False)
        tokens = TOKENS[:, : 128 // context]
        documents = torch.zeros_like(tokens)
        x = model(tokens, zigzag_positions(128, context, m.context.rank), documents)
        loss = model.loss(x, tokens)
        with CallCount() as count:
            loss.backward()
    if graph_kernel is None:
        return count.calls[torch.ops.trainshed.ring_attention.default]
    products = torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default
    return sum(node.target in products for graph in graphs for node in graph.graph.nodes)


def test_only_full_recomputes_attention_over_a_context_axis(pool):
    found = {mode: pool.run(attention_in_backward, 2, mode=mode, context=2)[0] for mode in MODES}
    assert found["none"] == found["selective"] < found["full"]


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_only_full_recomputes_attention_in_the_graph(context):
    """On one rank of a fake process group: the graphs of all ranks are equal."""
    modes = MODES if context == 1 else MODES[1:]  # 10 s of CPU for each mode
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=context)
    try:
        found = {mode: attention_in_backward(mode, context, "math") for mode in modes}
    finally:
        dist.destroy_process_group()
    assert found["selective"] < found["full"]
    assert found.get("none", found["selective"]) == found["selective"]


def backward_products(native: bool) -> int:
    """Number of matrix products that backward of a checkpointed row layer runs."""
    with mesh(tensor=2, supports_reduction=native) as m:
        layer = RowParallelLinear(8, 4, m.tensor)
        initialize(layer.named_parameters(), m.tensor, 1)
        apply_activation_checkpointing([layer], "selective")
        y = layer(torch.randn(6, 4, requires_grad=True))
        with CallCount() as count:
            y.sum().backward()
        return count.products


def test_selective_saves_reduced_outputs_instead_of_products(pool):
    assert set(pool.run(backward_products, 2, native=True)) == {3}  # dX, dW and the recomputed product
    assert set(pool.run(backward_products, 2, native=False)) == {2}


def experts_in_backward(mode: str, expert: int) -> tuple[int, int]:
    """Numbers of batched products and of exchanges in backward of experts with a capacity."""
    with mesh(data=expert, expert=expert) as m:
        layer = MixtureOfExperts(8, 8, Routing(4, 2), m)
        layer.options = ExpertOptions(capacity_factor=1.0)
        initialize(layer.named_parameters(), m.tensor, 1)
        apply_activation_checkpointing([layer], mode)
        y = layer(torch.randn(12, 8, requires_grad=True), 12)
        with CallCount() as count:
            y.sum().backward()
    return count.calls[torch.ops.aten.bmm.default], count.calls[all_to_all_single.default]


def test_selective_saves_products_and_exchanges_of_experts_with_a_capacity(pool):
    assert [experts_in_backward(mode, 1) for mode in MODES] == [(4, 0), (4, 0), (6, 0)]
    # Of several ranks, the output of the second exchange is saved instead of that of the second product.
    found = [pool.run(experts_in_backward, 2, mode=mode, expert=2)[0] for mode in MODES]
    assert found == [(4, 2), (5, 2), (6, 4)]
