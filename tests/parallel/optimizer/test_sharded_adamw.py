"""ZeRO-1 against torch.optim.AdamW on one process; its memory; skipped steps."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling.models.build import optimizer_bucket_size
from parallel import (
    ColumnParallelLinear,
    Mesh,
    RMSNorm,
    ShardedAdamW,
    VocabParallelEmbedding,
    collectives,
    initialize,
)
from parallel import device as devices
from parallel.initialization import Normal
from parallel.layout import Box, deferred_parameters
from parallel.mesh import Axis
from parallel.optimizer.adamw import AdamW, adamw, update
from parallel.optimizer.arithmetic import square_norm
from parallel.optimizer.buckets import BUCKET_SIZE, IN_FLIGHT, Bucket, Group, bucket_size
from parallel.optimizer.fsdp import Unit
from parallel.optimizer.grouping import WeightDecay
from profiles import resolve
from tests.pool import mesh

ONE = Axis("tensor")
WIDTH = 7  # odd, so that shards end inside parameters and rows
RATE = 1e-2


def model(layers: int = 3, dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    """Matrices, biases and norms of different sizes."""
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules.append(ColumnParallelLinear(WIDTH, WIDTH + 2, ONE, bias=True, dtype=dtype))
        modules.append(RMSNorm(WIDTH, ONE, dtype=dtype))
    built = nn.ModuleList(modules)
    initialize(built.named_parameters(), ONE, 1)
    return built


def loss(built: nn.ModuleList, step: int, microbatch: int) -> Tensor:
    """A linear function of all parameters, whose gradients are known and grow with each step."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    directions = (torch.randn(p.shape, generator=generator) for p in built.parameters())
    return 3**step * sum((p.float() * g).sum() for p, g in zip(built.parameters(), directions, strict=True))


def reference(steps: int, microbatches: int, clip: float | None) -> tuple[list[Tensor], list[float]]:
    """Weights and gradient norms with torch's AdamW and gradient clipping."""
    built = model()
    matrices = [p for p in built.parameters() if p.dim() > 1]
    others = [p for p in built.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            loss(built, step, microbatch).backward()
        norms.append(nn.utils.clip_grad_norm_(built.parameters(), clip or math.inf).item())
        optimizer.step()
    return [p.detach() for p in built.parameters()], norms


def trained(
    steps: int,
    microbatches: int,
    clip: float | None,
    degree: int | None,
    bucket_size: int,
    fused: bool = True,
    in_place: bool = False,
) -> tuple[list[Tensor], list[float]]:
    """Weights and gradient norms with ZeRO-1, the microbatches distributed over the data axis."""
    ranks = torch.distributed.get_world_size()
    options = {"shard_degree": degree, "reduces_in_place": in_place}
    with mesh(data=ranks, **options) as m, pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr("parallel.optimizer.adamw.has_adamw_kernel", lambda _: False)
        built = model()
        optimizer = ShardedAdamW(built.named_parameters(), m, clip=clip, bucket_size=bucket_size)
        norms = []
        for step in range(steps):
            local = range(m.data.rank, microbatches, m.data.size)
            optimizer.begin_step(len(local))
            for microbatch in local:
                loss(built, step, microbatch).backward()
            norms.append(optimizer.step(RATE).gradient_norm.item())
        return [p.detach().clone() for p in built.parameters()], norms


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize(("ranks", "degree"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_matches_torch_adamw(pool, ranks, degree, clip):
    weights, norms = reference(4, 4, clip)
    for ours, our_norms in pool.run(
        trained, ranks, steps=4, microbatches=4, clip=clip, degree=degree, bucket_size=50
    ):
        assert our_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(ours, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("degree", [2, 4])
def test_reductions_in_place_match_torch_adamw(pool, degree):
    weights, norms = reference(4, 4, 1.0)
    options = {"steps": 4, "microbatches": 4, "clip": 1.0, "degree": degree, "bucket_size": 50}
    for ours, our_norms in pool.run(trained, 4, in_place=True, **options):
        assert our_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(ours, weights, rtol=1e-5, atol=1e-6)


def reductions_in_backward(in_place: bool) -> tuple[int, int, int]:
    """Reductions that were started and that were waited for before `step`, and buckets."""
    events = []

    class Counted(collectives.PendingReduceScatter):
        def __init__(self, *arguments):
            events.append("start")
            super().__init__(*arguments)

        def wait(self, *arguments):
            events.append("wait")
            return super().wait(*arguments)

    with mesh(data=2, reduces_in_place=in_place) as m, pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "PendingReduceScatter", Counted)
        built = model()
        optimizer = ShardedAdamW(built.named_parameters(), m, bucket_size=50)
        optimizer.begin_step(1)
        loss(built, 0, 0).backward()
        return events.count("start"), events.count("wait"), len(optimizer.buckets)


@pytest.mark.parametrize("in_place", [False, True])
def test_reductions_in_place_never_wait_during_backward(pool, in_place):
    """They need no memory; others wait so that few are in flight."""
    for started, waited, buckets in pool.run(reductions_in_backward, 2, in_place=in_place):
        assert started == buckets > IN_FLIGHT
        assert waited == (0 if in_place else buckets - IN_FLIGHT)


def sums_over_replicas_in_backward() -> tuple[int, int]:
    """Sums of shards over their replicas that were started before `step`, and buckets."""
    started = []

    class Counted(collectives.PendingAllReduce):
        def __init__(self, x, axis):
            started.append(axis.name)
            super().__init__(x, axis)

    with mesh(data=4, shard_degree=2) as m, pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "PendingAllReduce", Counted)
        built = model()
        optimizer = ShardedAdamW(built.named_parameters(), m, bucket_size=50)
        optimizer.begin_step(1)
        loss(built, 0, 0).backward()
        return started.count("dp_replicate"), len(optimizer.buckets)


def test_shards_are_summed_over_replicas_during_backward(pool):
    """All but the last ones, which are in flight when backward ends."""
    for started, buckets in pool.run(sums_over_replicas_in_backward, 4):
        assert started == buckets - IN_FLIGHT > 0


def reductions_before_the_last_vector() -> int:
    """Buckets whose reduction had begun when the gradient of the first layer's bias was computed."""
    started, found = [], []

    class Counted(collectives.PendingReduceScatter):
        def __init__(self, x, axis, out):
            started.append(axis.name)
            super().__init__(x, axis, out)

    with mesh(data=2) as m, pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "PendingReduceScatter", Counted)
        built = model()
        _, bias, *_ = built.parameters()
        bias.register_post_accumulate_grad_hook(lambda _: found.append(len(started)))
        optimizer = ShardedAdamW(built.named_parameters(), m, bucket_size=50)
        optimizer.begin_step(1)
        total = torch.zeros(())
        for parameter in built.parameters():  # one after the other, as layers
            total = (total + parameter.sum()).sin()
        total.backward()
        return found[0]


def test_reductions_overlap_with_backward_although_the_last_weight_is_a_norm(pool):
    """The bucket of all norms and biases is complete at the end, those of matrices layer by layer."""
    assert pool.run(reductions_before_the_last_vector, 2) == [2, 2]


def test_matches_torch_adamw_without_the_fused_kernel(pool):
    weights, _ = reference(4, 2, 1.0)
    arguments = {
        "steps": 4,
        "microbatches": 2,
        "clip": 1.0,
        "degree": None,
        "bucket_size": 50,
        "fused": False,
    }
    for ours, _ in pool.run(trained, 2, **arguments):
        torch.testing.assert_close(ours, weights, rtol=1e-5, atol=1e-6)


def test_compilable_update_matches_the_fused_kernel():
    length, settings = 1000, AdamW((0.9, 0.95), 1e-8)
    constants = settings.constants(0.1, torch.device("cpu"))
    weights, gradient, exp_avg, exp_avg_sq = torch.rand(4, length, generator=torch.Generator().manual_seed(0))
    ours, fused = ([x.clone() for x in (weights, exp_avg, exp_avg_sq)] for _ in range(2))
    for number, skip in ((1, 0.0), (1, 1.0), (2, 0.0), (3, 0.0)):
        step, divisor, skipped = map(torch.tensor, (float(number), 1.3, skip))
        bad = gradient * math.inf if skip else gradient
        scalars = {"step": step, "divisor": divisor, "skip": skipped, "learning_rate": 1e-2 / number}
        for (w, m, v), compiled in ((ours, update), (fused, None)):
            options = {
                "settings": settings,
                "weight_decay": 0.1,
                "constants": constants,
                "compiled": compiled,
            }
            adamw(w, bad.clone(), m, v, **scalars, **options)
    for compilable, exact in zip(ours, fused, strict=True):
        torch.testing.assert_close(compilable, exact, rtol=1e-5, atol=1e-7)


def test_bucket_size_does_not_change_the_result(pool):
    arguments = {"steps": 3, "microbatches": 2, "clip": None, "degree": None}
    small, large = (
        pool.run(trained, 2, bucket_size=bucket_size, **arguments)[0][0] for bucket_size in (20, 10_000)
    )
    torch.testing.assert_close(small, large, rtol=1e-6, atol=1e-7)


def test_gradients_accumulate_in_gradient_dtype():
    """1 plus 64 times 2⁻⁹: in bf16, with 8 bits of mantissa, every small term is rounded away."""

    def total(dtype: torch.dtype) -> float:
        layer = RMSNorm(1, ONE, dtype=torch.bfloat16)
        initialize(layer.named_parameters(), ONE, 1)
        optimizer = ShardedAdamW(layer.named_parameters(), Mesh(), gradient_dtype=dtype)
        optimizer.begin_step(65)
        for size in [1.0] + 64 * [2.0**-9]:
            (layer.weight.sum() * size).backward()
        return optimizer.step(0.0).gradient_norm.item()

    assert total(torch.float32) == 1.125
    assert total(torch.bfloat16) == 1.0


def test_parameters_without_gradient_do_not_change():
    built = model()
    optimizer = ShardedAdamW(built.named_parameters(), Mesh(), weight_decay=WeightDecay(0.0))
    before = [p.detach().clone() for p in built.parameters()]
    optimizer.begin_step(1)
    built[0].weight.sum().backward()
    optimizer.step(RATE)
    changed = [not torch.equal(p, old) for p, old in zip(built.parameters(), before, strict=True)]
    assert changed == [True] + [False] * (len(before) - 1)


def states(optimizer: ShardedAdamW) -> list[Tensor]:
    """Copies of everything that a step changes."""
    tensors = [(b.values, *b.states.values()) for b in optimizer.buckets]
    return [tensor.clone() for bucket in tensors for tensor in bucket]


def train_with_bad_gradient(value: float) -> tuple[bool, bool, bool]:
    """Train with one step in which one element of one rank's gradient is `value`.

    Returns:
        Whether the step was skipped, whether it changed nothing, and whether later steps are the same as without it.
    """
    with mesh(data=2) as m:
        results = []
        for interrupted in (False, True):
            built = model()
            optimizer = ShardedAdamW(built.named_parameters(), m, bucket_size=50)
            for step in range(3):
                if interrupted and step == 1:
                    optimizer.begin_step(1)
                    before = states(optimizer)
                    factor = torch.ones(WIDTH + 2, WIDTH)
                    if m.data.rank == 1:
                        factor[3, 4] = value
                    (built[2].weight * factor).sum().backward()
                    skipped = bool(optimizer.step(RATE).skipped)
                    same = all(torch.equal(a, b) for a, b in zip(before, states(optimizer), strict=True))
                optimizer.begin_step(1)
                loss(built, step, m.data.rank).backward()
                optimizer.step(RATE)
            results.append(states(optimizer))
        return skipped, same, all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nonfinite_gradient_skips_the_step_on_all_ranks(pool, value):
    assert pool.run(train_with_bad_gradient, 2, value=value) == [(True, True, True)] * 2


class LiveBytes(TorchDispatchMode):
    """Tracks the peak bytes of live tensors, at every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.total, self.peak = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                reference = StorageWeakRef(leaf.untyped_storage())
                _, before = self.storages.get(reference.cdata, (reference, 0))
                self.storages[reference.cdata] = (reference, size := leaf.untyped_storage().nbytes())
                self.total += size - before
        if self.total > self.peak:  # if it is without the storages that are gone
            self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
            self.total = sum(size for _, size in self.storages.values())
            self.peak = max(self.peak, self.total)
        return result


def peak_bytes_per_parameter(gradient_dtype: torch.dtype) -> float:
    """Peak over two steps of two microbatches of bf16 weights, one matrix at a time."""
    with mesh(data=torch.distributed.get_world_size()) as m, LiveBytes() as live:
        layers = [ColumnParallelLinear(32, 32, ONE, dtype=torch.bfloat16) for _ in range(100)]
        built = nn.ModuleList(layers)
        count = sum(p.numel() for p in built.parameters())
        optimizer = ShardedAdamW(built.named_parameters(), m, gradient_dtype=gradient_dtype, bucket_size=1000)
        live.peak = 0  # while buckets are filled, weights exist twice
        for _ in range(2):
            optimizer.begin_step(2)
            for layer in 2 * layers[::-1]:
                layer.weight.sum().backward()
            optimizer.step(RATE)
        return live.peak / count


@pytest.mark.parametrize(
    ("ranks", "dtype", "fixed"), [(2, torch.float32, 6), (4, torch.bfloat16, 4)], ids=["float32", "bf16"]
)
def test_memory_matches_the_formula(pool, ranks, dtype, fixed):
    for found in pool.run(peak_bytes_per_parameter, ranks, gradient_dtype=dtype):
        assert fixed + 12 / ranks <= found <= 1.05 * (fixed + 12 / ranks)


def test_weights_are_initialized_shard_by_shard(monkeypatch):
    """With FSDP, a rank draws its shard and holds one layer at a time; values are those drawn at once."""
    planned, full, drawn, fill = Mesh(data=4, rank=1), [], [], Normal.fill

    def layers() -> nn.ModuleList:
        return nn.ModuleList(ColumnParallelLinear(64, 64, ONE) for _ in range(10))

    def record(self: Normal, local: Tensor, box: Box, seed: int) -> None:
        full.append(sum(p.untyped_storage().nbytes() >= p.nbytes for p in built.parameters()))
        drawn.append(local.numel())
        fill(self, local, box, seed)

    with deferred_parameters():
        built = layers()
    units = [Unit((layer,), (f"{i}.",), block=True) for i, layer in enumerate(built)]
    with monkeypatch.context() as patched:
        patched.setattr(Normal, "fill", record)
        optimizer = ShardedAdamW(built.named_parameters(), planned, units=units, seed=1)
    assert full == [1] * 10
    assert drawn == [64 * 64 // 4] * 10
    initialize((at_once := layers()).named_parameters(), ONE, 1)
    for bucket, layer in zip(optimizer.buckets, at_once, strict=True):
        assert torch.equal(bucket.master, bucket.local_shard(layer.weight.detach().flatten()))


def test_norms_exclude_padding():
    """5 rows pad to 6 on 2 tensor ranks; each one's 3 rows, to multiples of 128 bytes on 2 data ranks."""
    squares = 0.0
    for rank in range(4):
        planned = Mesh(data=2, tensor=2, rank=rank)
        table = VocabParallelEmbedding(5, 1, planned.tensor)
        bucket = Bucket(Group(AdamW(), 1.0, 0.0, (), [("weight", table.weight)]), planned, torch.float32)
        bucket.master.fill_(3.0)
        squares += square_norm([bucket.master], [bucket.norm_weights]).item()
    assert squares == pytest.approx(5 * 3.0**2)


def test_parameters_and_shards_are_aligned_to_128_bytes():
    """Even with odd sizes, in bf16, on three ranks."""
    for rank in range(3):
        planned = Mesh(data=3, rank=rank)
        built = model(dtype=torch.bfloat16)
        optimizer = ShardedAdamW(built.named_parameters(), planned)
        for bucket in optimizer.buckets:
            offsets = [slot.parameter.data_ptr() - bucket.values.data_ptr() for slot in bucket.slots]
            shard = bucket.local_shard(bucket.values)
            assert [byte % 128 for byte in (*offsets, shard.data_ptr() - bucket.values.data_ptr())] == [0] * (
                len(offsets) + 1
            )
            assert 3 * len(shard) == len(bucket.values)


def test_buckets_grow_with_the_shard_group_on_networks_with_latency():
    h100, cpu = devices.ACCELERATORS["h100"], devices.CPU
    assert bucket_size(8, h100) == bucket_size(4096, cpu) == BUCKET_SIZE
    assert bucket_size(256, h100) == 2 * bucket_size(128, h100) > BUCKET_SIZE
    assert bucket_size(256, devices.ACCELERATORS["trn2"]) < bucket_size(
        256, h100
    )  # a slower link, shorter messages
    alone = ["parallel.tensor=1", "parallel.pipeline=1", "train.recompute=full"]
    profile = resolve.load("llama3-70b-h100", alone)  # sharded over 64
    assert optimizer_bucket_size(profile) == bucket_size(64, h100) > BUCKET_SIZE


def gathers_during_forward() -> list[list[str]]:
    """Buckets whose gather began or was waited for, in a step and before each layer of the next forward.

    Asserts that the weights equal those of an optimizer that gathers at once.
    """
    events: list[str] = []

    def take() -> list[str]:
        return [events.pop(0) for _ in range(len(events))]

    def note(event: str, call: Callable[[], None]) -> Callable[[], None]:
        return lambda: (events.append(event), call())[1]

    with mesh(data=2) as m:
        layers, at_once = (nn.ModuleDict({str(i): RMSNorm(64, ONE) for i in range(4)}) for _ in range(2))
        optimizers = []
        for built in (layers, at_once):
            initialize(built.named_parameters(), ONE, 1)
            optimizers.append(ShardedAdamW(built.named_parameters(), m, bucket_size=1))
        ahead, reference = optimizers
        ahead.gather_before_use([Unit((layer,), (f"{i}.",)) for i, layer in layers.items()])
        for number, bucket in enumerate(ahead._updated):
            bucket.start_gather = note(f"begin {number}", bucket.start_gather)
            bucket.wait = note(f"wait {number}", bucket.wait)
        for optimizer, built in ((ahead, layers), (reference, at_once)):
            sum((i + 1) * layer.weight.sum() for i, layer in enumerate(built.values())).backward()
            optimizer.step(RATE)
        found = [take()]
        for name, layer in layers.items():
            layer(torch.ones(1, 64))
            found.append(take())
            torch.testing.assert_close(layer.weight, at_once[name].weight, rtol=0, atol=0)
        return found


def test_step_returns_before_weights_are_gathered_and_each_layer_waits_for_its_own(pool):
    """Two gathers are in flight at a time: a layer's begins two layers ahead."""
    expected = [["begin 0", "begin 1"], ["wait 0", "begin 2"], ["wait 1", "begin 3"], ["wait 2"], ["wait 3"]]
    assert pool.run(gathers_during_forward, 2) == [expected] * 2
