"""The gated delta rule over a context axis: a scan of states over the ranks.

A rank has chunks r and 2c-1-r of the sequence (zigzag.py). The state after a chunk is linear in the state before it:

    S_after = A S_before + B;      out = out_0 + R S_before

So each rank runs the rule once on both chunks, with the columns of its values followed by d columns of zeros, and the initial
state [0, I]: the outputs are [out_0, R], the last states [B, A]. All ranks gather A and B, and compute the states before their
own chunks in the order of the sequence. A token whose document starts in its chunk has a zero row in R, and A is zero after it.

Bytes that a rank sends: 4 · b · n/t · d · (d + u) · 2(c-1) in forward and as many in backward, however long the sequence is; and
those of the width - 1 tokens before each chunk that the short convolution reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel import collectives
from parallel.attention.delta_rule import CHUNK, gated_delta_rule
from parallel.mesh import Axis


def context_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    axis: Axis,
    *,
    offsets: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Outputs (b, s/c, n, u) of a sequence in zigzag order over the axis.

    Args:
        axis: context axis, of any size; the others as for `gated_delta_rule`.

    Raises:
        ValueError: mismatched shapes, or an odd number of tokens on several ranks.
    """
    in_graph = axis.graph_kernel is not None
    if axis.size == 1:
        return gated_delta_rule(q, k, v, decay, beta, offsets=offsets, chunk=chunk, in_graph=in_graph)[0]
    if q.shape[1] % 2:
        raise ValueError(
            f"context_delta_rule: {q.shape[1]} tokens on a rank of {axis.size} are not two equal chunks"
        )
    offsets = None if offsets is None else halves(offsets.expand(len(q), -1))
    q, k, v, decay, beta = map(halves, (q, k, v, decay, beta))  # (2b, s/2c, ...)
    (b, s, n, u), d = v.shape, k.shape[-1]
    columns = torch.cat((v.to(decay.dtype), decay.new_zeros(b, s, n, d)), -1)
    first = torch.eye(d, u + d, dtype=decay.dtype, device=v.device).roll(u, 1)  # [0, I]
    out, last = gated_delta_rule(
        *(q, k, columns, decay, beta),
        offsets=offsets,
        state=first.expand(b, n, d, u + d),
        chunk=chunk,
        in_graph=in_graph,
    )
    out, read = out.split((u, d), -1)  # (2b, s/2c, n, u), (2b, s/2c, n, d)
    state = _states_before(last, u, axis)  # (2b, n, d, u)
    out = out + (read.transpose(1, 2) @ state).transpose(1, 2)
    return out.unflatten(0, (-1, 2)).flatten(1, 2).to(v.dtype)


def tokens_before(x: Tensor, count: int, axis: Axis) -> Tensor | None:
    """The last `count` tokens before each of this rank's chunks, zeros before the sequence.

    None on an axis of one rank, whose x (b, s, ...) begins with the sequence.

    Raises:
        ValueError: a chunk has fewer tokens.

    Shapes:
        x (2b, s/2c, ...) -> (2b, count, ...)
    """
    if axis.size == 1:
        return None
    if x.shape[1] < count:
        raise ValueError(f"tokens_before: chunks of {x.shape[1]} tokens are shorter than {count}")
    gathered = _gather(x[:, -count:], axis)  # (2c, b, count, ...)
    earlier = torch.cat((torch.zeros_like(gathered[:1]), gathered[:-1]))
    return _own(earlier, axis)


def halves(x: Tensor) -> Tensor:
    """(b, s/c, ...) -> (2b, s/2c, ...): a rank's two chunks, one after the other, for each sample."""
    return x.unflatten(1, (2, -1)).flatten(0, 1)


def _states_before(last: Tensor, u: int, axis: Axis) -> Tensor:
    """The states before this rank's chunks, from [B, A] (2b, n, d, u + d) after each."""
    gathered = _gather(last, axis)  # (2c, b, n, d, u + d)
    added, kept = gathered.split((u, last.shape[-2]), -1)
    states = [torch.zeros_like(added[0])]
    for number in range(len(gathered) - 1):
        states.append(kept[number] @ states[-1] + added[number])
    return _own(torch.stack(states), axis)


def _gather(x: Tensor, axis: Axis) -> Tensor:
    """(2b, ...) of this rank's chunks -> (2c, b, ...) of all chunks in the order of the sequence."""
    own = x.unflatten(0, (-1, 2)).transpose(0, 1).contiguous()  # (2, b, ...)
    by_rank = collectives.gather(own, axis).unflatten(0, (axis.size, 2))
    return torch.cat((by_rank[:, 0], by_rank[:, 1].flip(0)))


def _own(x: Tensor, axis: Axis) -> Tensor:
    """(2c, b, ...) of all chunks -> (2b, ...) of this rank's, selected by a tensor, not by its number."""
    rank = collectives.local_shard(torch.arange(axis.size, dtype=torch.int32, device=x.device), axis)
    own = x.index_select(0, torch.cat((rank, 2 * axis.size - 1 - rank)))  # (2, b, ...)
    return own.transpose(0, 1).flatten(0, 1)
