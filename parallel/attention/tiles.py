"""Tiled attention: ranges of query rows, each with only the keys that it can see.

A causal sequence in r tiles computes (r + 1) / 2r of the score matrix. With documents, tiles skip the keys before their first
and after their last document, so packed sequences cost what their documents cost; within a tile the mask is exact, whatever the
order of the documents. `forward` and `backward` yield the results of the tiles: attention.py writes them, ring.py merges and
sums them.

Shapes: q (b, n, s, d), k and v (b, k, t, d), documents (b, s) and (b, t).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel.attention.kernels import Block, Gradients, Kernel

DOCUMENT_ROWS = 512
"""Maximum rows of a tile with a document mask: longer tiles span more documents and so more masked keys."""

Documents = tuple[Tensor, Tensor]


def forward(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    documents: Documents | None = None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield rows, out (b, n, rows, d) and lse (b, n, rows) of each tile; skips rows known to see no key.

    Args:
        causal: q and k belong to the same tokens, s = t, and each sees itself and earlier ones.
        documents: of the queries and of the keys.
    """
    for rows, _, block in _tiles(kernel, q, k, v, causal, scale, documents, backward=False):
        yield rows, *kernel.forward(block)


def backward(
    kernel: Kernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    documents: Documents | None = None,
) -> Iterator[tuple[slice, slice, Gradients]]:
    """Yield rows, keys and (dq of the rows, dk and dv of the keys) of each tile; the caller sums dk and dv over tiles."""
    for rows, keys, block in _tiles(kernel, q, k, v, causal, scale, documents, backward=True):
        yield rows, keys, kernel.backward(block, grad[:, :, rows], out[:, :, rows], lse[:, :, rows])


def _tiles(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    documents: Documents | None,
    backward: bool,
) -> Iterator[tuple[slice, slice, Block]]:
    s, t = q.shape[2], k.shape[2]
    length = kernel.tile_rows(q, causal, backward)
    if documents is not None and not kernel.takes_bounds:
        length = min(length, max(64, s // 8) if kernel.supports_tiling else s, DOCUMENT_ROWS)
    if length < s:
        k, v = k.contiguous(), v.contiguous()  # every tile reads them
    for start in range(0, s, length):
        rows = slice(start, min(start + length, s))
        keys = slice(0, rows.stop if causal else t)
        mask = bounds = None
        if documents is not None and kernel.takes_bounds:
            bounds = document_bounds(documents[0][:, rows], documents[1][:, keys], causal)
        elif documents is not None:
            query_documents, key_documents = documents[0][:, rows], documents[1][:, keys]
            if kernel.supports_tiling:
                visible = _keys_in_range(query_documents, key_documents)
                if len(visible) == 0:
                    continue
                keys = slice(int(visible[0]), rows.stop if causal else int(visible[-1]) + 1)
                key_documents = documents[1][:, keys]
            mask = document_mask(query_documents, key_documents, causal)
        yield (
            rows,
            keys,
            Block(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask, causal and mask is None, scale, bounds),
        )


def _keys_in_range(query_documents: Tensor, key_documents: Tensor) -> Tensor:
    """Indices of keys whose document is between the queries' lowest and highest, in any sequence of the batch."""
    low, high = query_documents.amin(1, keepdim=True), query_documents.amax(1, keepdim=True)
    return ((key_documents >= low) & (key_documents <= high)).any(0).nonzero()


def document_mask(query_documents: Tensor, key_documents: Tensor, causal: bool) -> Tensor:
    """Mask (b, 1, s, t), True where documents (b, s) and (b, t) agree; `causal` aligns the last query with the last key."""
    same = query_documents[:, None, :, None] == key_documents[:, None, None, :]
    return same.tril(key_documents.shape[1] - query_documents.shape[1]) if causal else same


def document_bounds(query_documents: Tensor, key_documents: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """First key that each query sees and one past its last, (b, s) each, where indices ascend; equal if it sees none."""
    s, t = query_documents.shape[1], key_documents.shape[1]
    keys, queries = key_documents.contiguous(), query_documents.contiguous()
    low, high = torch.searchsorted(keys, queries), torch.searchsorted(keys, queries, right=True)
    if causal:
        high = high.minimum(torch.arange(t - s + 1, t + 1, device=high.device))
    return low, high


def check_inputs(function: str, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> None:
    """Check the shapes and dtypes of attention's inputs.

    Raises:
        ValueError: naming the function, the dim, its value and valid ones.
    """
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dim() != 4:
            raise ValueError(f"{function}: {name} has shape {tuple(x.shape)}, expected (b, heads, s, d)")
        if x.dtype != q.dtype:
            raise ValueError(f"{function}: {name} is {x.dtype}, q is {q.dtype}; all must have the same dtype")
    if v.shape != k.shape:
        raise ValueError(f"{function}: v has shape {tuple(v.shape)}, k {tuple(k.shape)}; they must be equal")
    for dim, meaning in {0: "batch", 2: "sequence", 3: "head size"}.items():
        if k.shape[dim] != q.shape[dim]:
            raise ValueError(
                f"{function}: dim {dim} ({meaning}) is {k.shape[dim]} in k and v, {q.shape[dim]} in q; "
                "they must be equal"
            )
    n, kv = q.shape[1], k.shape[1]
    if kv == 0 or n % kv:
        valid = [heads for heads in range(1, n + 1) if n % heads == 0]
        raise ValueError(
            f"{function}: dim 1 (heads) is {kv} in k and v, which does not divide the {n} query heads; "
            f"valid: {', '.join(map(str, valid))}"
        )
    if documents is not None:
        expected = (q.shape[0], q.shape[2])
        if documents.shape != expected or documents.is_floating_point():
            raise ValueError(
                f"{function}: documents are {documents.dtype} of shape {tuple(documents.shape)}; "
                f"expected integers of shape {expected}, one for each token"
            )
