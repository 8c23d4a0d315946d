"""Zigzag layout of a sequence over the context axis, and one rank's attention to each rank's keys.

Rank r of c holds chunks r and 2c-1-r of the sequence's 2c, which balances causal work without computing masked blocks. For the
keys of rank j:

    j = r    a causal square
    j < r    all queries see the first chunk, none the second
    j > r    the second chunk of queries sees both chunks, the first none

Blocks are merged in float32 by their log-sum-exp:

    lse' = log(exp(lse) + exp(lse_j));   out' = out + sigmoid(lse_j - lse) · (out_j - out)

A sliding window masks parts of these blocks, or entire ones; they are then computed by pairs of chunks, and only pairs that the
window reaches. Start with `RankAttention`; ring.py moves the keys and values between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.attention import tiles
from parallel.attention.kernels import Kernel, Math
from parallel.mesh import Axis


def zigzag_positions(sequence: int, size: int, rank: int) -> Tensor:
    """Positions of the tokens that a rank of the context axis holds, (sequence / size) int64, ascending.

    Raises:
        ValueError: the sequence is not divisible into 2 · size chunks (unless size is 1).
    """
    return positions_by_rank(sequence, size).chunk(size)[rank]


def positions_by_rank(sequence: int, size: int, device: torch.device | None = None) -> Tensor:
    """Positions (s) of the tokens of all ranks, in rank order; raises as `zigzag_positions`."""
    positions = torch.arange(sequence, device=device)
    if size == 1:
        return positions
    _check_divisible("zigzag_positions: sequence", sequence, 2 * size)
    chunks = positions.view(2 * size, -1)
    return torch.stack((chunks[:size], chunks.flip(0)[:size]), 1).flatten()


def check_sequence(function: str, q: Tensor, axis: Axis) -> None:
    """Raise ValueError naming the function unless the sequence of q (b, n, s/c, d) divides into 2c chunks."""
    _check_divisible(f"{function}: dim 2 (sequence, over all ranks)", q.shape[2] * axis.size, 2 * axis.size)


def _check_divisible(name: str, sequence: int, chunks: int) -> None:
    if sequence == 0 or sequence % chunks:
        below = sequence // chunks * chunks
        nearest = ", ".join(str(length) for length in (below, below + chunks) if length)
        raise ValueError(
            f"{name} is {sequence}, which is not divisible into {chunks} chunks; nearest valid: {nearest}"
        )


class Area(NamedTuple):
    """Queries of this rank and the keys of another that they see; `causal`, `distance` as in tiles.py."""

    rows: slice
    keys: slice
    causal: bool
    distance: int = 0


class SourceBlock(NamedTuple):
    """The areas that a rank computes with the keys of one rank, the source."""

    source: int
    areas: list[Area]


class RankAttention(NamedTuple):
    """Attention of one rank's queries to the keys of each rank, block by block, without communication.

    Attributes:
        rank: of the queries, on the context axis.
        size: c, of the axis.
        kernel: computes the tiles.
        scale: of the scores.
        causal: whether tokens attend only to themselves and earlier tokens.
        window: number of keys, up to its own position, that a query of causal attention sees; None: all.
        documents: (c, b, s/c) document indices of each rank's tokens; None: one document.
    """

    rank: int
    size: int
    kernel: Kernel
    scale: float
    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None

    def blocks(self, length: int) -> Iterator[SourceBlock]:
        """Yield the block of each source for s/c = length, the rank's own first and causal squares first."""
        everything, first, second = slice(None), slice(0, length // 2), slice(length // 2, None)
        for step in range(self.size):
            source = (self.rank - step) % self.size
            if self.window is not None and self.size > 1:
                yield SourceBlock(source, [*self._areas_in_window(source, length // 2, self.window)])
            elif step == 0 or not self.causal:
                yield SourceBlock(source, [Area(everything, everything, self.causal)])
            elif source < self.rank:
                yield SourceBlock(source, [Area(everything, first, False)])
            else:
                yield SourceBlock(source, [Area(second, everything, False)])

    def _areas_in_window(self, source: int, chunk: int, window: int) -> Iterator[Area]:
        """Pairs of a chunk of queries and one of the same or earlier keys, some of which are in the window."""
        halves = slice(0, chunk), slice(chunk, None)
        # Numbers of the chunks in the sequence.
        queries, keys = ((rank, 2 * self.size - 1 - rank) for rank in (self.rank, source))
        pairs = [(i, j, (queries[i] - keys[j]) * chunk) for i in (0, 1) for j in (0, 1)]
        for i, j, distance in sorted(pairs, key=lambda pair: pair[2]):
            if 0 <= distance < window + chunk - 1:
                yield Area(halves[i], halves[j], distance == 0, distance)

    def empty_results(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for out (b, n, s/c, d) and lse (b, n, s/c), in float32 or wider.

        `transpose(1, 2)` of out is contiguous.
        """
        b, n, s, d = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty(b, s, n, d, dtype=wide).transpose(1, 2), q.new_empty(b, n, s, dtype=wide)

    def forward(self, block: SourceBlock, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge a block's result into out and lse; the rank's own block, which is the first, sets them."""
        for area in block.areas:
            rows, keys = area.rows, area.keys
            rows_out, rows_lse = out[:, :, rows], lse[:, :, rows]
            visibility = self._visibility(area, block.source)
            for tile, tile_out, tile_lse in tiles.forward(
                self.kernel, q[:, :, rows], k[:, :, keys], v[:, :, keys], self.scale, visibility
            ):
                if block.source == self.rank and rows == keys:  # every query sees at least one of these keys
                    rows_out[:, :, tile], rows_lse[:, :, tile] = tile_out, tile_lse
                else:
                    merge(rows_out[:, :, tile], rows_lse[:, :, tile], tile_out, tile_lse)

    def backward(
        self,
        block: SourceBlock,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dq: Tensor,
    ) -> Tensor:
        """Add a block's share to dq and return its dk and dv (2, b, k, s/c, d), both in float32 or wider."""
        dkv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
        for area in block.areas:
            rows, keys = area.rows, area.keys
            rows_dq, (dk, dv) = dq[:, :, rows], dkv[:, :, :, keys].unbind()
            for tile, columns, (tile_dq, tile_dk, tile_dv) in tiles.backward(
                *(self.kernel, grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys]),
                *(out[:, :, rows], lse[:, :, rows], self.scale, self._visibility(area, block.source)),
            ):
                rows_dq[:, :, tile] += tile_dq
                dk[:, :, columns] += tile_dk
                dv[:, :, columns] += tile_dv
        return dkv

    def max_scores(self, block: SourceBlock, q: Tensor, k: Tensor) -> Iterator[Tensor]:
        """Yield the largest score of each query head, (n), of parts of a block."""
        assert isinstance(self.kernel, Math)
        for area in block.areas:
            visibility = self._visibility(area, block.source)
            yield from tiles.max_scores(
                self.kernel, q[:, :, area.rows], k[:, :, area.keys], self.scale, visibility
            )

    def _visibility(self, area: Area, source: int) -> tiles.Visibility:
        documents = None
        if self.documents is not None:
            documents = self.documents[self.rank][:, area.rows], self.documents[source][:, area.keys]
        return tiles.Visibility(area.causal, documents, self.window, area.distance)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block's result into out and lse in place; lse must be finite."""
    weight = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), weight)
    torch.logaddexp(lse, block_lse, out=lse)
