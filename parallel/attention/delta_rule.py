"""Gated delta rule in chunks (arXiv 2412.06464, 2406.06484), the linear attention of Gated DeltaNet.

With a state S (d, u) per head, a decay exp(g) and a step size β per token:

    S ← exp(g) · S;   S ← S + β k (v - Sᵀ k)ᵀ;   out = Sᵀ q

In a chunk of C tokens, with γ = cumsum(g), D_ij = exp(γ_i - γ_j) for j ≤ i, and S the state before it:

    (I + L) [U, W] = [β v, β e^γ k],   L_ij = β_i D_ij k_i·k_j for j < i;     N = U - W S, what the tokens add to the state
    out = e^γ q S + (D ∘ q kᵀ) N;      S ← e^{γ_C} S + (e^{γ_C - γ} k)ᵀ N

Only N and S run chunk after chunk. Backward recomputes the chunks from the inputs, which are all that is saved, and
continues from the last chunk to the first; its formulas are derived from these.

A document's first token starts with a zero state. `offsets` has the number of tokens of its document that precede each: those
before it in D, and the state before the chunk, are masked by it.

Shapes: b batch, s sequence, k key heads, n value heads (a multiple of k), d and u sizes of a key and of a value, N chunks of C
tokens. In chunks, heads are (k, n/k), and tensors of key heads alone (k, 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from parallel import collectives
from parallel.activation_checkpointing import always_save
from parallel.attention.kernels import installed
from parallel.torch_internals import custom_op

CHUNK = 64  # tokens; a power of 2
GROUP = "trainshed.delta_rule_kernels"  # entry point group


class RuleInput(NamedTuple):
    """Input of a kernel: arguments of `gated_delta_rule`."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    offsets: Tensor | None
    state: Tensor | None
    chunk: int


# `RuleInput` in schemas of operators
INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor? offsets, Tensor? state, SymInt chunk"
)


class DeltaRule(ABC):
    """The rule, forward and backward."""

    @abstractmethod
    def forward(self, inputs: RuleInput) -> tuple[Tensor, Tensor]:
        """Outputs in v's dtype and the last state in that of `decay`, as of `gated_delta_rule`."""

    @abstractmethod
    def backward(self, inputs: RuleInput, grad: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, decay, beta and the state, in their dtypes; without one, as if it were zero."""


_KERNELS: dict[str, DeltaRule] = {}  # by type of device


def kernel_of(device: str) -> DeltaRule:
    """The kernel for a type of device: that of an entry point of GROUP with its name, or the formulas.

    Layers look it up when they are built, because entry points cannot be read while a graph is traced.

    Raises:
        RuntimeError: several packages have one, or it cannot be imported.
        TypeError: the entry point names something else.
    """
    if device not in _KERNELS:
        found: DeltaRule | None = installed(GROUP, device, "kernel of the gated delta rule for", DeltaRule)
        _KERNELS[device] = found or Chunked()
    return _KERNELS[device]


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    offsets: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
    in_graph: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs and the state after the last token.

    Args:
        q, k: (b, s, k, d), normalized and scaled.
        v: (b, s, n, u); each key head serves n/k consecutive value heads.
        decay: (b, s, n), g <= 0, in float32 or wider.
        beta: (b, s, n).
        offsets: (b, s), number of tokens of its document before each token; None: nothing starts anew.
        state: (b, n, d, u) before the first token; None: zero.
        chunk: C, a power of 2; it affects rounding only.
        in_graph: whether to compute in operators of the graph, for compilers that support no opaque ones.

    Returns:
        (b, s, n, u) in v's dtype, and the state (b, n, d, u) in that of `decay`.

    Raises:
        ValueError: mismatched shapes, or a chunk that is not a power of 2.
    """
    b, s, n, _ = v.shape
    if q.shape != k.shape or q.shape[:2] != (b, s) or n % k.shape[2]:
        raise ValueError(
            f"gated_delta_rule: q {tuple(q.shape)} and k {tuple(k.shape)} do not fit v {tuple(v.shape)}"
        )
    if decay.shape != (b, s, n) or beta.shape != (b, s, n):
        raise ValueError(
            f"gated_delta_rule: decay {tuple(decay.shape)} and beta {tuple(beta.shape)} are not {(b, s, n)}"
        )
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"gated_delta_rule: chunk is {chunk}, which is no power of 2")
    if in_graph:
        return _InGraph.apply(q, k, v, decay, beta, offsets, state, chunk)
    return _rule(q, k, v, decay, beta, offsets, state, chunk)


def multiply_adds(d: int, u: int, chunk: int = CHUNK) -> int:
    """Forward multiply-adds of a token in a value head, with half of each causal product."""
    return 3 * d * u + chunk * (3 * d + 2 * u) // 2


def executed_multiply_adds(d: int, u: int, chunk: int, backward: bool) -> int:
    """Those that are executed, in forward or in backward, which computes chunks and states again.

    A key head is counted for each of its value heads.
    """
    inverted = max(0, chunk * chunk - 4) // 3
    prepared = inverted + chunk * (3 * d + u)
    if backward:
        return prepared + 8 * d * u + chunk * (5 * d + 4 * u)
    return prepared + 3 * d * u + chunk * u


def scratch_bytes(k: Tensor, v: Tensor, decay: Tensor, chunk: int, backward: bool) -> int:
    """Temporary memory in bytes of forward or backward, besides inputs and results."""
    (_, s, heads, d), (b, _, n, u) = k.shape, v.shape
    # of a token in a value head and in a key head: what `_Chunks` has, and then the states, what is added to them and outputs
    elements, shared = 3 * chunk + 6 * u + 3 * d + d * u // chunk, 2 * chunk + 2 * d
    if backward:  # no outputs, but the gradients of all these
        elements, shared = 6 * chunk + 6 * u + 9 * d + 2 * d * u // chunk, 4 * chunk + 4 * d
    return b * (s + -s % chunk) * (n * elements + heads * shared) * decay.element_size()


class _Chunks(NamedTuple):
    """What does not depend on the state; (b, k, n/k, N, ...) unless noted."""

    q: Tensor  # (b, k, 1, N, C, d)
    k: Tensor  # (b, k, 1, N, C, d)
    v: Tensor  # (..., C, u)
    beta: Tensor  # (..., C, 1)
    read: Tensor  # (..., C, 1), e^γ, zero for tokens of documents that start in the chunk
    written: Tensor  # (..., C, 1), e^{γ_C - γ}, zero for tokens of documents that end in it
    last: Tensor  # (..., 1, 1), e^{γ_C}, zero if the last token's document starts in it
    between: Tensor  # D (..., C, C)
    kk: Tensor  # k_i·k_j for j < i (b, k, 1, N, C, C)
    qk: Tensor  # q_i·k_j (b, k, 1, N, C, C)
    scores: Tensor  # D ∘ q kᵀ (..., C, C)
    inverse: Tensor  # (I + L)⁻¹ (..., C, C)
    solution: Tensor  # [U, W] (..., C, u + d)
    queries: Tensor  # e^γ q (..., C, d)
    keys: Tensor  # e^{γ_C - γ} k (..., C, d)


def _split(x: Tensor, chunk: int, heads: int) -> Tensor:
    """(b, s, heads·r, ...) -> (b, heads, r, N, C, ...), padded with zeros."""
    length = x.shape[1]
    if padding := -length % chunk:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
    x = x.unflatten(1, (-1, chunk)).unflatten(3, (heads, -1))  # (b, N, C, heads, r, ...)
    return x.permute(0, 3, 4, 1, 2, *range(5, x.dim())).contiguous()


def _join(x: Tensor, length: int) -> Tensor:
    """The inverse of `_split`."""
    return x.permute(0, 3, 4, 1, 2, *range(5, x.dim())).flatten(3, 4).flatten(1, 2)[:, :length]


def _prepare(inputs: RuleInput) -> _Chunks:
    q, k, v, decay, beta, offsets, _, chunk = inputs
    heads, wide = k.shape[2], decay.dtype
    q, k, v = (_split(x.to(wide), chunk, heads) for x in (q, k, v))
    decay = _split(decay, chunk, heads)[..., None]  # (b, k, n/k, N, C, 1)
    gamma = decay.cumsum(-2)
    beta = _split(beta.to(wide), chunk, heads)[..., None]
    rows = torch.arange(chunk, device=q.device)
    distance = rows[:, None] - rows  # (C, C), of a key from a query
    visible = distance >= 0
    read, written, last = gamma.exp(), (gamma[..., -1:, :] - gamma).exp(), gamma[..., -1:, :].exp()
    if offsets is not None:
        offsets = _split_offsets(offsets, chunk)  # (b, 1, 1, N, C, 1)
        visible = visible & (distance <= offsets)
        read = read * (offsets > rows[:, None])
        written = written * visible[..., -1, :, None]
        last = last * (offsets[..., -1:, :] >= chunk)
    # γ_i - γ_j as a sum over the tokens between, since the difference of two long sums is less exact.
    sums = decay.expand(*decay.shape[:-1], chunk).tril(-1).cumsum(-2)
    between = sums.masked_fill(~visible, -torch.inf).exp()
    kk, qk = (k @ k.mT).tril(-1), q @ k.mT
    inverse = _inverse(beta * between * kk)
    right = torch.cat((v * beta, k * (beta * read)), -1)  # (..., C, u + d)
    return _Chunks(
        *(q, k, v, beta, read, written, last, between, kk, qk),
        scores=qk * between,
        inverse=inverse,
        solution=inverse @ right,
        queries=q * read,
        keys=k * written,
    )


def _split_offsets(offsets: Tensor, chunk: int) -> Tensor:
    """(b, s) -> (b, 1, 1, N, C, 1); padding belongs to the last token's document."""
    if padding := -offsets.shape[1] % chunk:
        following = torch.arange(1, padding + 1, device=offsets.device)
        offsets = torch.cat((offsets, offsets[:, -1:] + following), 1)
    return offsets.unflatten(1, (-1, chunk))[:, None, None, :, :, None]


def _inverse(system: Tensor) -> Tensor:
    """(I + L)⁻¹ of a strictly lower triangular L (..., C, C), by doubling the inverted blocks.

    The blocks are those along the diagonal. Products only, as exact as substitution, for which few devices have a fast kernel.
    """
    size = system.shape[-1]
    inverse = system.new_ones(*system.shape[:-1], 1, 1)  # (..., C, 1, 1)
    length = 1
    while length < size:
        blocks = system.unflatten(-1, (-1, 2 * length)).unflatten(-3, (-1, 2 * length))
        below = blocks.diagonal(0, -4, -2).movedim(-1, -3)[..., length:, :length]  # (..., C/2m, m, m)
        first, second = inverse.unflatten(-3, (-1, 2)).unbind(-3)  # (..., C/2m, m, m) each
        below = -below if length == 1 else -second @ (below @ first)
        upper = torch.cat((first, torch.zeros_like(first)), -1)
        inverse = torch.cat((upper, torch.cat((below, second), -1)), -2)
        length *= 2
    return inverse.squeeze(-3)


def _first_state(x: _Chunks, state: Tensor | None) -> Tensor:
    """The state before the first chunk (b, k, n/k, d, u)."""
    if state is None:
        return x.v.new_zeros(*x.v.shape[:3], x.k.shape[-1], x.v.shape[-1])
    return state.unflatten(1, x.v.shape[1:3]).to(x.v.dtype)


def _states(x: _Chunks, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk after chunk: the state before each, what its tokens add to it, and the last state.

    Returns:
        (b, k, n/k, N, d, u), (b, k, n/k, N, C, u) and (b, k, n/k, d, u).
    """
    u, w = x.solution.flatten(0, 2).split((x.v.shape[-1], x.k.shape[-1]), -1)
    keys, last = x.keys.flatten(0, 2), x.last.flatten(0, 2)
    current, states, added = first.flatten(0, 2), [], []
    for number in range(u.shape[1]):
        states.append(current)
        added.append(torch.baddbmm(u[:, number], w[:, number], current, alpha=-1))
        current = torch.baddbmm(current * last[:, number], keys[:, number].mT, added[-1])
    heads = first.shape[:3]
    before, own = (torch.stack(parts, 1).unflatten(0, heads) for parts in (states, added))
    return before, own, current.unflatten(0, heads)


def _state_gradients(x: _Chunks, grad: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the state after each chunk, of what its tokens add, and of the first state.

    Args:
        grad: of the outputs (b, k, n/k, N, C, u).
        after: gradient of the last state (b, k, n/k, d, u).
    """
    of_out, of_read = ((each.mT @ grad).flatten(0, 2) for each in (x.scores, x.queries))
    w = x.solution.flatten(0, 2)[..., x.v.shape[-1] :]
    keys, last = x.keys.flatten(0, 2), x.last.flatten(0, 2)
    following, of_states, of_added = after.flatten(0, 2), [], []
    for number in reversed(range(w.shape[1])):
        of_states.append(following)
        of_added.append(torch.baddbmm(of_out[:, number], keys[:, number], following))
        read = torch.addcmul(of_read[:, number], following, last[:, number])
        following = torch.baddbmm(read, w[:, number].mT, of_added[-1], alpha=-1)
    heads = after.shape[:3]
    stacked = (torch.stack(parts[::-1], 1).unflatten(0, heads) for parts in (of_states, of_added))
    return *stacked, following.unflatten(0, heads)


def _chunk_gradients(
    x: _Chunks,
    grad: Tensor,
    states: Tensor,
    added: Tensor,
    of_states: Tensor,
    of_added: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, decay and beta in chunks.

    Args:
        grad: of the output.
        states: before each chunk (..., N, d, u).
        added: to the state by each token (..., N, C, u).
        of_states: gradients of the states after each chunk.
        of_added: gradients of `added`.
    """
    of_qk = (grad @ added.mT) * x.between  # (..., C, C), for each value head
    of_queries, of_keys = grad @ states.mT, added @ of_states.mT  # (..., C, d) each
    of_right = x.inverse.mT @ torch.cat((of_added, -of_added @ states.mT), -1)
    of_system = (of_right @ x.solution.mT) * x.between  # that of L, times -D
    of_v, of_k = of_right.split((x.v.shape[-1], x.k.shape[-1]), -1)

    # What decays over some tokens adds its product with its gradient to the gradient of each of their g.
    of_kk = of_system * -x.beta
    product = of_system * x.kk
    exponents = (product * -x.beta).addcmul(of_qk, x.qk)
    weighted = (of_k * x.k).sum(-1)
    beta, read = x.beta[..., 0], x.read[..., 0]
    from_start = (of_queries * x.queries).sum(-1) + weighted * beta * read  # over those up to a token
    to_end = (of_keys * x.keys).sum(-1)  # over those after it
    of_decay = _after(exponents, -2).tril(-1).sum(-1) + _after(from_start, -1) + to_end.cumsum(-1) - to_end
    of_decay = of_decay + ((of_states * states).sum((-2, -1)) * x.last[..., 0, 0])[..., None]
    of_beta = weighted * read + (of_v * x.v).sum(-1) - product.sum(-1)

    # Those of key heads are summed over their value heads.
    of_qk, of_kk = of_qk.sum(2, keepdim=True), of_kk.sum(2, keepdim=True).tril(-1)
    dq = of_qk @ x.k + (of_queries * x.read).sum(2, keepdim=True)
    dk = (of_kk + of_kk.mT) @ x.k + of_qk.mT @ x.q
    dk = dk + (of_k * (x.beta * x.read) + of_keys * x.written).sum(2, keepdim=True)
    return dq, dk, of_v * x.beta, of_decay, of_beta


class Chunked(DeltaRule):
    """The formulas in plain operators, on any device and in any dtype."""

    def forward(self, inputs: RuleInput) -> tuple[Tensor, Tensor]:
        x = _prepare(inputs)
        states, added, last = _states(x, _first_state(x, inputs.state))
        out = _join(x.queries @ states + x.scores @ added, inputs.v.shape[1])
        return out.to(inputs.v.dtype), last.flatten(1, 2)

    def backward(self, inputs: RuleInput, grad: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
        x = _prepare(inputs)
        wide = inputs.decay.dtype
        grad = _split(grad.to(wide), inputs.chunk, inputs.k.shape[2])  # (b, k, n/k, N, C, u)
        states, added, _ = _states(x, _first_state(x, inputs.state))
        after = grad_state.unflatten(1, x.v.shape[1:3]).to(wide)
        of_states, of_added, of_first = _state_gradients(x, grad, after)
        gradients = _chunk_gradients(x, grad, states, added, of_states, of_added)
        joined = (_join(each, inputs.v.shape[1]) for each in gradients)
        dtypes = (tensor.dtype for tensor in inputs[:5])
        of_inputs = (each.to(dtype) for each, dtype in zip(joined, dtypes, strict=True))
        return *of_inputs, of_first.flatten(1, 2)


def _after(x: Tensor, dim: int) -> Tensor:
    """Sums over each element and those after it."""
    return x.flip(dim).cumsum(dim).flip(dim)


class _InGraph(Function):
    """The rule in operators of the graph."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs = RuleInput(*arguments)
        _setup_context(ctx, inputs, ())
        return kernel_of(inputs.q.device.type).forward(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        q, k, *others = ctx.saved_tensors
        # Otherwise a compiler would compute the chunks of backward in forward, and save them.
        k = collectives.depend_on_gradient(k.flatten(1), grad.flatten(1)).view(k.shape)
        inputs = RuleInput._make((q, k, *others, ctx.chunk))
        *gradients, of_state = kernel_of(q.device.type).backward(inputs, grad, grad_state)
        return *gradients, None, None if inputs.state is None else of_state, None


@custom_op("trainshed::gated_delta_rule", f"({INPUTS}) -> (Tensor, Tensor)")
def _rule(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = RuleInput(*arguments)
    out, last = kernel_of(inputs.q.device.type).forward(inputs)
    return out.contiguous(), last.contiguous()


@_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), decay.new_empty(len(v), v.shape[2], k.shape[-1], v.shape[-1])


_GRADIENTS = ", ".join(["Tensor"] * 6)


@custom_op(
    "trainshed::gated_delta_rule_backward", f"(Tensor grad, Tensor grad_state, {INPUTS}) -> ({_GRADIENTS})"
)
def _rule_backward(grad: Tensor, grad_state: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    inputs = RuleInput(*arguments)
    found = kernel_of(inputs.q.device.type).backward(inputs, grad, grad_state)
    return tuple(each.contiguous() for each in found)


@_rule_backward.register_fake
def _(grad: Tensor, grad_state: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, decay, beta, *_ = arguments
    gradients = (x.new_empty(x.shape) for x in (q, k, v, decay, beta))
    return *gradients, decay.new_empty(grad_state.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:-1])
    ctx.chunk = inputs[-1]


def _differentiate(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    *gradients, of_state = _rule_backward(grad, grad_state, *saved, ctx.chunk)
    return *gradients, None, None if saved[-1] is None else of_state, None


_rule.register_autograd(_differentiate, setup_context=_setup_context)
always_save(torch.ops.trainshed.gated_delta_rule.default)
