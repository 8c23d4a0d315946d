"""ZeRO-1 (arXiv 1910.02054, stage 1): AdamW whose float32 master weights and moments are sharded over data × context.

One step over the d ranks of `dp_shard`:

    gradients    accumulated over the microbatches in float32, reduce-scattered bucket by bucket during the last backward:
                 n(d-1)/d elements sent; then each shard is all-reduced over its replicas (`dp_replicate`)
    norm         over all ranks, each parameter once; if it is not finite, all ranks skip the step. It stays on the device,
                 as does what follows from it: the host waits for nothing
    AdamW        on the local shard (arXiv 1711.05101)
    parameters   all-gathered bucket by bucket while the next bucket is updated: n(d-1)/d elements sent

Bytes per parameter in bf16 with float32 gradients: 2 + 4 + 12/d; with bf16 gradients 2 + 2 + 12/d. In float32 4 + 4 + 8/d: the
master weights are the local shard of the parameters.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel import collectives
from parallel.layout import layout_of
from parallel.mesh import Mesh
from parallel.optimizer.adamw import AdamW, Update, adamw
from parallel.optimizer.buckets import Bucket, ShardBox, Slot
from parallel.optimizer.fsdp import Unit

IN_FLIGHT = 2  # buckets in collectives at a time, each of which needs memory of the bucket's size again
BUCKET_SIZE = 10_000_000  # elements
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepResult:
    """The global gradient norm before clipping, and 1 if the update was skipped, else 0; 0-dim float32 on the device."""

    gradient_norm: Tensor
    skipped: Tensor


def decays_matrices(name: str, parameter: nn.Parameter) -> bool:
    """Default weight decay filter: matrices, not biases and norms."""
    return parameter.dim() > 1


class ZeRO1:
    """AdamW over a model's parameters, with states sharded over the mesh's `dp_shard` axis; of one rank: plain data parallelism.

    Args:
        named_parameters: with layouts (`parallel.parameter`); their memory moves into buckets.
        mesh: its `dp_shard` axis shards the states, `expert_shard` those of experts; over its other axes partial gradients and
            the norm are summed.
        betas, epsilon, weight_decay: of AdamW; `step` takes the learning rate.
        decays: which parameters get weight decay.
        clip: maximum global gradient norm; None disables clipping.
        gradient_dtype: in which gradients are accumulated and reduced.
        bucket_size: minimum number of elements in a bucket before the next one starts.
        units: parts of the model whose matrices are sharded too (fsdp.py); with `gather_on_use` they are gathered in time.
            If some parameters are frozen (LoRA), only these are.
        keep_gathered: whether to reduce their gradients, and release their weights, once a step instead of each microbatch.
        compiled: compiled `adamw.update`, for devices without torch's fused kernel.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        mesh: Mesh,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        weight_decay: float = 0.1,
        decays: Callable[[str, nn.Parameter], bool] = decays_matrices,
        clip: float | None = 1.0,
        gradient_dtype: torch.dtype = torch.float32,
        bucket_size: int = BUCKET_SIZE,
        units: Sequence[Unit] = (),
        keep_gathered: bool = False,
        compiled: Update | None = None,
    ) -> None:
        self.compiled = compiled
        self.mesh, self.clip, self.settings = mesh, clip, AdamW(betas, epsilon)
        self.pending_copy: Future[None] | None = None  # of the states, for a checkpoint
        self.buckets: list[Bucket] = []
        self.gradient_dtype, self.keep_gathered = gradient_dtype, keep_gathered

        def decay(name: str, parameter: nn.Parameter) -> float:
            return weight_decay * decays(name, parameter)

        remaining, self.frozen = [], []
        for name, parameter in named_parameters:
            (remaining if parameter.requires_grad else self.frozen).append((name, parameter))
        self.frozen_buckets = self._shard_frozen(units)
        for unit in () if self.frozen_buckets else units:
            held = [named for named in remaining if unit.holds(*named)]
            remaining = [named for named in remaining if not unit.holds(*named)]
            groups = fill_buckets(held, decay, sys.maxsize)
            unit.buckets = [self._add_bucket(*group, resident=False) for group in groups]
            for bucket in unit.buckets:
                bucket.transient = unit.block and not keep_gathered
        self._resident = [self._add_bucket(*group) for group in fill_buckets(remaining, decay, bucket_size)]
        device = self.buckets[0].values.device
        self.steps = torch.zeros((), device=device)  # updates applied, float32; bias correction counts them
        decays_used = {bucket.weight_decay for bucket in self.buckets}
        self._constants = {decay: self.settings.constants(decay, device) for decay in decays_used}
        self.begin_step(1)

    def _shard_frozen(self, units: Sequence[Unit]) -> list[Bucket]:
        """Shard the units' frozen matrices; those of no unit remain in `frozen`."""
        found = []
        for unit in units:
            held = [named for named in self.frozen if unit.holds(*named)]
            self.frozen = [named for named in self.frozen if not unit.holds(*named)]
            for _, partial, members in fill_buckets(held, lambda name, parameter: 0.0, sys.maxsize):
                options = {"resident": False, "frozen": True}
                unit.buckets.append(Bucket(members, self.mesh, 0.0, partial, self.gradient_dtype, **options))
            found += unit.buckets
        return found

    def _add_bucket(
        self,
        weight_decay: float,
        partial: tuple[str, ...],
        members: list[tuple[str, nn.Parameter]],
        resident: bool = True,
    ) -> Bucket:
        bucket = Bucket(members, self.mesh, weight_decay, partial, self.gradient_dtype, resident)
        self.buckets.append(bucket)
        for slot in bucket.slots:
            slot.parameter.register_post_accumulate_grad_hook(self._accumulation_hook(bucket, slot))
        return bucket

    def begin_step(self, microbatches: int) -> None:
        """Expect this many backward passes before `step`; the last one starts the reduction of each complete bucket."""
        self._reduced = 0  # resident buckets whose reduction was started
        self._summed = False  # whether `reduce` has run
        self._reducing: deque[
            tuple[Bucket, Tensor, collectives.PendingReduceScatter | collectives.PendingAllReduce | None]
        ] = deque()
        for bucket in self.buckets:
            bucket.begin_step(microbatches)

    def _accumulation_hook(self, bucket: Bucket, slot: Slot) -> Callable[[nn.Parameter], None]:
        def accumulate(parameter: nn.Parameter) -> None:
            bucket.accumulate(slot)
            if bucket.resident:
                # In the same order on every rank, in whatever order backward completes the buckets.
                while self._reduced < len(self._resident) and self._resident[self._reduced].awaited == 0:
                    self._start_next()
                return
            if bucket.awaited == 0 or (bucket.transient and bucket.microbatch_complete):
                bucket.release()
            if bucket.awaited == 0 or (not self.keep_gathered and bucket.microbatch_complete):
                self._start_reduce(bucket)

        return accumulate

    def _start_next(self) -> None:
        self._reduced += 1
        self._start_reduce(self._resident[self._reduced - 1])

    @torch.no_grad()
    def _start_reduce(self, bucket: Bucket) -> None:
        while len(self._reducing) >= (IN_FLIGHT if bucket.resident else 1):
            self._finish_reduce()
        started, gradients = None, bucket.take_gradients()
        if bucket.axis.size > 1:
            started = collectives.PendingReduceScatter(gradients, bucket.axis)
        elif bucket.resident and bucket.replicate.size > 1:
            started = collectives.PendingAllReduce(gradients, bucket.replicate)
        self._reducing.append((bucket, gradients, started))

    def _finish_reduce(self) -> None:
        """Wait for the oldest bucket, and add the sum over `dp_shard` to its shard of the gradients."""
        bucket, gradients, started = self._reducing.popleft()
        if bucket.resident and started is None:
            return  # the shard is in place
        total = gradients if started is None else started.wait()
        if bucket.resident and bucket.axis.size > 1:
            total = collectives.all_reduce(total, bucket.replicate)
        bucket.add_sum(total)

    @torch.no_grad()
    def reduce(self) -> None:
        """Finish the sum of the gradients over all ranks; `step` calls it first."""
        if self._summed:
            return
        self._summed = True
        while self._reduced < len(self._resident):  # some parameters got no gradient
            self._start_next()
        for bucket in self.buckets:
            if bucket.in_graph:
                bucket.complete_sum()
            elif not bucket.resident and bucket.awaited:
                self._start_reduce(bucket)
        while self._reducing:
            self._finish_reduce()
        # Not during backward: the last stage would wait for the first, which waits for the last stage's gradients.
        for bucket in self.buckets:
            replicas = () if bucket.resident else (bucket.replicate,)
            for axis in (*replicas, *bucket.partial):
                if axis.size > 1:
                    bucket.gradient_shard.copy_(collectives.all_reduce(bucket.gradient_shard, axis))

    @torch.no_grad()
    def step(self, learning_rate: float, skip: Tensor | None = None) -> StepResult:
        """Reduce, clip, update and all-gather. No rank changes anything if the gradient norm is not finite.

        Args:
            skip: 0-dim on the device; unless it is 0, no rank changes anything either.
        """
        self.reduce()
        adamw_buckets = [bucket for bucket in self.buckets if bucket.sign_step is None]
        norm = self._global_norm((bucket, bucket.gradient_shard) for bucket in adamw_buckets)
        skipped = norm.isfinite().logical_not()
        skipped = (skipped if skip is None else skipped | skip.bool()).float()
        divisor = None if self.clip is None else ((norm + 1e-6) / self.clip).clamp(min=1)
        self.wait_for_copy()
        self.steps.add_(1 - skipped)
        gathering: deque[Bucket] = deque()
        for bucket in self.buckets:
            self._update(bucket, learning_rate, divisor, skipped)
            if not bucket.resident:
                bucket.release()  # what it holds, if an evaluation gathered it, is stale
                continue
            if len(gathering) == IN_FLIGHT:
                gathering.popleft().wait()
            bucket.start_gather()
            gathering.append(bucket)
        for bucket in gathering:
            bucket.wait()
        for bucket in self.frozen_buckets:
            bucket.release()
        self.begin_step(1)
        return StepResult(norm, skipped)

    def wait_for_copy(self) -> None:
        """Wait until an asynchronous checkpoint has copied the states, which are about to change."""
        if self.pending_copy is not None:
            self.pending_copy.result()
            self.pending_copy = None

    def _update(self, bucket: Bucket, learning_rate: float, divisor: Tensor | None, skip: Tensor) -> None:
        gradient = bucket.gradient_shard.to(torch.float32)
        if bucket.sign_step is not None:
            bucket.master.sub_(gradient.sign() * (1 - skip), alpha=bucket.sign_step)
            return
        adamw(
            bucket.master,
            gradient,
            bucket.exp_avg,
            bucket.exp_avg_sq,
            settings=self.settings,
            weight_decay=bucket.weight_decay,
            constants=self._constants[bucket.weight_decay],
            step=self.steps,
            learning_rate=learning_rate,
            divisor=divisor,
            skip=skip,
            compiled=self.compiled,
        )

    @torch.no_grad()
    def parameter_norm(self) -> Tensor:
        """Global norm of the weights, each counted once; 0-dim float32 on the device."""
        return self._global_norm((bucket, bucket.master) for bucket in self.buckets)

    def _global_norm(self, shards: Iterable[tuple[Bucket, Tensor]]) -> Tensor:
        """Norm over all ranks of this rank's shard of each bucket; NaN if any element is NaN."""
        terms = [bucket.square_norm(shard) for bucket, shard in shards]
        return collectives.all_reduce(torch.stack(terms).sum(), self.mesh.world).sqrt()

    def state_boxes(self) -> Iterator[tuple[ShardBox, dict[str, Tensor]]]:
        """The boxes of global tensors in this rank's shards, each with its view of every state in STATES."""
        for bucket in self.buckets:
            for box in bucket.boxes():
                yield box, {state: box.view(getattr(bucket, state)) for state in STATES}

    def frozen_boxes(self) -> Iterator[tuple[ShardBox, dict[str, Tensor]]]:
        """The boxes of global tensors in this rank's frozen weights, as for `state_boxes`; no checkpoint saves them."""
        for bucket in self.frozen_buckets:
            for box in bucket.boxes():
                yield box, {"master": box.view(bucket.master)}
        for name, parameter in self.frozen:
            for box in layout_of(parameter).boxes(name, self.mesh.tensor.rank):
                where = ShardBox(box.name, box.shape, box.offsets, box.sizes, 0, box.replicas, False)
                yield where, {"master": box.view(parameter.detach())}

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Set the parameters from the master weights, once those were loaded."""
        for bucket in self.buckets:
            if bucket.resident:
                bucket.start_gather()
                bucket.wait()
            else:
                bucket.release()
        for bucket in self.frozen_buckets:
            bucket.release()


def fill_buckets(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: Callable[[str, nn.Parameter], float],
    size: int = BUCKET_SIZE,
) -> list[tuple[float, tuple[str, ...], list[tuple[str, nn.Parameter]]]]:
    """Group parameters of equal dtype, weight decay, partial axes and update rule, of experts or of the rest, into buckets.

    Args:
        weight_decay: of a parameter.
        size: minimum number of elements in a bucket before the next one starts.

    Returns:
        (weight decay, partial axes, named parameters) of each bucket.
    """
    kinds: dict[tuple, list[list[tuple[str, nn.Parameter]]]] = {}
    # Backward computes the last parameters' gradients first, so buckets are filled from the end.
    for name, parameter in reversed(list(named_parameters)):
        layout = layout_of(parameter)
        decay, rule = weight_decay(name, parameter), (layout.expert_ranks, layout.sign_step)
        kind = (parameter.dtype, decay, layout.partial_axes, rule)
        buckets = kinds.setdefault(kind, [[]])
        if sum(p.numel() for _, p in buckets[-1]) >= size:
            buckets.append([])
        buckets[-1].append((name, parameter))
    return [
        (decay, partial, bucket) for (_, decay, partial, _), buckets in kinds.items() for bucket in buckets
    ]
