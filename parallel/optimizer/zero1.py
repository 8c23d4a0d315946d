"""ZeRO-1 (arXiv 1910.02054, stage 1): AdamW whose float32 master weights and moments are sharded over data × context.

One step over d ranks of the zero axis:

    gradients    summed over the microbatches in float32 as backward makes them, then reduce-scattered bucket by bucket while
                 backward goes on: n(d-1)/d elements sent
    norm         over every axis, each parameter once; not finite: the step is skipped on all ranks alike
    AdamW        on the own shard (arXiv 1711.05101)
    parameters   all-gathered bucket by bucket while the next bucket is updated: n(d-1)/d elements

Bytes a parameter in bf16 with float32 gradients: 2 + 4 + 12/d; with bf16 gradients 2 + 2 + 12/d; all in float32 4 + 4 + 8/d
and the master weights are the parameters' own shard.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import collectives
from parallel.layout import layout_of
from parallel.mesh import Mesh
from parallel.optimizer.adamw import Update, adamw
from parallel.optimizer.buckets import Bucket, ShardBox, Slot

IN_FLIGHT = 2  # buckets whose exchange is under way at a time, each with memory of its own size on top
BUCKET = 10_000_000  # elements
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepResult:
    """What a step did: the gradient's global norm before clipping, and whether the update was skipped."""

    gradient_norm: float
    skipped: bool


def decays_matrices(name: str, parameter: nn.Parameter) -> bool:
    """The usual choice of what decays: matrices, not biases and norms."""
    return parameter.dim() > 1


class ZeRO1:
    """AdamW over a model's parameters, in buckets.

    Args:
        named: the model's named parameters; each carries a layout. Their memory moves into the buckets.
        mesh: its zero axis shards; its other axes sum partial gradients and the norm.
        betas, epsilon, weight_decay: AdamW's; the learning rate comes with each step.
        decays: which parameters decay.
        clip: largest global norm of the gradient, None for no clipping.
        shard: False keeps whole states on every rank (plain data parallelism).
        gradient_dtype: the gradients are summed in this type.
        bucket: elements a bucket holds at least before the next is begun.
        compiled: `adamw.update`, compiled, for devices on which torch has no fused kernel.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        mesh: Mesh,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        weight_decay: float = 0.1,
        decays: Callable[[str, nn.Parameter], bool] = decays_matrices,
        clip: float | None = 1.0,
        shard: bool = True,
        gradient_dtype: torch.dtype = torch.float32,
        bucket: int = BUCKET,
        compiled: Update | None = None,
    ) -> None:
        self.compiled = compiled
        self.mesh, self.betas, self.epsilon, self.clip = mesh, betas, epsilon, clip
        self.steps = 0  # updates applied; bias correction counts them
        self.pending_copy: Future[None] | None = None  # of the states, for a checkpoint
        self.buckets: list[Bucket] = []
        for rate, partial, row in fill_buckets(named, lambda *each: weight_decay * decays(*each), bucket):
            self.buckets.append(Bucket(row, mesh, rate, partial, shard, gradient_dtype))
        for index, each in enumerate(self.buckets):
            for slot in each.slots:
                slot.parameter.register_post_accumulate_grad_hook(self._collector(index, slot))
        self.begin_step(1)

    def begin_step(self, microbatches: int) -> None:
        """Expect this many backward passes before the next `step`; the last one's gradients are reduced as they come."""
        self._awaited = [len(bucket.slots) * microbatches for bucket in self.buckets]
        self._reduced = 0  # buckets whose reduction has begun
        self._whole = False  # whether the gradients are sums over the whole mesh
        self._reducing: deque[
            tuple[Bucket, collectives.StartedReduce | collectives.StartedAllReduce | None]
        ] = deque()
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.filled = False

    def _collector(self, index: int, slot: Slot) -> Callable[[nn.Parameter], None]:
        def collect(parameter: nn.Parameter) -> None:
            if slot.filled:
                slot.gradient.add_(parameter.grad)
            else:
                slot.gradient.copy_(parameter.grad)
                slot.filled = True
            parameter.grad = None
            self._awaited[index] -= 1
            # In one order on every rank, whatever order backward finishes them in.
            while self._reduced < len(self.buckets) and self._awaited[self._reduced] == 0:
                self._start_reduce()

        return collect

    @torch.no_grad()
    def _start_reduce(self) -> None:
        if len(self._reducing) == IN_FLIGHT:
            self._finish_reduce()
        bucket = self.buckets[self._reduced]
        self._reduced += 1
        for slot in bucket.slots:
            if not slot.filled:
                slot.gradient.zero_()
        started = None
        if bucket.axis.size > 1:
            started = collectives.start_reduce_scatter(bucket.gradients, bucket.axis)
        elif self.mesh.zero.size > 1:
            started = collectives.start_all_reduce(bucket.gradients, self.mesh.zero)
        self._reducing.append((bucket, started))

    def _finish_reduce(self) -> None:
        """The oldest bucket under way: its own shard of `gradients` becomes the sum over the zero axis."""
        bucket, started = self._reducing.popleft()
        if started is not None:
            bucket.own(bucket.gradients).copy_(started.wait())

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over the whole mesh, as far as backward has not done so; `step` begins with this."""
        if self._whole:
            return
        self._whole = True
        while self._reduced < len(self.buckets):  # parameters that took no part in the loss
            self._start_reduce()
        while self._reducing:
            self._finish_reduce()
        # Not while backward goes on: the last stage would wait for the first, which waits for the last's gradients.
        for bucket in self.buckets:
            shard = bucket.own(bucket.gradients)
            for axis in bucket.partial:
                if axis.size > 1:
                    shard.copy_(collectives.all_reduce(shard, axis))

    @torch.no_grad()
    def step(self, learning_rate: float, skip: bool = False) -> StepResult:
        """Reduce what is left, clip, update, gather. A norm that is not finite changes nothing, on any rank, nor does `skip`."""
        self.reduce()
        squares = torch.stack([bucket.gradient_square_norm() for bucket in self.buckets]).sum()
        norm = (
            math.sqrt(value)
            if (value := collectives.all_reduce(squares, self.mesh.world).item()) >= 0
            else math.nan
        )
        if skip or not math.isfinite(norm):
            self.begin_step(1)
            return StepResult(norm, skipped=True)
        scale = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        self.wait_for_copy()
        self.steps += 1
        gathering: deque[dist.Work] = deque()
        for bucket in self.buckets:
            self._update(bucket, learning_rate, scale)
            if len(gathering) == IN_FLIGHT:
                gathering.popleft().wait()
            if bucket.axis.size > 1:
                gathering.append(collectives.start_all_gather_into(bucket.values, bucket.axis))
        for gathered in gathering:
            gathered.wait()
        self.begin_step(1)
        return StepResult(norm, skipped=False)

    def wait_for_copy(self) -> None:
        """Wait until nobody reads the states any more: they are about to change."""
        if self.pending_copy is not None:
            self.pending_copy.result()
            self.pending_copy = None

    def _update(self, bucket: Bucket, learning_rate: float, scale: float) -> None:
        gradient = bucket.own(bucket.gradients).to(torch.float32)
        adamw(
            bucket.master,
            gradient,
            bucket.exp_avg,
            bucket.exp_avg_sq,
            step=self.steps,
            learning_rate=learning_rate,
            betas=self.betas,
            epsilon=self.epsilon,
            weight_decay=bucket.decay,
            scale=scale,
            compiled=self.compiled,
        )
        if bucket.values.dtype != torch.float32:
            bucket.own(bucket.values).copy_(bucket.master)

    @torch.no_grad()
    def parameter_norm(self) -> float:
        """Global norm of the weights, each once."""
        squares = torch.stack([bucket.weight_square_norm() for bucket in self.buckets]).sum()
        return math.sqrt(collectives.all_reduce(squares, self.mesh.world).item())

    def state_boxes(self) -> Iterator[tuple[ShardBox, dict[str, Tensor]]]:
        """The global boxes of this rank's shards with the views of each state ("master", "exp_avg", "exp_avg_sq")."""
        for bucket in self.buckets:
            for piece in bucket.boxes():
                yield piece, {state: piece.of(getattr(bucket, state)) for state in STATES}

    def gradient_boxes(self) -> Iterator[tuple[ShardBox, Tensor]]:
        """The global boxes of this rank's shards with the views of their gradients, between `reduce` and `step`."""
        for bucket in self.buckets:
            for piece in bucket.boxes():
                yield piece, piece.of(bucket.own(bucket.gradients))

    @torch.no_grad()
    def publish(self) -> None:
        """Make the parameters what the master weights say, after those were loaded."""
        for bucket in self.buckets:
            bucket.own(bucket.values).copy_(bucket.master)
            if bucket.axis.size > 1:
                collectives.start_all_gather_into(bucket.values, bucket.axis).wait()


def fill_buckets(
    named: Iterable[tuple[str, nn.Parameter]], decay: Callable[[str, nn.Parameter], float], size: int = BUCKET
) -> list[tuple[float, tuple[str, ...], list[tuple[str, nn.Parameter]]]]:
    """Which parameters share a bucket: (decay, partial axes, named parameters) of each, alike in type, decay and axes.

    Args:
        decay: weight decay of a parameter.
        size: elements a bucket holds at least before the next is begun.
    """
    kinds: dict[tuple, list[list[tuple[str, nn.Parameter]]]] = {}
    # Backward makes the last parameters' gradients first, so buckets fill from the end.
    for name, parameter in reversed(list(named)):
        kind = (parameter.dtype, decay(name, parameter), layout_of(parameter).partial)
        rows = kinds.setdefault(kind, [[]])
        if sum(p.numel() for _, p in rows[-1]) >= size:
            rows.append([])
        rows[-1].append((name, parameter))
    return [(rate, partial, row) for (_, rate, partial), rows in kinds.items() for row in rows]
