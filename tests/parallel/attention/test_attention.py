"""Attention on one rank: dense float64 formula, masks, sinks, compilation, rejected inputs."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention.flex_attention import BlockMask

from parallel.attention import flex, kernels
from parallel.attention.attention import attention
from parallel.attention.kernels import KernelInput
from tests.parallel.attention.reference import Bounds, Case, error

KERNELS = [None, "math"]  # the device's default, and the one for all devices
HEADS = [(4, 4), (6, 2), (5, 1)]  # multi-head, grouped-query, multi-query


def results(case, kernel=None, attend=attention):
    """out, dq, dk, dv and dsinks, if there are any."""
    *inputs, grad = case.tensors()
    inputs, sinks = [x.requires_grad_() for x in inputs], [x.requires_grad_() for x in case.sink_scores()]
    options = {**case.options(), "documents": case.document_indices(), "sinks": sinks[0] if sinks else None}
    out = attend(*inputs, **options, **({"kernel": kernel} if kernel else {}))
    return [out.detach(), *torch.autograd.grad(out, inputs + sinks, grad)]


def errors(case, **options):
    return [error(*pair) for pair in zip(results(case, **options), case.expected(), strict=True)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("n", "k"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_matches_dense_formula(kernel, n, k, dtype):
    """In tiles of rows, where the kernel has them."""
    for causal, window, soft_cap in (
        (True, None, None),
        (False, None, None),
        (True, 70, None),
        (True, None, 0.8),
        (True, 70, 0.8),
    ):
        for documents in (None, (40, 1, 75, 44)):
            plain = causal and documents is None and window is None and soft_cap is None
            s = 300 if plain else 160  # plain causal attention has tiles only from a length between
            shape = {"b": 2, "n": n, "k": k, "s": s, "dtype": dtype, "scale": 0.4, "soft_cap": soft_cap}
            case = Case(**shape, causal=causal, window=window, sinks=window is not None, documents=documents)
            assert max(errors(case, kernel=kernel)) < case.tolerance(), case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("documents", "window"), [(None, None), ((1500, 61, 487), None), (None, 700)])
def test_long_sequences_without_row_tiles_match_dense_formula(dtype, documents, window):
    case = Case(n=2, k=1, s=2048, d=8, dtype=dtype, documents=documents, window=window)
    assert max(errors(case)) < case.tolerance()


@settings(max_examples=40)
@given(
    st.builds(
        Case,
        b=st.integers(1, 3),
        k=st.integers(1, 3),
        s=st.just(0),
        d=st.sampled_from([4, 8, 24]),
        causal=st.booleans(),
        documents=st.lists(st.integers(1, 90), min_size=1, max_size=6).map(tuple),
        window=st.none() | st.integers(1, 300),
        sinks=st.booleans(),
        seed=st.integers(0, 99),
    ),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(KERNELS),
)
def test_any_shape_matches_dense_formula(case, group, split, kernel):
    case = dataclasses.replace(
        case,
        n=case.k * group,
        s=sum(case.documents),
        documents=case.documents if split else None,
        window=case.window if case.causal else None,
    )
    expected, found = case.expected(), results(case, kernel)
    scale = max(x.norm() for x in expected)  # with documents of one token dq and dk are 0
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 3e-6 * scale


@pytest.mark.parametrize("kernel", [None, "cuda-flash"], ids=["tiles", "flex"])
def test_documents_may_be_unordered_and_noncontiguous(kernel):
    """Document indices need not ascend, and a document may be interleaved with others."""
    case = Case(b=2, s=600, documents=(600,))
    numbers = torch.randint(0, 4, (2, 600), generator=torch.Generator().manual_seed(1)) * 7 - 9
    numbers[:, :256] = 5  # whole blocks of FlexAttention
    q, k, v, _ = (x.double() for x in case.tensors())
    out = attention(q, k, v, documents=numbers, kernel=kernel)
    for row in range(2):
        for number in numbers[row].unique():
            members = (numbers[row] == number).nonzero().squeeze(1)
            alone = attention(*(x[row : row + 1, :, members] for x in (q, k, v)))
            torch.testing.assert_close(out[row : row + 1, :, members], alone)


@pytest.mark.parametrize(
    ("window", "sinks", "soft_cap"), [(None, True, None), (100, True, 0.5), (None, False, 0.5)]
)
def test_flex_attention_without_documents_matches_dense_formula(window, sinks, soft_cap):
    case = Case(b=2, s=300, window=window, sinks=sinks, soft_cap=soft_cap)
    scores = case.sink_scores()[0] if sinks else None
    out = attention(*case.tensors()[:3], **case.options(), sinks=scores, kernel="cuda-flash")
    assert error(out, case.expected()[0].detach()) < case.tolerance()


@pytest.mark.parametrize(("documents", "window"), [(40, None), (None, 16), (None, 150), (1000, None)])
@pytest.mark.parametrize("s", [64, 200, 1000])
def test_block_masks_visit_all_that_is_visible(s, documents, window):
    """On a CPU, FlexAttention ignores these lists, which decide on a GPU what is computed and masked."""
    positions = torch.arange(s)
    numbers = positions.div(documents, rounding_mode="floor")[None] if documents else None
    mask = flex._block_mask(numbers, numbers, positions, positions, True, window)
    query, key = positions[:, None], positions
    size = -(-s // flex.BLOCK) * flex.BLOCK
    seen, inside = torch.zeros(size, size, dtype=torch.bool), torch.zeros(size, size, dtype=torch.bool)
    seen[:s, :s], inside[:s, :s] = mask.mask_mod(torch.tensor(0), torch.tensor(0), query, key), True

    def blocks(dense: torch.Tensor) -> torch.Tensor:
        return dense.view(size // flex.BLOCK, flex.BLOCK, -1, flex.BLOCK)

    def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(indices.shape[-2:], dtype=torch.bool)
        for row, (count, columns) in enumerate(zip(counts[0, 0], indices[0, 0], strict=True)):
            found[row, columns[:count].long()] = True
        return found

    partial, full = (
        listed(mask.kv_num_blocks, mask.kv_indices),
        listed(mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    assert not (blocks(seen).any(1).any(-1) & ~partial & ~full).any()
    assert not (full & ~blocks(seen | ~inside).all(1).all(-1)).any()


def test_block_masks_list_the_query_blocks_of_keys():
    """Backward on GPUs reads them; torch would invert the lists of forward."""
    documents = torch.arange(640).div(400, rounding_mode="floor").expand(2, -1)
    positions = torch.arange(640)
    found = flex._block_mask(documents, documents, positions, positions, True, 500)
    lists = (found.kv_num_blocks, found.kv_indices, found.full_kv_num_blocks, found.full_kv_indices)
    inverted = BlockMask.from_kv_blocks(*lists)
    for kind in ("q", "full_q"):
        (counts, indices), expected = (
            [getattr(mask, f"{kind}_{name}") for name in ("num_blocks", "indices")]
            for mask in (found, inverted)
        )
        assert counts.any()
        assert torch.equal(counts, expected[0])
        listed = torch.arange(5) < counts[..., None]
        assert torch.equal(indices.where(listed, 0), expected[1].where(listed, 0))


def test_ignoring_a_document_boundary_exceeds_tolerance():
    case = Case(s=96, documents=(40, 56))
    ignored = dataclasses.replace(case, documents=(96,))
    found = [error(*pair) for pair in zip(results(ignored), case.expected(), strict=True)]
    assert min(found) > 100 * case.tolerance()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("documents", "window"), [(None, None), ((3, 1, 5), None), (None, 4)])
def test_gradients_match_finite_differences(kernel, documents, window):
    case = Case(n=2, k=1, s=9, d=3, dtype=torch.float64, documents=documents, window=window, sinks=True)
    inputs = [x.requires_grad_() for x in (*case.tensors()[:3], *case.sink_scores())]
    options = {"documents": case.document_indices(), "window": window, "kernel": kernel}
    assert torch.autograd.gradcheck(lambda *x: attention(*x[:3], sinks=x[3], **options), inputs)


def test_causal_attention_ignores_later_tokens():
    q, k, v, _ = Case(s=600).tensors()
    before = attention(q, k, v)
    k[:, :, 400:], v[:, :, 400:] = 1e3, -1e3
    after = attention(q, k, v)
    assert torch.equal(before[:, :, :400], after[:, :, :400])
    assert not torch.equal(before[:, :, 400:], after[:, :, 400:])


@pytest.mark.parametrize("masks", [{}, {"documents": (70, 130), "window": 60, "sinks": True}])
def test_compiles_to_one_graph_with_identical_bits(masks):
    case = Case(b=2, s=200, **masks)

    def layer(*inputs, **options):
        return attention(*(x * 2 for x in inputs), **options) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(results(case, attend=layer), results(case, attend=compiled), strict=True):
        assert torch.equal(eager, traced)


MASKS = {
    "documents": {"documents": (300, 1, 130, 169)},
    "window": {"window": 200, "sinks": True},
    "soft cap": {"soft_cap": 0.5},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("registered", [kernels.MATH, Bounds()], ids=["math", "bounds"])
def test_devices_without_opaque_operators_match_dense_formula(monkeypatch, registered, masks):
    """One graph of plain operators, with masks of single tiles or with bounds; the sequence has two tiles."""
    monkeypatch.setattr(kernels, "default_kernel", lambda _: "nki")
    monkeypatch.setitem(kernels._kernels, "nki", registered)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    case = Case(b=2, s=600, **masks)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(lambda *x, **options: attention(*x, **options), fullgraph=True, backend=backend)
    assert max(errors(case, attend=compiled)) < case.tolerance()
    shapes = [
        node.meta["val"].shape
        for graph in graphs
        for node in graph.graph.nodes
        if node.name.startswith(("eq", "tril", "logical_and"))
    ]
    assert all(shape[-2] <= 512 for shape in shapes)
    assert bool(shapes) != (registered.takes_bounds or "soft_cap" in masks)
    assert not any("repeat" in node.name for graph in graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("operator", ["attention", "attention_backward"])
def test_operators_pass_opcheck(operator):
    q, k, v, grad = Case(b=2, s=64).tensors()
    settings = (True, 0.3, None, "cpu-flash")
    inputs = (q, k, v, None, None, *settings)
    if operator == "attention_backward":
        inputs = (grad, q, k, v, *torch.ops.trainshed.attention(*inputs), None, *settings)
    torch.library.opcheck(
        getattr(torch.ops.trainshed, operator).default, inputs, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("name", ["math", "cpu-flash"])
def test_block_results_can_be_merged(name):
    """A rectangular block returns out, lse, and its share of the gradient given the final lse."""
    torch.manual_seed(0)
    kernel = kernels.get_kernel(name)
    q, k, v = torch.randn(2, 6, 40, 8), torch.randn(2, 2, 23, 8), torch.randn(2, 2, 23, 8)
    mask = torch.rand(2, 1, 40, 23) < 0.3
    mask[:, :, :3] = False  # these queries see no key
    out, lse = kernel.forward(KernelInput(q, k, v, mask, False, 0.5))
    scores = (q.double() @ k.double().repeat_interleave(3, 1).mT * 0.5).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[:, :, :3], torch.zeros_like(out[:, :, :3]))
    grad, final = torch.randn_like(q), lse.clamp_min(0) + 1  # as if merged with other blocks
    full = kernel.backward(KernelInput(q, k, v, mask, False, 0.5), grad, out, final)
    split = [
        kernel.backward(
            KernelInput(q, k[:, :, keys], v[:, :, keys], mask[..., keys], False, 0.5), grad, out, final
        )
        for keys in (slice(0, 10), slice(10, 23))
    ]
    torch.testing.assert_close(full[0], split[0][0] + split[1][0])
    for index in (1, 2):
        torch.testing.assert_close(full[index], torch.cat([part[index] for part in split], 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["square", "rectangle", "mask"])
def test_cuda_kernel_calls_valid_operators(dtype, kind):
    """Runs on the meta device, which checks arguments and shapes without computing."""
    t = {"square": 64}.get(kind, 33)
    q = torch.empty(2, 6, 64, 16, dtype=dtype, device="meta")
    k = torch.empty(2, 2, t, 16, dtype=dtype, device="meta")
    mask = torch.ones(2, 1, 64, t, dtype=torch.bool, device="meta") if kind == "mask" else None
    block = KernelInput(q, k, k, mask, kind == "square", 0.3)
    kernel = kernels.get_kernel("cuda-flash")
    out, lse = kernel.forward(block)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [x.shape for x in kernel.backward(block, out, out, lse)] == [q.shape, k.shape, k.shape]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_kernel_matches_math_kernel(dtype):
    for causal, masked, t in ((True, False, 192), (False, False, 100), (False, True, 100)):
        q, k, v = (
            torch.randn(2, h, s, 64, device="cuda", dtype=dtype) for h, s in ((8, 192), (2, t), (2, t))
        )
        mask = torch.rand(2, 1, 192, t, device="cuda") < 0.3 if masked else None
        block, grad = KernelInput(q, k, v, mask, causal, 0.2), torch.randn_like(q)
        # In float32, because MATH rounds scores to the dtype of q.
        wide = KernelInput(q.float(), k.float(), v.float(), mask, causal, 0.2)
        found, known = kernels.get_kernel("cuda-flash"), kernels.MATH
        out, lse = known.forward(wide)
        pairs = [*zip(found.forward(block), (out, lse), strict=True)]
        backward = found.backward(block, grad, out.to(dtype), lse)
        pairs += zip(backward, known.backward(wide, grad.float(), out, lse), strict=True)
        for a, b in pairs:
            assert (a.float() - b).norm() <= 2e-2 * b.norm()


def test_unregistered_kernel_is_rejected():
    q, k, v, _ = Case().tensors()
    with pytest.raises(ValueError, match=r"'flash3' is not one of math, cpu-flash, cuda-flash"):
        attention(q, k, v, kernel="flash3")


def test_kernel_of_a_package_is_loaded_by_its_entry_point_name(tmp_path, monkeypatch):
    def install(package, kernel):
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{kernels.GROUP}]\nnki = {kernel}\n")
        kernels._entry_points.cache_clear()

    monkeypatch.setattr(kernels, "_kernels", {"math": kernels.MATH})
    monkeypatch.syspath_prepend(tmp_path)
    kernels._entry_points.cache_clear()
    assert kernels.load("nki") == "math"
    install("one", "tests.parallel.attention.reference:missing")
    with pytest.raises(RuntimeError, match=r"reference:missing cannot be imported"):
        kernels.load("nki")
    install("two", "tests.parallel.attention.reference:Bounds")
    with pytest.raises(RuntimeError, match=r"several entry points .*uninstall all but one"):
        kernels.load("nki")
    (tmp_path / "one-1.0.dist-info" / "entry_points.txt").unlink()
    kernels._entry_points.cache_clear()
    assert kernels.load("nki") == "nki"
    assert isinstance(kernels.get_kernel("nki"), Bounds)
    kernels._entry_points.cache_clear()


def test_invalid_inputs_are_rejected_with_valid_values():
    q, k, v, _ = Case(n=6, k=2).tensors()
    four = torch.cat([k, k], 1)
    with pytest.raises(ValueError, match=r"attention: dim 1 \(heads\) is 4 .* 6 query heads.*1, 2, 3, 6"):
        attention(q, four, four)
    with pytest.raises(ValueError, match=r"k is torch.bfloat16, q is torch.float32"):
        attention(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match=r"dim 3 \(head size\) is 4 in k and v, 8 in q"):
        attention(q, k[..., :4], v[..., :4])
    with pytest.raises(ValueError, match=r"window is 8; only causal attention has a window"):
        attention(q, k, v, causal=False, window=8)
    with pytest.raises(ValueError, match=r"sinks have shape \(2,\), expected \(6,\)"):
        attention(q, k, v, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match=r"dim 2 \(sequence\) is 16 in k and v, 32 in q"):
        attention(q, k[:, :, :16], v[:, :, :16])
    with pytest.raises(ValueError, match=r"v has shape"):
        attention(q, k, v[:, :1])
    with pytest.raises(ValueError, match=r"documents are torch.int64 of shape \(1, 31\).*\(1, 32\)"):
        attention(q, k, v, documents=torch.zeros(1, 31, dtype=torch.int64))
