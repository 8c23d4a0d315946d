"""Muon: momentum, orthogonalized as a matrix (kellerjordan.github.io/posts/muon; arXiv 2502.16982).

With g the gradient divided by the clipping divisor, m the momentum, of a matrix of r rows and c columns:

    m = μ m + (1-μ) g;   u = μ m + (1-μ) g;   w = (1 - ηλ) w - η · 0.2 √max(r, c) · orthogonalize(u)

The factor gives the update the root mean square of AdamW's, so that learning rate and weight decay carry over. A matrix is what a
layout's section says: of fused projections, Q, K, V, gate and up are orthogonalized apart, Q, K and V each with all their heads,
as in arXiv 2502.16982, or with `heads` head by head; so is each expert. Vectors, embeddings, heads and routers are left to AdamW.

Momentum is sharded like all states, and computed elementwise. The matrix u is assembled on one rank, orthogonalized there once,
and the result scattered back (matrices.py), while other buckets are on their way:

    start              momentum, and u to the owners
    IN_FLIGHT later    orthogonalize what this rank owns, and results back
    IN_FLIGHT later    weights

u and the results are sent in the dtype in which they are orthogonalized, so that no bits are lost.

Devices that compile each operator at its first use run a step as five kinds of compiled programs, with one exchange each way for
all buckets, over shards and over tensor ranks (stacks.py): momentum of a bucket, collection, relay, orthogonalization, weights of
a bucket.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel import collectives
from parallel.layout import Layout
from parallel.mesh import Axis, Mesh
from parallel.optimizer.arithmetic import Arithmetic
from parallel.optimizer.buckets import Bucket
from parallel.optimizer.matrices import BucketMatrices, Owners, Packed, Shape, cut, matrix_axis
from parallel.optimizer.newton_schulz import COEFFICIENTS, multiply_adds, orthogonalize
from parallel.optimizer.rules import Step, Updater
from parallel.optimizer.stacks import MatrixStacks, collect, orthogonalize_stacks, relay

IN_FLIGHT = 2  # buckets on their way to the owners, and back
RMS = 0.2  # root mean square of AdamW's updates (arXiv 2502.16982)
# On GPUs, matrices of at most SMALL elements are orthogonalized BATCH at a time. Always as many, some of them zeros: the kernels,
# and so the bits, must not depend on how many matrices a rank owns.
SMALL, BATCH = 1 << 20, 8


@dataclass(frozen=True)
class Muon:
    """The rule Muon with its hyperparameters, except the learning rate and weight decay, which vary.

    Args:
        momentum: μ.
        coefficients: a key of COEFFICIENTS.
        dtype: in which matrices are orthogonalized.
        heads: whether the rows of each head, where a layout names them (`head_rows`), are matrices of their own.
    """

    momentum: float = 0.95
    coefficients: str = "published"
    dtype: torch.dtype = torch.bfloat16
    heads: bool = False
    states: tuple[str, ...] = ("momentum",)
    clipped: bool = True

    def rate(self, layout: Layout) -> float:
        """Learning-rate multiplier of a parameter."""
        return layout.matrix_rate

    @property
    def traffic(self) -> int:
        """Bytes of memory per weight of the operators around the matrix products, besides the gradient.

        In float32, 40 for momentum, 12 for the scaled results and 28 for the weights; 9 elements in the products' dtype.
        """
        return 40 + 12 + 28 + 9 * self.dtype.itemsize

    @property
    def exchanged(self) -> int:
        """Bytes per weight that are sent to the owners and back."""
        return 2 * self.dtype.itemsize

    def multiply_adds(self, layout: Layout) -> int:
        """Those that orthogonalize a parameter's matrices."""
        rows = layout.head_rows if self.heads else ()
        return sum(
            self.cost(shape) for section in layout.sections for _, _, shape in cut(section.shape, rows)
        )

    def cost(self, shape: Shape) -> int:
        """Multiply-adds that orthogonalize a matrix."""
        return multiply_adds(shape, COEFFICIENTS[self.coefficients])

    def updater(self, buckets: Sequence[Bucket], mesh: Mesh, arithmetic: Arithmetic) -> Updater:
        """An updater of these buckets, in the order of their updates."""
        if mesh.whole_matrices:
            return _Updater(self, buckets, mesh)
        return _StackedUpdater(self, buckets, mesh, arithmetic)


@dataclass
class _Pending:
    """A bucket's update in progress."""

    bucket: Bucket
    step: Step
    packed: Packed


class _Updater:
    def __init__(self, rule: Muon, buckets: Sequence[Bucket], mesh: Mesh) -> None:
        self._rule = rule
        self._matrices: dict[int, BucketMatrices] = {}
        owners: dict[str, Owners] = {}
        for bucket in buckets:
            axis = matrix_axis(bucket, mesh)
            chosen = owners.setdefault(axis.name, Owners(axis.size, rule.cost))
            self._matrices[id(bucket)] = BucketMatrices(bucket, mesh, chosen, rule.heads)
        self._sent: deque[_Pending] = deque()
        self._returning: deque[_Pending] = deque()

    def update(self, bucket: Bucket, step: Step) -> Iterable[Bucket]:
        u = self._accelerate(bucket, step)
        self._sent.append(_Pending(bucket, step, self._matrices[id(bucket)].collect(u)))
        return self._advance(IN_FLIGHT)

    def finish(self) -> Iterable[Bucket]:
        return self._advance(0)

    def rehearse(self, bucket: Bucket, step: Step) -> None:
        """There is nothing to compile."""

    def _accelerate(self, bucket: Bucket, step: Step) -> Tensor:
        momentum, rule = bucket.states["momentum"], self._rule
        return accelerate(momentum, bucket.gradient_shard, step.divisor, step.skip, rule.momentum, rule.dtype)

    def _advance(self, limit: int) -> list[Bucket]:
        """Continue the oldest updates until at most `limit` buckets are on their way in each direction."""
        ended = []
        while len(self._sent) > limit:
            entry = self._sent.popleft()
            matrices = self._matrices[id(entry.bucket)]
            found = self._orthogonalize(matrices.assemble(entry.packed))
            entry.packed = matrices.scatter(found, entry.packed.pending)
            self._returning.append(entry)
        while len(self._returning) > limit:
            entry = self._returning.popleft()
            bucket = entry.bucket
            step = entry.step
            factors = update_factors(step.rates[bucket.rate], step.skip, bucket.weight_decay)
            for box, part in entry.packed.parts():  # one after the other, in the caches of a CPU
                apply(box.view(bucket.master), part.float() * (RMS * math.sqrt(max(box.shape))), *factors)
            ended.append(bucket)
        return ended

    def _orthogonalize(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        coefficients, found = COEFFICIENTS[self._rule.coefficients], {}
        small: dict[Shape, list[str]] = {}
        for name, matrix in matrices.items():
            if matrix.is_cuda and matrix.numel() <= SMALL:
                small.setdefault(tuple(matrix.shape), []).append(name)
            else:
                found[name] = orthogonalize(matrix, coefficients)
        for shape, names in small.items():
            for first in range(0, len(names), BATCH):
                batch = names[first : first + BATCH]
                stacked = matrices[batch[0]].new_zeros(BATCH, *shape)
                torch.stack([matrices[name] for name in batch], out=stacked[: len(batch)])
                found |= zip(batch, orthogonalize(stacked, coefficients).unbind(), strict=False)
        return found


class _StackedUpdater:
    """Updates all buckets of the step together, by programs that are the same on every rank."""

    def __init__(self, rule: Muon, buckets: Sequence[Bucket], mesh: Mesh, arithmetic: Arithmetic) -> None:
        self._rule, self._count = rule, len(buckets)
        by_axis: dict[str, list[Bucket]] = {}
        for bucket in buckets:
            by_axis.setdefault(bucket.axis.name, []).append(bucket)
        self._stacks = [MatrixStacks(each, mesh, rule.heads) for each in by_axis.values()]
        self._accelerated: dict[int, tuple[Tensor, Step]] = {}
        prepare = arithmetic.prepare
        self._accelerate, self._collect, self._relay = prepare(accelerate), prepare(collect), prepare(relay)
        self._orthogonalize, self._apply = prepare(orthogonalize_stacks), prepare(place)

    def update(self, bucket: Bucket, step: Step) -> Iterable[Bucket]:
        momentum, rule = bucket.states["momentum"], self._rule
        u = self._accelerate(
            momentum, bucket.gradient_shard, step.divisor, step.skip, rule.momentum, rule.dtype
        )
        self._accelerated[id(bucket)] = u, step
        return ()

    def finish(self) -> Iterable[Bucket]:
        for stacks in self._stacks:
            yield from self._end(stacks, collectives.all_to_all)

    def rehearse(self, bucket: Bucket, step: Step) -> None:
        self.update(bucket, step)
        if len(self._accelerated) == self._count:
            for stacks in self._stacks:
                deque(self._end(stacks, lambda blocks, axis: blocks), maxlen=0)

    def _end(self, stacks: MatrixStacks, exchange: Callable[[Tensor, Axis], Tensor]) -> Iterator[Bucket]:
        """Orthogonalize the matrices of these buckets; yield each bucket as soon as it is updated.

        Args:
            exchange: an all-to-all.
        """
        shards, steps = zip(*(self._accelerated.pop(id(bucket)) for bucket in stacks.buckets), strict=True)
        blocks = exchange(self._collect(shards, stacks.sent, stacks.block), stacks.axis)
        del shards  # their memory
        blocks = exchange(self._relay(blocks, stacks.relayed), stacks.tensor)
        of_stacks = stacks.assembled, stacks.returned, stacks.transposed, stacks.shapes
        blocks = self._orthogonalize(blocks, *of_stacks, COEFFICIENTS[self._rule.coefficients])
        blocks = self._relay(exchange(blocks, stacks.tensor), stacks.relayed_back)
        found = exchange(blocks, stacks.axis)
        for bucket, step, placed, sides in zip(
            stacks.buckets, steps, stacks.placed, stacks.longer_sides, strict=True
        ):
            scalars = step.rates[bucket.rate], step.skip, bucket.weight_decay
            self._apply(bucket.master, found, placed, sides, *scalars)
            yield bucket  # its parameters are gathered beside the next ones' updates


def accelerate(
    momentum: Tensor, gradient: Tensor, divisor: Tensor, skip: Tensor, factor: float, dtype: torch.dtype
) -> Tensor:
    """Update the momentum unless `skip` is 1. Returns Nesterov's: what it will be if the gradient stays."""
    # A gradient equal to the momentum changes no value of it (-0 may become 0), and what `apply` multiplies by 0 is finite.
    gradient = momentum.where(skip > 0, gradient.float() / divisor)
    momentum.lerp_(gradient, 1 - factor)
    return gradient.lerp(momentum, factor).to(dtype)


def place(
    weights: Tensor,
    results: Tensor,
    placed: Tensor,
    longer_sides: Tensor,
    rate: float | Tensor,
    skip: Tensor,
    decay: float,
) -> None:
    """Update a bucket's weights by its blocks of the results (g·m', block)."""
    update = results[placed].float() * (RMS * longer_sides.sqrt())  # (n, block)
    apply(weights, update.flatten(), *update_factors(rate, skip, decay))


def update_factors(rate: float | Tensor, skip: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Factors of `apply` for weights and update, 0-dim; if `skip` is 1, no value of the weights changes."""
    skipped = skip > 0
    return torch.where(skipped, 1.0, 1 - rate * decay), torch.where(skipped, 0.0, rate)


def apply(weights: Tensor, update: Tensor, kept: Tensor, rate: Tensor) -> None:
    """Multiply the weights by `kept`, and subtract the update times the rate; overwrites both."""
    weights.mul_(kept).sub_(update.mul_(rate))
