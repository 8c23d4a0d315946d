"""Schedules match one process's loss and gradients; hooks run once per microbatch; bounded memory."""

import gc
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from parallel import (
    ColumnParallelLinear,
    Mesh,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    collectives,
    initialize,
    linear_cross_entropy,
)
from parallel.layout import layout_of
from parallel.pipeline.pipeline import Pipeline
from parallel.pipeline.schedules import count_lanes, cut_layers
from tests.pool import mesh

HIDDEN, VOCABULARY, SEQUENCE, SAMPLES = 8, 11, 6, 2
SCALE = torch.tensor(0.25)


class Block(nn.Module):
    def __init__(self, on: Mesh, **options) -> None:
        super().__init__()
        self.norm = RMSNorm(HIDDEN, on.tensor, **options)
        self.up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, on.tensor, bias=True, **options)
        self.down = RowParallelLinear(4 * HIDDEN, HIDDEN, on.tensor, bias=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """Stage of a small tied-embedding network that scales tokens by factors of position and sample."""

    def __init__(self, on: Mesh, layers: range, count: int) -> None:
        super().__init__()
        self.axis = on.tensor
        self.options = {"sequence_parallel": on.tensor.size > 1, "dtype": torch.float64}
        self.first, self.last = 0 in layers, count - 1 in layers
        if self.first or self.last:
            shared = ("embedding",) if on.pipeline.size > 1 else ()
            self.embedding = VocabParallelEmbedding(
                VOCABULARY, HIDDEN, on.tensor, partial_axes=shared, **self.options
            )
        self.layers = nn.ModuleDict({str(i): Block(on, **self.options) for i in layers})
        initialize(self.named_parameters(), on.tensor, seed=1)

    def forward(self, x: Tensor, positions: Tensor, samples: Tensor) -> Tensor:
        if self.first:
            x = self.embedding(x)
        factors = (positions * samples[:, None]).flatten()  # (b·s)
        if self.axis.size > 1:
            factors = factors.chunk(self.axis.size)[self.axis.rank]  # (b·s/t)
        for layer in self.layers.values():
            x = layer(x * factors[:, None])
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(
            x,
            self.embedding.weight,
            targets.flatten(),
            self.axis,
            first=self.embedding.first,
            vocabulary=VOCABULARY,
            sequence_parallel=self.axis.size > 1,
        )


def data(microbatches: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and targets (m·b, s), factors by position (s) and by sample (m·b)."""
    tokens = torch.randint(0, VOCABULARY, (microbatches * SAMPLES, SEQUENCE + 1))
    positions = torch.linspace(0.5, 1.5, SEQUENCE, dtype=torch.float64)
    samples = torch.linspace(1, 2, len(tokens), dtype=torch.float64)
    return tokens[:, :-1], tokens[:, 1:], positions, samples


def distances(
    schedule: str,
    pipeline: int,
    tensor: int,
    layers: int,
    microbatches: int,
    cuts: list[int] | None,
    extra_forwards: int,
    compiled: bool = False,
) -> tuple[dict[str, float], set[int]]:
    """Compare a pipeline with one process over training, evaluation and training again on the same data.

    Returns:
        Largest difference of each loss and gradient; the numbers of hook calls on this rank's parameters.
    """
    tokens, targets, positions, samples = data(microbatches)
    dense = Net(Mesh(rank=0), range(layers), layers)
    exact = dense.loss(dense(tokens, positions, samples), targets)
    exact.backward(SCALE.double())
    gradients = {name: parameter.grad for name, parameter in dense.named_parameters()}
    found, calls = {}, Counter()
    lanes = count_lanes(pipeline) if schedule == "interleaved" else 1
    with mesh(pipeline=pipeline, tensor=tensor, pipeline_lanes=lanes) as m:
        cut = cut_layers([1] * layers, pipeline, schedule, cuts)
        stages = {i: Net(m, cut[i], layers) for i in range(m.pipeline.rank, len(cut), pipeline)}
        for layer in (layer for stage in stages.values() for layer in stage.layers.values() if compiled):
            for linear in (layer.up, layer.down):
                linear.defer(SAMPLES * SEQUENCE)
            layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
        built = Pipeline(
            stages,
            len(cut),
            m,
            schedule=schedule,
            extra_forwards=extra_forwards,
            microbatches=microbatches,
            tokens=(SAMPLES, SEQUENCE),
            hidden=(SAMPLES * SEQUENCE // tensor, HIDDEN),
            dtype=torch.float64,
            device=torch.device("cpu"),
            loss=lambda x, y: stages[len(cut) - 1].loss(x, y),
            constants={"positions": positions},
        )
        named = [pair for stage in stages.values() for pair in stage.named_parameters()]
        totals: Counter[str] = Counter()

        def add(parameter: Tensor, name: str) -> None:
            if parameter.grad is not None:
                calls.update([name])
                totals[name] = totals[name] + parameter.grad
                parameter.grad = None

        for name, parameter in named:
            parameter.register_post_accumulate_grad_hook(partial(add, name=name))
        inputs = (tokens if built.first else None, targets if built.last else None)
        losses = {"first": built.train(*inputs, SCALE, samples=samples)}
        losses["evaluated"] = built.evaluate(*inputs, samples=samples)
        losses["second"] = built.train(*inputs, SCALE, samples=samples)
        for name, loss in losses.items():
            found[name] = abs(loss - (exact.detach() if built.last else 0)).item()
        for name, parameter in named:
            layout = layout_of(parameter)
            gradient = totals[name] / 2
            for axis in layout.partial_axes:
                gradient = collectives.all_reduce(gradient, getattr(m, axis))
            for box in layout.boxes(name, m.tensor.rank):
                found[name] = (box.view(gradient) - gradients[name][box.index()]).abs().max().item()
    return found, set(calls.values())


@pytest.mark.parametrize(
    ("schedule", "pipeline", "tensor", "layers", "microbatches", "cuts", "extra_forwards"),
    [
        ("1f1b", 2, 1, 3, 5, None, 0),
        ("1f1b", 2, 1, 3, 5, None, 1),
        ("1f1b", 4, 1, 5, 4, [1, 2, 3], 0),
        ("1f1b", 4, 1, 4, 7, None, 2),
        ("1f1b", 2, 2, 2, 2, None, 0),
        ("interleaved", 2, 1, 5, 4, None, 0),
        ("interleaved", 2, 1, 6, 3, [1, 2, 3, 4, 5], 0),
        ("interleaved", 4, 1, 8, 4, None, 0),
        ("interleaved", 2, 4, 4, 4, None, 0),
        ("zero_bubble", 2, 1, 3, 4, [1], 0),
        ("zero_bubble", 4, 1, 4, 8, None, 0),
        ("zero_bubble", 2, 2, 4, 3, None, 0),
        ("zero_bubble", 2, 4, 2, 2, None, 0),
    ],
)
def test_loss_and_gradients_match_one_process(
    pool, schedule, pipeline, tensor, layers, microbatches, cuts, extra_forwards
):
    arguments = {"schedule": schedule, "pipeline": pipeline, "tensor": tensor}
    arguments |= {
        "layers": layers,
        "microbatches": microbatches,
        "cuts": cuts,
        "extra_forwards": extra_forwards,
    }
    for found, calls in pool.run(distances, ranks=pipeline * tensor, **arguments):
        assert max(found.values()) < 1e-12, found
        assert calls == {2 * microbatches}


def test_compiled_zero_bubble_matches_one_process(pool):
    """Compiled blocks defer weight gradients to a separate pass."""
    arguments = {"schedule": "zero_bubble", "pipeline": 2, "tensor": 2, "layers": 3, "microbatches": 4}
    arguments |= {"cuts": [1], "extra_forwards": 0, "compiled": True}
    for found, calls in pool.run(distances, ranks=4, **arguments):
        assert max(found.values()) < 1e-12, found
        assert calls == {8}


def peak_hidden_states(schedule: str, microbatches: int) -> int:
    """Maximum number of live hidden states when a loss is computed, excluding those of earlier cases."""

    def count() -> int:
        return sum(type(each) is Tensor and each.shape == (SEQUENCE, HIDDEN) for each in gc.get_objects())

    gc.collect()
    before, alive = count(), [0]

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        alive.append(count() - before)
        return x.sum()

    with mesh(pipeline=2) as m:
        built = Pipeline(
            {
                m.pipeline.rank: nn.Linear(HIDDEN, HIDDEN)
                if m.pipeline.rank
                else nn.Embedding(VOCABULARY, HIDDEN)
            },
            2,
            m,
            schedule=schedule,
            microbatches=microbatches,
            tokens=(SEQUENCE,),
            hidden=(SEQUENCE, HIDDEN),
            dtype=torch.float32,
            device=torch.device("cpu"),
            loss=loss,
        )
        tokens = torch.zeros(microbatches * SEQUENCE, dtype=torch.int64)
        built.train(tokens, tokens, SCALE)
    return max(alive)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_memory_does_not_grow_with_microbatches(pool, schedule):
    few, many = (
        pool.run(peak_hidden_states, ranks=2, schedule=schedule, microbatches=count)[1] for count in (4, 8)
    )
    assert 0 < many == few


def rejection(microbatches: int) -> str:
    with mesh(pipeline=2) as m, pytest.raises(ValueError, match="microbatches") as caught:
        Pipeline(
            {},
            2,
            m,
            schedule="1f1b",
            microbatches=microbatches,
            tokens=(1, 2),
            hidden=(2, 2),
            dtype=torch.float32,
            device=torch.device("cpu"),
            loss=lambda *inputs: inputs[0],
        )
    return str(caught.value)


def test_too_few_microbatches_are_rejected_on_every_rank(pool):
    assert all("nearest valid: 2" in message for message in pool.run(rejection, ranks=2, microbatches=1))
