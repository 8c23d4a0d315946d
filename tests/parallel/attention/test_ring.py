"""Ring attention across processes: dense float64 formula, communication, graphs and rejected inputs."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import Function

from benchmarks.harness.zigzag import zigzag_merge, zigzag_split
from parallel import collectives
from parallel.attention import kernels
from parallel.attention.attention import attention
from parallel.attention.ring import ring_attention
from parallel.attention.tiles import AttentionOptions
from parallel.attention.zigzag import zigzag_positions
from parallel.mesh import Mesh
from tests.parallel.attention.reference import Case, error
from tests.pool import mesh

SIZES = [1, 2, 4, 8]


def by_ring(q, k, v, axis, kernel=None, **options):
    return ring_attention(q, k, v, axis, AttentionOptions(**options), kernel)


def ring(case, axis, attend=by_ring, kernel=None):
    """This rank's shards of out, dq, dk and dv, and its partial sum of dsinks if there are sinks."""
    *inputs, grad = (zigzag_split(x, axis.size, axis.rank, 2) for x in case.tensors())
    inputs, sinks = [x.requires_grad_() for x in inputs], [x.requires_grad_() for x in case.sink_scores()]
    documents = case.document_indices()
    if documents is not None:
        documents = zigzag_split(documents, axis.size, axis.rank, 1)
    options = {
        **case.options(),
        "documents": documents,
        "sinks": sinks[0] if sinks else None,
        "kernel": kernel,
    }
    out = attend(*inputs, axis, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs + sinks, grad)]


def rings(cases, kernel=None, tensor=1):
    """This rank's shards for each case; the tensor axis only puts other ranks between those of the ring."""
    with mesh(context=torch.distributed.get_world_size() // tensor, tensor=tensor) as made:
        return [ring(case, made.context, kernel=kernel) for case in cases]


def merged(parts):
    """Merge each rank's out, dq, dk, dv into those of the full sequence, and sum dsinks."""
    return [
        zigzag_merge(list(shards), 2) if shards[0].dim() == 4 else sum(shards)
        for shards in zip(*parts, strict=True)
    ]


def worst(parts, case):
    """The largest relative error of them."""
    return max(error(*pair) for pair in zip(merged(parts), case.expected(), strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_matches_dense_formula(pool, size):
    s = 16 * size
    documents = (s // 2 - 3, 1, s // 4, s // 4 + 2)
    cases = [
        Case(b=2, n=n, k=k, s=s, causal=causal, documents=lengths, dtype=dtype, scale=0.4)
        for n, k in (((4, 4), (6, 2), (5, 1)) if size <= 2 else ((6, 2),))  # alike on all rings
        for causal in (True, False)
        for lengths in (None, documents)
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    cases += [  # windows within a chunk of the ring and over several
        Case(b=2, n=6, k=2, s=s, documents=lengths, window=window, sinks=sinks, dtype=dtype)
        for window, sinks in ((3, False), (8, True), (21, True), (None, True))
        for lengths in (None, documents)
        for dtype in (torch.float64, torch.bfloat16)
    ]
    for case, parts in zip(cases, zip(*pool.run(rings, size, cases=cases), strict=True), strict=True):
        assert worst(parts, case) < case.tolerance(), case


def test_math_kernel_matches_dense_formula(pool):
    cases = [Case(s=64, documents=lengths, window=w) for lengths in (None, (30, 34)) for w in (None, 20)]
    cases += [Case(s=64, documents=(30, 34), window=w, soft_cap=0.5) for w in (None, 20)]
    for case, *parts in zip(cases, *pool.run(rings, 4, cases=cases, kernel="math"), strict=True):
        assert worst(parts, case) < case.tolerance()


def test_tiled_blocks_match_dense_formula(pool):
    cases = [
        Case(n=4, k=2, s=800, dtype=dtype, documents=lengths)
        for dtype in (torch.float32, torch.bfloat16)
        for lengths in (None, (300, 77, 423))
    ]
    for case, *parts in zip(cases, *pool.run(rings, 2, cases=cases), strict=True):
        assert worst(parts, case) < case.tolerance()


def test_ring_ranks_need_not_be_adjacent(pool):
    case = Case(s=32)
    parts = [part for (part,) in pool.run(rings, 4, cases=[case], tensor=2)]
    assert worst(parts[0::2], case) < case.tolerance()
    assert worst(parts[1::2], case) < case.tolerance()


@st.composite
def shapes(draw, size):
    """Cases for a ring of this size."""
    chunk, k = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    s, cuts = 2 * size * chunk, draw(st.lists(st.floats(0, 1), max_size=5))
    edges = sorted({0, s, *(int(cut * s) for cut in cuts)})
    lengths = tuple(stop - start for start, stop in pairwise(edges)) if cuts else None
    n, b, d = k * draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.sampled_from([3, 8, 16]))
    causal, seed = draw(st.booleans()), draw(st.integers(0, 99))
    window, sinks = draw(st.none() | st.integers(1, 2 * s)) if causal else None, draw(st.booleans())
    return Case(b, n, k, s, d, causal, lengths, torch.float64, window=window, sinks=sinks, seed=seed)


@settings(max_examples=5)
@given(st.data())
def test_any_shape_matches_dense_formula(pool, data):
    size = data.draw(st.sampled_from(SIZES))
    cases = data.draw(st.lists(shapes(size), min_size=5, max_size=5))  # in one run of the processes
    for case, *parts in zip(cases, *pool.run(rings, size, cases=cases), strict=True):
        found, expected = merged(parts), case.expected()
        scale = max(x.norm() for x in expected)  # dq and dk are 0 if all documents have one token
        assert all((a - b).norm() < 1e-12 * scale for a, b in zip(found, expected, strict=True))


def test_ignoring_a_document_boundary_exceeds_tolerance(pool):
    case = Case(s=64, documents=(20, 12, 32))
    ignored = dataclasses.replace(case, documents=(32, 32))
    parts = [part for (part,) in pool.run(rings, 4, cases=[ignored])]
    assert worst(parts, case) > 100 * case.tolerance()


def ring_with_swapped_chunks(case):
    """Ring attention with the second rank's chunks in the wrong order."""
    with mesh(context=2) as made:
        axis = made.context
        q, k, v, _ = (zigzag_split(x, axis.size, axis.rank, 2) for x in case.tensors())
        if axis.rank == 1:
            q, k, v = (torch.cat(x.chunk(2, 2)[::-1], 2) for x in (q, k, v))
        out = ring_attention(q, k, v, axis)
        return torch.cat(out.chunk(2, 2)[::-1], 2) if axis.rank == 1 else out


def test_swapping_chunks_exceeds_tolerance(pool):
    case = Case(s=64)
    out = zigzag_merge(pool.run(ring_with_swapped_chunks, 2, case=case), 2)
    assert error(out, case.expected()[0]) > 100 * case.tolerance()


def gather_zigzag(x, axis):
    """Gather all ranks' zigzag shards and merge them."""
    return zigzag_merge(list(collectives.all_gather(x[None].contiguous(), axis)), 2)


class Shard(Function):
    """The full tensor, equal on all ranks, to this rank's shard."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return zigzag_split(x, axis.size, axis.rank, 2)

    @staticmethod
    def backward(ctx, grad):
        return gather_zigzag(grad, ctx.axis), None


class Gathered(Function):
    """This rank's shard to the full tensor on all ranks."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return gather_zigzag(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return zigzag_split(grad, ctx.axis.size, ctx.axis.rank, 2), None


def gradcheck(case):
    """All ranks perturb the same element in step, so that differences include communication."""
    with mesh(context=torch.distributed.get_world_size()) as made:
        axis, documents = made.context, case.document_indices()
        if documents is not None:
            documents = zigzag_split(documents, axis.size, axis.rank, 1)

        def function(*inputs):
            parts = (Shard.apply(x, axis) for x in inputs)
            return Gathered.apply(ring_attention(*parts, axis, AttentionOptions(documents=documents)), axis)

        inputs = [x.contiguous().requires_grad_() for x in case.tensors()[:3]]
        return torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("documents", [None, (3, 5)])
def test_gradients_match_finite_differences(pool, documents):
    case = Case(1, 2, 1, 8, 2, documents=documents, dtype=torch.float64)
    assert all(pool.run(gradcheck, 4, case=case))


def record_events(case):
    """Events of forward and backward, in order: ("send", bytes) and ("compute",)."""
    events = []
    kernel = kernels.get_kernel(kernels.default_kernel(torch.empty(0)))

    class Recorded(kernels.Kernel):
        def forward(self, block):
            events.append(("compute",))
            return kernel.forward(block)

        def backward(self, block, grad, out, lse):
            events.append(("compute",))
            return kernel.backward(block, grad, out, lse)

    kernels.register_kernel("recorded", Recorded())
    start_ring_send_recv = collectives.start_ring_send_recv

    def recorded_send_recv(x, axis, by=1):
        events.append(("send", x.nbytes))
        return start_ring_send_recv(x, axis, by)

    collectives.start_ring_send_recv = recorded_send_recv
    try:
        with mesh(context=torch.distributed.get_world_size()) as made:
            ring(case, made.context, kernel="recorded")
    finally:
        collectives.start_ring_send_recv = start_ring_send_recv
    return events


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sends_unrepeated_kv_heads_and_overlaps_compute(pool, dtype):
    size, case = 4, Case(b=2, n=8, k=2, s=64, dtype=dtype)
    elements = 2 * case.b * case.k * case.s // size * case.d  # K and V of one rank
    keys, gradients = ("send", elements * dtype.itemsize), ("send", elements * 4)
    for events in pool.run(record_events, size, case=case):
        assert events[:7] == [keys, ("compute",)] * 3 + [("compute",)]
        assert events[7:] == [
            *(keys, ("compute",), gradients) * 2,
            *(("compute",), gradients),
            ("compute",),
        ]


def count_scores(s, window):
    """Number of scores that this rank computes in forward."""
    scores = []

    class Counted(kernels.Math):
        def forward(self, block):
            full = block.q.shape[2] * block.k.shape[2]
            scores.append((full + block.q.shape[2]) // 2 if block.causal else full)
            return super().forward(block)

    kernels.register_kernel("counted", Counted())
    with mesh(context=torch.distributed.get_world_size()) as made:
        ring(Case(s=s, window=window), made.context, kernel="counted")
    return sum(scores)


def test_causal_work_is_balanced_and_skips_masked_blocks(pool):
    s = 64
    done = pool.run(count_scores, 4, s=s, window=None)
    assert len(set(done)) == 1
    assert sum(done) == s * (s + 1) // 2
    chunk = s // 8
    # A query sees itself and the token before: two chunks at most.
    done = pool.run(count_scores, 4, s=s, window=2)
    assert sum(done) <= 8 * chunk**2 + 7 * chunk**2


def compile_graphs(documents, dtype):
    """Code of every graph compiled for a layer with ring attention, and whether results equal eager's."""
    texts = []

    def keep(graph, _):
        texts.append(graph.print_readable(print_output=False))
        return graph

    def layer(q, k, v, axis, **options):
        return by_ring(q * 2, k + 1, v, axis, **options).transpose(1, 2).relu()

    def same_shape(attend):
        return lambda *inputs, **options: attend(*inputs, **options).transpose(1, 2)

    compiled = torch.compile(
        layer, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)
    )
    case = Case(b=2, s=64, documents=documents, dtype=dtype)
    with mesh(context=torch.distributed.get_world_size()) as made:
        eager, traced = (ring(case, made.context, same_shape(attend)) for attend in (layer, compiled))
    return texts, all(torch.equal(*pair) for pair in zip(eager, traced, strict=True))


@pytest.mark.parametrize("documents", [None, (30, 34)])
def test_compiles_to_the_same_graphs_on_all_ranks(pool, documents):
    results = pool.run(compile_graphs, 4, documents=documents, dtype=torch.bfloat16)
    texts = results[0][0]
    assert len(texts) == 2
    assert "trainshed.ring_attention." in texts[0]
    assert "trainshed.ring_attention_backward." in texts[1]
    assert all(other == texts and equal for other, equal in results)


def flex_graphs(case):
    """This rank's shards with FlexAttention in one graph, as on cuda, and the code of its graphs.

    The operator has a backward pass on CPUs too, but torch's check of the device reserves it for tests.
    """
    import torch.nn.attention.flex_attention as flex

    flex._validate_device = lambda *_: None
    texts = []

    def keep(graph, _):
        texts.append(graph.print_readable(print_output=False))
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(
        lambda *x, **options: attention(*x, **options), fullgraph=True, dynamic=False, backend=backend
    )
    with mesh(context=torch.distributed.get_world_size()) as made:
        return ring(case, made.context, compiled, "cuda-flash"), texts


def test_flex_attention_with_masks_matches_dense_formula(pool):
    """Documents and windows cross chunks, blocks of 128 and ranks; unrepeated KV heads, one shared graph."""
    case = Case(b=2, n=4, k=2, s=1200, documents=(70, 1, 430, 99, 600), window=200, sinks=True)
    (part, texts), (other, other_texts) = pool.run(flex_graphs, 2, case=case)
    assert worst([part, other], case) < case.tolerance()
    assert texts == other_texts
    assert "repeat" not in "".join(texts)


def rejections(cases):
    """Error messages on the first rank; the others make no calls, so any communication would hang."""
    with mesh(context=torch.distributed.get_world_size()) as made:
        messages = []
        if made.context.rank == 0:
            for shapes, dtypes in cases:
                q, k, v = (
                    torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
                )
                try:
                    documents = torch.zeros(1, q.shape[2], dtype=torch.int64)
                    ring_attention(q, k, v, made.context, AttentionOptions(documents=documents))
                except ValueError as error:
                    messages.append(str(error))
        return messages


def test_invalid_inputs_are_rejected_before_communication(pool):
    full = [torch.float32] * 3
    q, k = (1, 6, 8, 4), (1, 2, 8, 4)
    odd, odd_k = (1, 6, 7, 4), (1, 2, 7, 4)
    four = (1, 4, 8, 4)
    cases = [
        ((odd, odd_k, odd_k), full),
        ((q, four, four), full),
        ((q, k, k), [torch.float32, torch.bfloat16, torch.float32]),
        ((q, k, (1, 2, 8, 6)), full),
    ]
    odd, heads, dtype, size = pool.run(rejections, 4, cases=cases)[0]
    assert odd == (
        "ring_attention: dim 2 (sequence, over all ranks) is 28, which is not divisible into 8 chunks; nearest valid: 24, 32"
    )
    assert heads == (
        "ring_attention: dim 1 (heads) is 4 in k and v, which does not divide the 6 query heads; valid: 1, 2, 3, 6"
    )
    assert dtype.startswith("ring_attention: k is torch.bfloat16, q is torch.float32")
    assert size.startswith("ring_attention: v has shape (1, 2, 8, 6)")


def test_zigzag_positions_pair_early_and_late_chunks():
    assert zigzag_positions(16, 4, 1).tolist() == [2, 3, 12, 13]
    assert zigzag_positions(5, 1, 0).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"sequence is 20.*8 chunks; nearest valid: 16, 24"):
        zigzag_positions(20, 4, 0)


@pytest.mark.parametrize("size", SIZES)
def test_zigzag_merge_inverts_split(size):
    x = torch.arange(3 * 16 * size).view(3, -1)
    parts = [zigzag_split(x, size, rank, 1) for rank in range(size)]
    assert torch.equal(zigzag_merge(parts, 1), x)


def test_single_rank_needs_no_process_group():
    case = Case(s=33)
    assert worst([ring(case, Mesh().context)], case) < case.tolerance()
