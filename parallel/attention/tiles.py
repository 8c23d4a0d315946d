"""Attention cut into tiles: runs of queries, each with the keys it can see.

A causal sequence in r runs computes (r + 1) / 2r of its square instead of all of it. With documents, keys before the first
and after the last document of a run are never read, so packed sequences cost what their documents cost; inside a tile the
mask is exact, whatever the order of the documents. `forward` and `backward` yield the tiles' results for the caller to place:
attention.py writes them, ring_attention.py merges and sums them.

Shapes: q (b, n, s, d), k and v (b, k, t, d), documents (b, s) and (b, t).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from parallel.attention.kernels import Block, Gradients, Kernel

DOCUMENT_ROWS = 512
"""The most queries in a tile with documents: longer ones span more documents and so more masked keys."""

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
    """Rows, out (b, n, rows, d) and lse (b, n, rows) of each tile; rows that see no key may be missing.

    Args:
        causal: q and k are of the same tokens, s = t, and each sees itself and those before it.
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
    """Rows, keys and (dq of the rows, dk and dv of the keys) of each tile; gradients of the same keys are to be summed."""
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
    length = kernel.rows(q, causal, backward)
    if documents is not None and kernel.cuts:
        length = min(length, max(64, s // 8), DOCUMENT_ROWS)
    if length < s:
        k, v = k.contiguous(), v.contiguous()  # every tile reads them
    for start in range(0, s, length):
        rows = slice(start, min(start + length, s))
        keys = slice(0, rows.stop if causal else t)
        mask = None
        if documents is not None:
            own, theirs = documents[0][:, rows], documents[1][:, keys]
            if kernel.cuts:
                near = _near(own, theirs)
                if len(near) == 0:
                    continue
                keys = slice(int(near[0]), rows.stop if causal else int(near[-1]) + 1)
                theirs = documents[1][:, keys]
            mask = document_mask(own, theirs, causal)
        yield (
            rows,
            keys,
            Block(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask, causal and mask is None, scale),
        )


def _near(own: Tensor, theirs: Tensor) -> Tensor:
    """Which keys' document is between the least and the greatest of the queries', in some row of the batch."""
    least, greatest = own.amin(1, keepdim=True), own.amax(1, keepdim=True)
    return ((theirs >= least) & (theirs <= greatest)).any(0).nonzero()


def document_mask(own: Tensor, theirs: Tensor, causal: bool) -> Tensor:
    """(b, s) and (b, t) documents -> (b, 1, s, t), True where they agree; with `causal`, the last query is level with the last
    key and none sees later ones.
    """
    same = own[:, None, :, None] == theirs[:, None, None, :]
    return same.tril(theirs.shape[1] - own.shape[1]) if causal else same


def check(layer: str, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> None:
    """Refuse shapes and types that attention cannot work on.

    Raises:
        ValueError: naming the layer, the dim, its value and what would work.
    """
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dim() != 4:
            raise ValueError(f"{layer}: {name} has shape {tuple(x.shape)}, it takes (b, heads, s, d)")
        if x.dtype != q.dtype:
            raise ValueError(f"{layer}: {name} is {x.dtype}, q is {q.dtype}; all must be of one type")
    if v.shape != k.shape:
        raise ValueError(f"{layer}: v has shape {tuple(v.shape)}, k {tuple(k.shape)}; they must be equal")
    for dim, what in {0: "batch", 2: "sequence", 3: "head size"}.items():
        if k.shape[dim] != q.shape[dim]:
            raise ValueError(
                f"{layer}: dim {dim} ({what}) is {k.shape[dim]} in k and v, {q.shape[dim]} in q; "
                "they must be equal"
            )
    n, kv = q.shape[1], k.shape[1]
    if kv == 0 or n % kv:
        fitting = [heads for heads in range(1, n + 1) if n % heads == 0]
        raise ValueError(
            f"{layer}: dim 1 (heads) is {kv} in k and v, which does not divide the {n} query heads; "
            f"what would work: {', '.join(map(str, fitting))}"
        )
    if documents is not None:
        expected = (q.shape[0], q.shape[2])
        if documents.shape != expected or documents.is_floating_point():
            raise ValueError(
                f"{layer}: documents are {documents.dtype} of shape {tuple(documents.shape)}; "
                f"they must be integers of shape {expected}, one a token"
            )
