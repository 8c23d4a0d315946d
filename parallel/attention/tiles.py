"""Tiled attention: ranges of query rows, each with only the keys that it can see.

A causal sequence in r tiles computes (r + 1) / 2r of the score matrix. With documents, tiles skip the keys before their first
and after their last document, so packed sequences cost what their documents cost; with a sliding window they skip the keys
before it. Within a tile the mask is exact, whatever the order of the documents. `forward` and `backward` yield the
results of the tiles: attention.py writes them, zigzag.py merges and sums them.

Shapes: q (b, n, s, d), k and v (b, k, t, d), documents (b, s) and (b, t).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.attention.kernels import Gradients, Kernel, KernelInput, Math

MASKED_ROWS = 512
"""Maximum rows of a tile with a mask: longer tiles span more documents and windows, and so more masked keys."""

Documents = tuple[Tensor, Tensor]


class AttentionOptions(NamedTuple):
    """Which keys each query sees, and how scores become weights; as for `attention.attention`."""

    causal: bool = True
    scale: float | None = None
    documents: Tensor | None = None
    window: int | None = None
    sinks: Tensor | None = None
    soft_cap: float | None = None

    def score_scale(self, q: Tensor) -> float:
        """The scale of the scores of these queries."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


CAUSAL = AttentionOptions()


class Visibility(NamedTuple):
    """Which keys each query sees.

    Attributes:
        causal: q and k belong to the same tokens, s = t, and each sees itself and earlier ones.
        documents: of the queries and of the keys.
        window: with a window of w, the query at position i sees keys after i - w; they are earlier ones, or `causal`.
        distance: position of the first query relative to the first key: 0 for the same tokens, more for earlier keys (zigzag.py);
            read with a window only.
    """

    causal: bool
    documents: Documents | None = None
    window: int | None = None
    distance: int = 0


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, visibility: Visibility
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield rows, out (b, n, rows, d) and lse (b, n, rows) of each tile; skips rows known to see no key."""
    for rows, _, inputs in _tiles(kernel, q, k, v, scale, visibility, backward=False):
        yield rows, *kernel.forward(inputs)


def backward(
    kernel: Kernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    visibility: Visibility,
) -> Iterator[tuple[slice, slice, Gradients]]:
    """Yield rows, keys and (dq of rows, dk and dv of keys) of each tile; the caller sums dk and dv."""
    for rows, keys, inputs in _tiles(kernel, q, k, v, scale, visibility, backward=True):
        yield rows, keys, kernel.backward(inputs, grad[:, :, rows], out[:, :, rows], lse[:, :, rows])


def max_scores(kernel: Math, q: Tensor, k: Tensor, scale: float, visibility: Visibility) -> Iterator[Tensor]:
    """Yield the largest score of each query head, (n), of each tile."""
    for _, _, inputs in _tiles(kernel, q, k, k, scale, visibility, backward=False):
        yield kernel.max_scores(inputs)


def _tiles(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, visibility: Visibility, backward: bool
) -> Iterator[tuple[slice, slice, KernelInput]]:
    causal, documents, window, distance = visibility
    s, t = q.shape[2], k.shape[2]
    length = kernel.tile_rows(q, causal, backward)
    if not kernel.takes_bounds and (documents is not None or window is not None):
        length = min(length, max(64, s // 8) if kernel.supports_tiling else s, MASKED_ROWS)
    if length < s:
        k, v = k.contiguous(), v.contiguous()  # every tile reads them
    for start in range(0, s, length):
        rows = slice(start, min(start + length, s))
        keys = slice(
            0 if window is None else max(0, start + distance - window + 1), rows.stop if causal else t
        )
        if keys.start >= t:
            return  # all keys are before the window
        # Whether the last query does not see the first key.
        windowed = window is not None and rows.stop + distance - window > keys.start
        if documents is not None and kernel.supports_tiling:
            keys = _keys_of_documents(documents, rows, keys, causal)
            if keys.start == keys.stop:
                continue
        columns, values = k[:, :, keys], v[:, :, keys]
        mask = bounds = None
        if documents is not None or windowed:
            pair = documents and (documents[0][:, rows], documents[1][:, keys])
            shown = q[:, :, rows], columns, pair, causal, window, rows.start + distance - keys.start
            if kernel.takes_bounds:
                bounds = visible_bounds(*shown)
            else:
                mask = visible_mask(*shown)
        native = causal and mask is None and bounds is None
        yield rows, keys, KernelInput(q[:, :, rows], columns, values, mask, native, scale, bounds)


def _keys_of_documents(documents: Documents, rows: slice, keys: slice, causal: bool) -> slice:
    """From the first to the last of the keys whose document is within the range of the rows' documents.

    That is, in any sequence of the batch. Causal keys always end with the rows.
    """
    queries, columns = documents[0][:, rows], documents[1][:, keys]
    low, high = queries.amin(1, keepdim=True), queries.amax(1, keepdim=True)
    visible = ((columns >= low) & (columns <= high)).any(0).nonzero()
    if len(visible) == 0:
        return slice(keys.start, keys.start)
    first, last = keys.start + int(visible[0]), keys.start + int(visible[-1])
    return slice(first, rows.stop if causal else last + 1)


def visible_mask(
    q: Tensor, k: Tensor, documents: Documents | None, causal: bool, window: int | None, shift: int
) -> Tensor:
    """Mask (b or 1, 1, s, t), True where a query sees a key.

    Args:
        documents: of queries and keys, (b, s) and (b, t), which must agree.
        shift: position of the first query relative to the first key.
    """
    if documents is None:
        mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    else:
        mask = documents[0][:, None, :, None] == documents[1][:, None, None, :]
    if causal:
        mask = mask.tril(shift)
    return mask if window is None else mask.triu(shift - window + 1)


def visible_bounds(
    q: Tensor, k: Tensor, documents: Documents | None, causal: bool, window: int | None, shift: int
) -> tuple[Tensor, Tensor]:
    """First key that each query sees and one past its last, (b, s) each; equal if it sees none.

    Arguments as for `visible_mask`; the documents' indices ascend.
    """
    b, s, t = q.shape[0], q.shape[2], k.shape[2]
    if documents is None:
        low, high = (torch.full((b, s), bound, device=q.device) for bound in (0, t))
    else:
        queries, keys = (x.contiguous() for x in documents)
        low, high = torch.searchsorted(keys, queries), torch.searchsorted(keys, queries, right=True)
    end = torch.arange(shift + 1, shift + s + 1, device=q.device)  # one past each query's own position
    if causal:
        high = high.minimum(end)
    if window is not None:
        low = low.maximum(end - window).minimum(high)
    return low, high


def check_inputs(function: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
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
    causal, _, documents, window, sinks, _ = options
    if documents is not None:
        expected = (q.shape[0], q.shape[2])
        if documents.shape != expected or documents.is_floating_point():
            raise ValueError(
                f"{function}: documents are {documents.dtype} of shape {tuple(documents.shape)}; "
                f"expected integers of shape {expected}, one for each token"
            )
    if window is not None and (window < 1 or not causal):
        reason = "it must be at least 1" if causal else "only causal attention has a window"
        raise ValueError(f"{function}: window is {window}; {reason}")
    if sinks is not None and sinks.shape != (n,):
        raise ValueError(
            f"{function}: sinks have shape {tuple(sinks.shape)}, expected ({n},), one for each query head"
        )
