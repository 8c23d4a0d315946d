"""Norms of heads: what they save, and which gradients and sums a backward pass computes."""

import torch
import torch.nn.functional as F

from parallel import Mesh
from parallel.layers import norms
from parallel.layers.norms import GatedHeadNorm, ProjectionNorm
from parallel.mesh import Axis


def test_gated_norm_has_the_gradients_of_its_formula_and_saves_its_inputs_and_one_number_per_head():
    norm = GatedHeadNorm(6, Axis("tensor"), dtype=torch.float64)
    x, gate = (torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, saved = norm.weight, []
    with torch.no_grad():
        weight.add_(torch.randn(6))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out = norm(x, gate)
    assert sum(saved) == x.numel() + gate.numel() + weight.numel() + x.numel() // 6
    expected = F.rms_norm(x, (6,), weight, norm.epsilon) * F.silu(gate)
    torch.testing.assert_close(out, expected)
    grad, inputs = torch.randn_like(out), (x, gate, weight)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    )


def test_a_pass_for_the_weights_gradient_alone_sums_nothing_over_the_ranks(monkeypatch):
    """As zero-bubble schedules have, which compute the gradients of inputs in another pass."""
    calls = []
    sum_of = norms.collectives.all_reduce
    monkeypatch.setattr(norms.collectives, "all_reduce", lambda *args: calls.append(1) or sum_of(*args))
    norm = ProjectionNorm(4, 8, Mesh(), dtype=torch.float64)
    x = torch.randn(2, 5, 4, 8, dtype=torch.float64, requires_grad=True)
    out = norm(x)
    calls.clear()
    (alone,) = torch.autograd.grad(out.sum(), norm.weight, retain_graph=True)
    assert not calls
    out.sum().backward()
    assert len(calls) == 1
    assert torch.equal(norm.weight.grad, alone)
