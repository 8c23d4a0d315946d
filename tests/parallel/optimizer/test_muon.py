"""Muon: the same updates as torch's, of whole matrices, at every distribution."""

import pytest
import torch
from torch import nn

from parallel import Mesh, ShardedAdamW, initialize
from parallel.layers.gqa import GQAQKVColumnParallelLinear
from parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel.layout import layout_of
from parallel.optimizer.adamw import AdamW
from parallel.optimizer.arithmetic import EAGER, Arithmetic
from parallel.optimizer.matrices import Owners
from parallel.optimizer.muon import Muon
from parallel.optimizer.newton_schulz import COEFFICIENTS, multiply_adds, orthogonalize
from parallel.optimizer.rules import Rule
from parallel.optimizer.stacks import MatrixStacks, stack_sizes
from tests.pool import mesh

RATE, STEPS, HIDDEN, HEAD = 3e-3, 50, 32, 4


class Layers(nn.Module):
    """A fused projection, one split by rows, and two by columns: one with a bias, one of few rows."""

    def __init__(self, on: Mesh) -> None:
        super().__init__()
        self.qkv = GQAQKVColumnParallelLinear(HIDDEN, 8, 2, HEAD, on)
        self.gate_up = ColumnParallelLinear(HIDDEN, {"gate": 48, "up": 48}, on.tensor)
        self.down = RowParallelLinear(48, HIDDEN, on.tensor, bias=True)
        self.thin = RowParallelLinear(64, 5, on.tensor)


def choose(name: str, parameter: nn.Parameter, heads: bool = False, **options) -> Rule:
    return Muon(**options, heads=heads) if parameter.dim() > 1 else AdamW()


def gradient(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """The gradient of a global tensor in a step: of low rank with noise, as those of models are."""
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return noise
    factors = (torch.randn(size, 2, generator=generator) for size in shape)
    left, right = factors
    return 3 * left @ right.T + noise


def trained(
    steps: int,
    dtype: torch.dtype = torch.float32,
    clip: float | None = 1.0,
    stacked: bool = False,
    heads: bool = False,
    **degrees: int,
) -> dict[str, torch.Tensor]:
    """This rank's boxes of the weights after each step, by global name, step and offsets.

    Args:
        heads: whether each head of the fused projection is a matrix.
        stacked: whether the programs are those of devices that compile them; here they run uncompiled.
    """
    ranks = degrees.get("data", 1)
    replicas = max(1, degrees.get("tensor", 1) // 2)
    with mesh(**degrees, kv_replicas=replicas, whole_matrices=not stacked) as on:
        layers = Layers(on)
        initialize(layers.named_parameters(), on.tensor, 1)
        optimizer = ShardedAdamW(
            layers.named_parameters(),
            on,
            rule=lambda *named: choose(*named, heads, dtype=dtype),
            bucket_size=3000,
            clip=clip,
            arithmetic=Arithmetic(lambda function: function) if stacked else EAGER,
        )
        found = {}
        for step in range(steps):
            optimizer.begin_step(1)
            loss = 0.0
            for name, parameter in layers.named_parameters():
                for box in layout_of(parameter).boxes(name, on.tensor.rank):
                    part = gradient(box.name, box.shape, step)[box.index()]
                    loss = loss + (box.view(parameter) * part).sum() / ranks
            loss.backward()
            optimizer.step(RATE)
            for box, states in optimizer.state_boxes():
                if box.saved:
                    found[box.name, step, box.offsets] = states["master"].clone()
        return found


def whole(ranks: list[dict], name: str, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A global tensor after a step, from all ranks' boxes."""
    result = torch.full(shape, torch.nan)
    for found in ranks:
        for (each, number, offsets), values in found.items():
            if (each, number) == (name, step):
                index = tuple(slice(o, o + s) for o, s in zip(offsets, values.shape, strict=True))
                assert result[index].isnan().all()
                result[index] = values
    assert not result.isnan().any()
    return result


def matrices() -> dict[str, torch.Tensor]:
    """Initial values of each matrix, by global name."""
    layers = Layers(Mesh())
    initialize(layers.named_parameters(), Mesh().tensor, 1)
    return {
        box.name: box.view(parameter).detach().clone()
        for name, parameter in layers.named_parameters()
        for box in layout_of(parameter).boxes(name, 0)
        if parameter.dim() > 1
    }


def torch_steps(heads: bool) -> list[dict[str, torch.Tensor]]:
    """Each section after each step of torch's Muon, with a weight for each matrix."""
    weights = {
        name: [nn.Parameter(part) for part in value.split(HEAD if heads and "qkv" in name else len(value))]
        for name, value in matrices().items()
    }
    each = [part for parts in weights.values() for part in parts]
    optimizer = torch.optim.Muon(each, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    results = []
    for step in range(STEPS):
        for name, parts in weights.items():
            grads = gradient(name, (sum(map(len, parts)), parts[0].shape[1]), step).split(len(parts[0]))
            for part, grad in zip(parts, grads, strict=True):
                part.grad = grad
        optimizer.step()
        results.append({name: torch.cat(parts).detach() for name, parts in weights.items()})
    return results


@pytest.mark.parametrize("heads", [False, True], ids=["whole", "by head"])
def test_every_update_of_one_process_equals_torch_muon(heads):
    """Without clipping, whose divisor torch rounds; bf16 would then differ in a few elements."""
    found = trained(STEPS, torch.bfloat16, clip=None, heads=heads)
    before = matrices()
    ours_before = dict(before)
    for step, exact in enumerate(torch_steps(heads)):
        for name, weight in exact.items():
            ours = whole([found], name, step, weight.shape)
            difference = (ours - ours_before[name]) - (weight - before[name])
            assert difference.abs().max() < 1e-6, (name, step)
            before[name], ours_before[name] = weight, ours


@pytest.mark.parametrize(
    "degrees",
    [
        *(
            {"data": 2},
            {"tensor": 2},
            {"tensor": 4},
            {"data": 2, "tensor": 4},
            {"data": 4, "shard_degree": 2},
        ),
        *({"stacked": True, "data": 2, "tensor": 4}, {"stacked": True, "data": 4, "shard_degree": 2}),
        *({"heads": True, "data": 2, "tensor": 4}, {"heads": True, "stacked": True, "data": 2, "tensor": 4}),
    ],
    ids=str,
)
def test_every_distribution_updates_whole_matrices(pool, degrees):
    ranks = degrees.get("data", 1) * degrees.get("tensor", 1)
    steps = 3
    found = pool.run(trained, ranks, steps=steps, **degrees)
    alone = trained(steps, heads=degrees.get("heads", False))
    for name, value in matrices().items():
        for step in range(steps):
            exact = whole([alone], name, step, value.shape)
            torch.testing.assert_close(whole(found, name, step, value.shape), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [False, True], ids=["whole", "by head"])
def test_planned_sizes_of_stacks_are_those_of_the_programs(heads):
    on = Mesh(data=4, tensor=4, kv_replicas=2, rank=5, whole_matrices=True)
    layers = Layers(on).named_parameters()
    optimizer = ShardedAdamW(layers, on, rule=lambda *named: choose(*named, heads), bucket_size=3000)
    buckets = [bucket for bucket in optimizer.buckets if isinstance(bucket.rule, Muon)]
    stacks, sizes = MatrixStacks(buckets, on, heads), stack_sizes(buckets, 4, 4, heads)
    assert [*sizes.shapes] == stacks.shapes
    messages = [stacks.sent, stacks.relayed, stacks.returned, stacks.relayed_back]
    planned = [sizes.sent, sizes.relayed, sizes.returned, sizes.relayed_back]
    assert planned == [len(each) * stacks.block for each in messages]
    indices = [*messages, stacks.assembled, *stacks.placed, *stacks.longer_sides]
    assert sizes.index_bytes == sum(each.nbytes for each in indices)
    assert sizes.held < sizes.sent  # padded
    assert sizes.block == 4  # not smaller because of the 5 rows


@pytest.mark.parametrize(("coefficients", "error"), [("published", 0.2), ("polar_express", 0.1)])
@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (40, 40)])
def test_bf16_orthogonalization_is_near_that_in_float64(shape, coefficients, error):
    """bf16 has 8 bits: each step rounds products by 2⁻⁹, which slopes of up to 8 amplify."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = orthogonalize(matrix.double(), COEFFICIENTS[coefficients])
    singular_values = torch.linalg.svdvals(exact)
    assert 0.6 < singular_values.min() < singular_values.max() < 1.3
    assert (singular_values - 1).abs().mean() < error
    rounded = orthogonalize(matrix.bfloat16(), COEFFICIENTS[coefficients]).double()
    assert (rounded - exact).norm() < 0.03 * exact.norm()
    torch.testing.assert_close(
        orthogonalize(matrix, COEFFICIENTS[coefficients]).double(), exact, rtol=1e-4, atol=1e-5
    )


def test_bits_of_a_matrix_do_not_depend_on_others_in_its_batch():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(32, 48, generator=generator).bfloat16()
    others = torch.randn(3, 32, 48, generator=generator).bfloat16()
    first = orthogonalize(torch.cat((matrix[None], others)), COEFFICIENTS["published"])
    last = orthogonalize(torch.cat((others * 0, matrix[None])), COEFFICIENTS["published"])
    assert torch.equal(first[0], last[3])


def test_owners_share_the_cost():
    owners = Owners(4, lambda shape: multiply_adds(shape, COEFFICIENTS["published"]))
    block = {"q": (64, 64), "k": (16, 64), "v": (16, 64), "o": (64, 64)}
    block |= {"gate": (128, 64), "up": (128, 64), "down": (64, 128)}
    chosen = [
        owners.choose({f"{layer}.{name}": shape for name, shape in block.items()}) for layer in range(8)
    ]
    assert all({*each.values()} <= {*range(4)} for each in chosen)
    assert max(owners.loads) < 1.05 * sum(owners.loads) / 4


def test_skipped_step_changes_neither_weights_nor_momentum():
    on = Mesh(kv_replicas=1, whole_matrices=True)
    layers = Layers(on)
    initialize(layers.named_parameters(), on.tensor, 1)
    optimizer = ShardedAdamW(layers.named_parameters(), on, rule=choose)

    def step(factor: float) -> list[torch.Tensor]:
        sum((parameter * factor).sum() for parameter in layers.parameters()).backward()
        optimizer.step(RATE)
        return [state.clone() for bucket in optimizer.buckets for state in bucket.states.values()]

    before = step(1.0)
    assert all(map(torch.equal, step(float("nan")), before))
    assert not any(map(torch.equal, step(1.0), before))
