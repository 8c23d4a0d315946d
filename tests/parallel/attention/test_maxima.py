"""Largest scores of query heads: dense formula with masks, context axis, recorded by backward."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.zigzag import zigzag_split
from parallel.attention.attention import attention
from parallel.attention.maxima import TILES, ScoreMaxima, max_scores
from parallel.mesh import Axis
from tests.parallel.attention.reference import Case
from tests.pool import mesh

DOCUMENTS = (70, 1, 130, 99)
CASES = [
    Case(b=2, n=6, k=2, s=300, scale=0.4),
    Case(b=2, n=4, k=4, s=300, documents=DOCUMENTS),
    Case(n=4, k=1, s=300, window=9),
    Case(b=2, n=4, k=2, s=300, documents=DOCUMENTS, window=90),
]


def expected(case):
    """The largest visible score of each query head, (n)."""
    q, k, *_ = (x.double() for x in case.tensors())
    seen = torch.ones(case.s, case.s, dtype=torch.bool).tril()
    if case.window is not None:
        seen = seen.triu(1 - case.window)
    if case.documents is not None:
        numbers = case.document_indices()
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])
    scores = q @ k.repeat_interleave(case.n // case.k, 1).mT * (case.scale or case.d**-0.5)
    return scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3)).float()


def masks(case):
    return {"scale": case.scale, "window": case.window, "documents": case.document_indices()}


def test_maxima_match_dense_formula(monkeypatch):
    monkeypatch.setitem(TILES, "cpu", 1)  # several tiles
    for case in CASES:
        q, k, *_ = case.tensors()
        for graph_kernel in (None, "math"):
            axis = Axis("context", graph_kernel=graph_kernel)
            torch.testing.assert_close(max_scores(q, k, axis, **masks(case)), expected(case))


def of_rank(cases, graph_kernel=None):
    """The largest scores of this rank's queries, for each case; with a kernel compiled, and graph code."""
    found, texts = [], []

    def keep(graph, _):
        texts.append(graph.print_readable(print_output=False))
        return graph

    compiled = torch.compile(max_scores, fullgraph=True, dynamic=False, backend=keep)
    function = max_scores if graph_kernel is None else compiled
    with mesh(context=torch.distributed.get_world_size(), graph_kernel=graph_kernel) as made:
        axis = made.context
        for case in cases:
            q, k, *_ = (zigzag_split(x, axis.size, axis.rank, 2) for x in case.tensors())
            options = masks(case)
            if case.documents is not None:
                options["documents"] = zigzag_split(options["documents"], axis.size, axis.rank, 1)
            found.append(function(q, k, axis, **options))
    return found, texts


@pytest.mark.parametrize("graph_kernel", [None, "math"])
def test_the_largest_of_all_context_ranks_is_that_of_the_sequence(pool, graph_kernel):
    """In an operator, and in graphs, which are the same on all ranks."""
    ranks = pool.run(of_rank, 2, cases=CASES, graph_kernel=graph_kernel)
    for case, *parts in zip(CASES, *(found for found, _ in ranks), strict=True):
        torch.testing.assert_close(torch.stack(parts).amax(0), expected(case))
    texts = ranks[0][1]
    assert texts == ranks[1][1]
    assert len(texts) == (0 if graph_kernel is None else len(CASES))
    assert "ops.trainshed." not in "".join(texts)


def test_scores_are_recorded_once_per_backward_pass_also_if_recomputed():
    case, axis = CASES[0], Axis("context")
    maxima = ScoreMaxima(case.n)
    q, k, v, _ = (x.requires_grad_() for x in case.tensors())

    def attend(q):
        return maxima(attention(q, k, v, axis, scale=case.scale), q, k, axis, scale=case.scale)

    with torch.no_grad():
        attend(q * 9)  # an evaluation
    for factor in (1.0, 2.0, 0.5):
        checkpoint(attend, q * factor, use_reentrant=False).sum().backward()
    torch.testing.assert_close(maxima.take(), 2 * expected(case))
    assert maxima.take() is None
