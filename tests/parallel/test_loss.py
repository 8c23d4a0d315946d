"""Vocabulary-parallel cross-entropy against torch's on full logits."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import ProfilerActivity, profile

from parallel import linear_cross_entropy
from parallel.device import ACCELERATORS, CPU
from parallel.loss import LossPrograms, choose_chunks, chunk_loss, token_cross_entropy
from parallel.mesh import Axis
from tests.parallel.replicated import check, shard
from tests.pool import mesh

ONE = Axis("tensor")
FIRST = torch.tensor(0)
IGNORED = 0.3  # share of targets


def problem(tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(tokens)
    x, weight = (
        torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (tokens, vocabulary)
    )
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    ignored = torch.rand(tokens, generator=generator) < IGNORED
    return x, weight, targets.masked_fill(ignored, -100)


def exact(x: Tensor, weight: Tensor, targets: Tensor, soft_cap: float | None = None) -> tuple[Tensor, ...]:
    """Loss and gradients by torch."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = x @ weight.t()
    if soft_cap is not None:
        logits = soft_cap * (logits / soft_cap).tanh()
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def padded(weight: Tensor, degree: int) -> Tensor:
    """Pad rows to a multiple of the degree with values that would change the loss if read."""
    missing = -len(weight) % degree
    return torch.cat([weight, weight.new_full((missing, weight.shape[1]), 50.0)])


def distances(
    tokens: int,
    width: int,
    vocabulary: int,
    sequence: bool,
    chunk: int | None,
    keep: bool,
    gpu: bool,
    soft_cap: float | None,
) -> list[float]:
    """Differences of loss and gradients from one process.

    Args:
        gpu: whether to compute as compiled for GPUs.
    """
    degree = torch.distributed.get_world_size()
    x, weight, targets = problem(tokens, width, vocabulary)
    expected = exact(x, weight, targets, soft_cap)
    with mesh(tensor=degree) as m, pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallel.loss.becomes_one_kernel", lambda logits: gpu)
        axis = m.tensor
        rows = -(-vocabulary // degree)
        options = {"first": torch.tensor(axis.rank * rows), "vocabulary": vocabulary}
        options |= {"chunk": chunk, "keep": keep, "soft_cap": soft_cap}

        ours = x.clone().requires_grad_()
        every = padded(weight, degree).requires_grad_()
        inputs = shard(ours, axis) if sequence else ours
        loss = linear_cross_entropy(
            inputs, shard(every, axis), targets, axis, sequence_parallel=sequence, **options
        )
        loss.backward()
        assert every.grad[vocabulary:].eq(0).all(), "padding has no gradient"
        found = loss.detach(), ours.grad, every.grad[:vocabulary]
        return [(mine - theirs).abs().max().item() for mine, theirs in zip(found, expected, strict=True)]


@pytest.mark.parametrize("degree", [1, 2, 4])
@settings(max_examples=8)
@given(data=st.data())
def test_matches_torch_cross_entropy(pool, degree, data):
    arguments = {
        "tokens": data.draw(st.integers(1, 5)) * degree,
        "width": data.draw(st.integers(1, 5)),
        "vocabulary": data.draw(st.integers(3 * degree - 2, 17)),
        "sequence": data.draw(st.booleans()) and degree > 1,
        "chunk": data.draw(st.sampled_from([None, 1, 3])),
        "keep": data.draw(st.booleans()),
        "gpu": data.draw(st.booleans()),
        "soft_cap": data.draw(st.sampled_from([None, 1.5])),
    }
    if degree == 1:
        return one_process(**arguments)
    for found in pool.run(distances, degree, **arguments):
        assert max(found) < 1e-10, found
    return None


def one_process(
    tokens: int,
    width: int,
    vocabulary: int,
    sequence: bool,
    chunk: int | None,
    keep: bool,
    gpu: bool,
    soft_cap: float | None,
) -> None:
    x, weight, targets = problem(tokens, width, vocabulary)
    ours, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallel.loss.becomes_one_kernel", lambda logits: gpu)
        options = {"first": FIRST, "vocabulary": vocabulary, "soft_cap": soft_cap}
        options |= {"chunk": chunk, "keep": keep}
        loss = linear_cross_entropy(ours, w, targets, ONE, **options)
    loss.backward()
    expected = exact(x, weight, targets, soft_cap)
    for mine, theirs in zip((loss.detach(), ours.grad, w.grad), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def gradients() -> bool:
    """gradcheck with a vocabulary of 5 tokens over 2 ranks."""
    targets = torch.tensor([0, 4, -100, 3])
    with mesh(tensor=2) as m:
        axis = m.tensor
        options = {"first": torch.tensor(3 * axis.rank), "vocabulary": 5}

        def fused(x: Tensor, weight: Tensor) -> Tensor:
            return linear_cross_entropy(x, shard(weight, axis), targets, axis, chunk=3, **options)

        def sharded(x: Tensor, weight: Tensor) -> Tensor:
            x, weight = shard(x, axis), shard(weight, axis)
            return linear_cross_entropy(x, weight, targets, axis, sequence_parallel=True, **options)

        matrices = (4, 3), (6, 3)
        return check(fused, *matrices) and check(sharded, *matrices)


def test_gradients_match_finite_differences(pool):
    assert all(pool.run(gradients, 2))


def test_large_logits_stay_exact():
    x = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    targets = torch.tensor([0, 0])
    loss = linear_cross_entropy(x, weight, targets, ONE, first=FIRST, vocabulary=2)
    assert loss.item() == 600
    loss.backward()
    assert x.grad.flatten().tolist() == [0, -2]


def test_all_targets_ignored_gives_zero():
    x = torch.randn(4, 3, requires_grad=True)
    targets = torch.full((4,), -100)
    loss = linear_cross_entropy(x, torch.randn(5, 3), targets, ONE, first=FIRST, vocabulary=5)
    loss.backward()
    assert loss.item() == 0
    assert x.grad.eq(0).all()


def test_full_logits_are_never_materialized():
    tokens, vocabulary = 2048, 4096
    x, weight = torch.randn(tokens, 16, requires_grad=True), torch.randn(vocabulary, 16, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        linear_cross_entropy(
            x, weight, targets, ONE, first=FIRST, vocabulary=vocabulary, chunk=256
        ).backward()
    events = record.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    assert largest <= 256 * vocabulary * 4


def test_all_chunks_run_one_graph():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        chunk_loss, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=count)
    )
    x, weight, targets = problem(24, 4, 9)
    ours, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    options = {"first": FIRST, "vocabulary": 9, "chunk": 8, "programs": LossPrograms(compiled)}
    loss = linear_cross_entropy(ours, w, targets, ONE, **options)
    loss.backward()
    for mine, theirs in zip((loss.detach(), ours.grad, w.grad), exact(x, weight, targets), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(graphs) == 1


@dataclass
class Weight:
    """What chunks depend on of a weight; a tensor would need its memory."""

    shape: tuple[int, int]
    requires_grad: bool = True
    bytes: int = 2

    def element_size(self) -> int:
        return self.bytes


@pytest.mark.parametrize(
    ("kind", "shape", "tokens", "chunk", "keep"),
    [
        ("h100", (128256, 4096), 8192, 2048, True),
        ("h100", (128256, 2048), 8192, 2048, True),
        ("h100", (128256, 2048), 16384, 2048, False),  # kept gradients would need more memory
        ("h200", (128256 // 8, 4096), 8192, 2048, True),
        ("h100", (128256, 4096), 6000, 2000, True),
        ("trn2", (128256 // 4, 4096), 8192, 2048, False),
        ("trn2", (128256, 4096), 8192, 512, False),  # 1/64 of the memory
    ],
)
def test_chunks_suit_the_device(kind, shape, tokens, chunk, keep):
    """GPUs keep the gradients of logits, with smaller chunks, of a weight that is trained in 16 bits."""
    device = ACCELERATORS[kind]
    weight = Weight(shape)
    assert choose_chunks(tokens, weight, device) == (chunk // (1 + keep), keep)
    for other in (replace(weight, requires_grad=False), replace(weight, bytes=4)):
        assert choose_chunks(tokens, other, device) == (chunk, False)


def test_chunks_on_a_cpu_fit_its_caches():
    for tokens, rows, chunk in ((4096, 16384, 512), (100, 128256, 50)):  # 32 MiB of logits
        assert choose_chunks(tokens, Weight((rows, 8)), CPU) == (chunk, False)


def test_mismatched_shapes_are_rejected():
    with pytest.raises(ValueError, match=r"targets have shape \(3,\), expected \(4,\)"):
        linear_cross_entropy(
            torch.randn(4, 3), torch.randn(5, 3), torch.zeros(3).long(), ONE, first=FIRST, vocabulary=5
        )
    with pytest.raises(ValueError, match="x has width 2, the weight 3"):
        linear_cross_entropy(
            torch.randn(4, 2), torch.randn(5, 3), torch.zeros(4).long(), ONE, first=FIRST, vocabulary=5
        )


def test_tokens_without_a_target_cost_no_products_on_a_cpu():
    """Eager and compiled (with chunks of a fixed size), loss and gradients are still those of all tokens."""
    x, weight, targets = problem(64, 8, 50)
    targets[10:60] = -100
    expected, seen = exact(x, weight, targets), []

    def chunk(part: Tensor, *rest: object) -> Tensor:
        seen.append(len(part))
        return chunk_loss(part, *rest)

    for programs, sizes in ((LossPrograms(), None), (LossPrograms(chunk=chunk), [8, 8])):
        inputs, head = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(
            inputs, head, targets, ONE, first=FIRST, vocabulary=50, chunk=8, programs=programs
        )
        loss.backward()
        for found, wanted in zip((loss.detach(), inputs.grad, head.grad), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        assert sizes is None or seen == sizes[: len(seen)] != []
    tokens = token_cross_entropy(x, weight, targets, ONE, first=FIRST, vocabulary=50, chunk=8)
    torch.testing.assert_close(
        tokens, F.cross_entropy(x @ weight.t(), targets, ignore_index=-100, reduction="none")
    )
