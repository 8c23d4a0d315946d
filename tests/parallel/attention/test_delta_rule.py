"""Gated delta rule and short convolution: recurrence, documents, chunk sizes, context ranks."""

from importlib import metadata
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.zigzag import zigzag_merge, zigzag_split
from parallel.attention import delta_rule, kernels
from parallel.attention.delta_context import context_delta_rule, halves, tokens_before
from parallel.attention.delta_rule import Chunked, executed_multiply_adds, gated_delta_rule
from parallel.attention.short_convolution import short_convolution
from tests.pool import mesh


def inputs(s, dtype=torch.float64, b=2, k=2, n=4, d=8, u=12, seed=0):
    """q, k, v, decay, beta and the weights of the outputs in a loss."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, function=torch.randn):
        return function(*shape, dtype=torch.float64, generator=generator).to(dtype)

    heads = [F.normalize(draw(b, s, k, d), dim=-1) for _ in range(2)]
    rates = -draw(b, s, n, function=torch.rand), 2 * draw(b, s, n, function=torch.rand)
    return [x.requires_grad_() for x in (*heads, draw(b, s, n, u), *rates)], draw(b, s, n, u)


def document_offsets(s):
    """Offsets (2, s) of tokens in documents that begin within chunks and at their ends."""
    cuts = [[cut for cut in row if cut < s] for row in ((0, 5, 6, 64, 70, 100), (0, 3, 90))]
    return torch.stack([torch.tensor([i - max(c for c in row if c <= i) for i in range(s)]) for row in cuts])


def recurrence(q, k, v, decay, beta, offsets=None):
    """The rule token by token: outputs and last state."""
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    state, outs = v.new_zeros(*v.shape[::2][:2], k.shape[-1], v.shape[-1]), []
    for i in range(v.shape[1]):
        if offsets is not None:
            state = state * (offsets[:, i] > 0)[:, None, None, None]
        state = state * decay[:, i, :, None, None].exp()
        missing = v[:, i] - (state * k[:, i, :, :, None]).sum(-2)
        state = state + k[:, i, :, :, None] * (beta[:, i, :, None] * missing)[:, :, None]
        outs.append((state * q[:, i, :, :, None]).sum(-2))
    return torch.stack(outs, 1), state


def results(rule, tensors, weight, **options):
    """Outputs, last state and the gradients of a loss of both."""
    out, state = rule(*tensors, **options)
    loss = (out * weight).sum() + (state.sin()).sum()
    return out.detach(), state.detach(), *torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("s", [1, 7, 130])
def test_chunks_equal_the_recurrence(s):
    tensors, weight = inputs(s)
    for offsets in (None, document_offsets(s)):
        expected = results(recurrence, tensors, weight, offsets=offsets)
        for chunk, in_graph in product((1, 4, 64), (False, True)):
            found = results(
                gated_delta_rule, tensors, weight, offsets=offsets, chunk=chunk, in_graph=in_graph
            )
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_rule_in_the_graph_is_one_graph_without_breaks():
    tensors, weight = inputs(7)
    expected = results(gated_delta_rule, tensors, weight, chunk=4, in_graph=True)
    compiled = torch.compile(gated_delta_rule, fullgraph=True, dynamic=False, backend="aot_eager")
    for one, other in zip(results(compiled, tensors, weight, chunk=4, in_graph=True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_chunk_sizes_are_equal_in_float32():
    tensors, weight = inputs(4097, torch.float32, b=1, k=1, n=2)
    exact, *others = (results(gated_delta_rule, tensors, weight, chunk=chunk) for chunk in (64, 16, 128))
    for found in others:
        for one, other in zip(found, exact, strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("chunk", [1, 2, 16])
def test_executed_multiply_adds_are_those_of_the_products(chunk):
    s, n, d, u = 3 * chunk, 2, 8, 12
    tensors, weight = inputs(s, b=1, k=n, n=n, d=d, u=u)
    with FlopCounterMode(display=False) as forward:
        out, _ = gated_delta_rule(*tensors, chunk=chunk, in_graph=True)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad((out * weight).sum(), tensors)
    for counter, is_backward in ((forward, False), (backward, True)):
        assert counter.get_total_flops() == 2 * s * n * executed_multiply_adds(d, u, chunk, is_backward)


def test_a_state_continues_a_sequence():
    tensors, weight = inputs(70)
    out, last = gated_delta_rule(*tensors)
    first, state = gated_delta_rule(*(x[:, :30] for x in tensors))
    second, end = gated_delta_rule(*(x[:, 30:] for x in tensors), state=state)
    joined = torch.cat((first, second), 1)
    for one, other in zip(
        torch.autograd.grad((joined * weight).sum() + end.sum(), tensors),
        torch.autograd.grad((out * weight).sum() + last.sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_short_convolution_rounds_once():
    """Sums and their gradients are in float32, as in torch's convolution, in any precision."""
    generator = torch.Generator().manual_seed(0)
    x, kernel, grad = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((2, 50, 8), (8, 4), (2, 50, 8))
    )
    inputs = [each.requires_grad_() for each in (x, kernel)]
    wide = [each.detach().double().requires_grad_() for each in inputs]
    out = short_convolution(*inputs)
    taps = wide[1][:, None]
    expected = F.silu(F.conv1d(F.pad(wide[0].mT, (3, 0)), taps, groups=8)).mT
    found = out, *torch.autograd.grad(out, inputs, grad)
    exact = expected, *torch.autograd.grad(expected, wide, grad.double())
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.bfloat16(), rtol=2**-7, atol=1e-6)


def mixed(tensors, kernel, offsets, axis):
    """The rule on convolved values."""
    q, k, v, decay, beta = tensors
    x = v.flatten(2)
    if axis.size == 1:
        x = short_convolution(x, kernel, offsets)
    else:
        x = halves(x)
        before = tokens_before(x, kernel.shape[1] - 1, axis)
        x = short_convolution(x, kernel, None if offsets is None else halves(offsets), before)
        x = x.unflatten(0, (-1, 2)).flatten(1, 2)
    return context_delta_rule(q, k, x.view(v.shape), decay, beta, axis, offsets=offsets, chunk=4)


def on_a_rank(s, documents):
    """This rank's outputs and gradients of its tokens, and its share of the kernel's gradient."""
    with mesh(context=torch.distributed.get_world_size()) as made:
        axis = made.context
        tensors, weight = inputs(s)
        *tensors, weight = (zigzag_split(x.detach(), axis.size, axis.rank, 1) for x in (*tensors, weight))
        tensors = [x.requires_grad_() for x in tensors]
        offsets = zigzag_split(document_offsets(s), axis.size, axis.rank, 1) if documents else None
        kernel = torch.linspace(-1, 1, 48 * 4, dtype=torch.float64).view(48, 4).requires_grad_()
        out = mixed(tensors, kernel, offsets, axis)
        return out.detach(), *torch.autograd.grad((out * weight).sum(), [*tensors, kernel])


@pytest.mark.parametrize("size", [2, 4])
def test_context_ranks_equal_one_process(pool, size):
    for documents in (False, True):
        (expected,) = pool.run(on_a_rank, 1, s=112, documents=documents)
        *parts, kernels = zip(*pool.run(on_a_rank, size, s=112, documents=documents), strict=True)
        found = [zigzag_merge(list(shards), 1) for shards in parts] + [sum(kernels)]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_mismatched_shapes_are_rejected():
    (q, k, v, decay, beta), _ = inputs(4)
    for wrong in (
        (q, k[:, :2], v, decay, beta),
        (q, k, v[:, :, :3], decay, beta),
        (q, k, v, decay[:, :2], beta),
    ):
        with pytest.raises(ValueError, match="gated_delta_rule: "):
            gated_delta_rule(*wrong)
    with pytest.raises(ValueError, match="chunk is 12, which is no power of 2"):
        gated_delta_rule(q, k, v, decay, beta, chunk=12)


class Counted(Chunked):
    """Stand-in for an installed kernel."""

    calls = 0

    def forward(self, inputs):
        Counted.calls += 1
        return super().forward(inputs)

    def backward(self, inputs, grad, grad_state):
        Counted.calls += 1
        return super().backward(inputs, grad, grad_state)


def test_an_installed_kernel_is_used(monkeypatch):
    point = metadata.EntryPoint("cpu", f"{__name__}:Counted", delta_rule.GROUP)
    tensors, weight = inputs(9)
    expected = results(gated_delta_rule, tensors, weight)
    monkeypatch.setattr(kernels, "_entry_points", lambda group, name: {point.value: point})
    monkeypatch.setattr(delta_rule, "_KERNELS", {})
    for in_graph in (False, True):
        found = results(gated_delta_rule, tensors, weight, in_graph=in_graph)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    assert Counted.calls == 4
