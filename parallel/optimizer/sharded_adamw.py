"""AdamW, float32 master weights and moments sharded over data × context: ZeRO-1 (arXiv 1910.02054).

With `units`, matrices and their gradients are sharded too: FSDP (fsdp.py).

One step over the d ranks of `dp_shard`:

    gradients    accumulated over the microbatches in float32, reduce-scattered bucket by bucket during the last backward:
                 n(d-1)/d elements sent; each shard is all-reduced over its replicas (`dp_replicate`) beside the next buckets
                 (gradient_sums.py)
    norm         over all ranks, each parameter once; if it is not finite, all ranks skip the step. It stays on the device,
                 as does everything computed from it: the host never waits
    AdamW        on the local shard (arXiv 1711.05101)
    parameters   all-gathered bucket by bucket while the next bucket is updated and the next forward runs, which waits
                 before each part of the model for its weights (gathers.py): n(d-1)/d elements sent

Bytes per parameter in bf16 with float32 gradients: 2 + 4 + 12/d; with bf16 gradients 2 + 2 + 12/d. In float32 4 + 4 + 8/d: the
master weights are the local shard of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from parallel import collectives
from parallel.device import upload
from parallel.initialization import initialize
from parallel.layout import layout_of
from parallel.mesh import Mesh
from parallel.optimizer.arithmetic import EAGER, Arithmetic
from parallel.optimizer.buckets import BUCKET_SIZE, Bucket, ShardBox
from parallel.optimizer.fsdp import Unit
from parallel.optimizer.gathers import ParameterGathers
from parallel.optimizer.gradient_sums import GradientSums
from parallel.optimizer.grouping import ADAMW, MATRICES, ChooseRule, group_parameters
from parallel.optimizer.rules import Rule, Step, Updater


@dataclass(frozen=True)
class StepResult:
    """Global gradient norm before clipping, and 1 if skipped, else 0; 0-dim float32 on the device."""

    gradient_norm: Tensor
    skipped: Tensor


ChooseFactors = Callable[[str], Tensor | None]
"""Which of a step's factors each row of a global tensor is multiplied by, (rows) on the host; None: the first, which is 1."""


class RowFactors:
    """Multiplies rows of weights after their update, wherever shards cut them.

    Which factor multiplies each of a shard's blocks (`Bucket.block`) is data, so that programs are the same on every rank. All
    blocks of a bucket that has such rows are read and written; most factors are 1. Copies of a row are multiplied by the same
    factor on every rank, if all ranks have the same factors.
    """

    def __init__(self, buckets: Iterable[Bucket], choose: ChooseFactors, arithmetic: Arithmetic) -> None:
        self._scale = arithmetic.prepare(scale_blocks)
        chosen = {id(bucket): _chosen(bucket, choose) for bucket in buckets}
        self._indices = {key: indices for key, indices in chosen.items() if indices is not None}

    def apply(self, bucket: Bucket, factors: Tensor, skip: Tensor) -> None:
        """Multiply the master weights of an updated bucket, unless `skip` is 1; a factor of 1 changes no bit."""
        if (indices := self._indices.get(id(bucket))) is not None:
            self._scale(bucket.master, factors, indices, skip)
            bucket.assigned = False  # the parameters, which the update may have set


def _chosen(bucket: Bucket, choose: ChooseFactors) -> Tensor | None:
    """The factor of each block, (blocks) int32; None if no rank's shard has rows with factors."""
    # Decided by the parameters, not by this rank's shard of them: graphs do not depend on the rank.
    names = {box.name for box in bucket.parameter_boxes()}
    rows = {name: found for name in names if (found := choose(name)) is not None}
    if not rows:
        return None
    block = bucket.block
    indices = torch.zeros(bucket.length // block, dtype=torch.int32)
    for box in bucket.boxes():
        if box.name in rows:
            own = rows[box.name][box.offsets[0] :][: box.sizes[0]]
            blocks = math.prod(box.sizes[1:]) // block  # of each row
            indices[box.start // block :][: len(own) * blocks] = own.int().repeat_interleave(blocks)
    return indices.to(bucket.master.device)


def scale_blocks(weights: Tensor, factors: Tensor, indices: Tensor, skip: Tensor) -> None:
    """Multiply each block of flat weights by the factor with its index, unless `skip` is 1."""
    each = factors.where(skip == 0, 1.0)[indices]
    weights.view(len(indices), -1).mul_(each[:, None])


class ShardedAdamW:
    """AdamW with states sharded over the mesh's `dp_shard` axis (size 1: plain data parallelism).

    Keep it as long as the model trains: the parameters' hooks, which sum gradients, refer to it weakly.

    Args:
        named_parameters: with layouts (`parallel.parameter`); their memory moves into buckets.
        mesh: its `dp_shard` axis shards the states, `expert_shard` those of experts; over its other axes partial gradients and
            the norm are summed.
        rule: of each parameter whose layout gives none; `step` takes the learning rate.
        row_factors: of rows that `step` multiplies after their update; None: there are none.
        weight_decay: of each parameter.
        clip: maximum global gradient norm; None disables clipping.
        gradient_dtype: dtype in which gradients are accumulated and reduced.
        bucket_size: minimum number of elements in a bucket before the next one starts.
        units: parts of the model whose matrices are sharded too (fsdp.py); `gather_on_use` gathers them in time. If some
            parameters are frozen (LoRA), only frozen matrices are sharded.
        keep_gathered: whether to reduce the units' gradients, and release their weights, once per step instead of per microbatch.
        arithmetic: the functions that it computes with.
        seed: of deferred parameters (`layout.deferred_parameters`), which are initialized one bucket after the other, so that the
            full model never exists in memory; None: parameters have values.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        mesh: Mesh,
        *,
        rule: ChooseRule = ADAMW,
        row_factors: ChooseFactors | None = None,
        weight_decay: Callable[[nn.Parameter], float] = MATRICES,
        clip: float | None = 1.0,
        gradient_dtype: torch.dtype = torch.float32,
        bucket_size: int = BUCKET_SIZE,
        units: Sequence[Unit] = (),
        keep_gathered: bool = False,
        arithmetic: Arithmetic = EAGER,
        seed: int | None = None,
    ) -> None:
        self.arithmetic, self.mesh, self.clip = arithmetic, mesh, clip
        self.pending_copy: Future[None] | None = None  # of the states, for a checkpoint
        self.gradient_dtype, self.keep_gathered = gradient_dtype, keep_gathered
        named_parameters = list(named_parameters)
        order = {name: position for position, (name, _) in enumerate(named_parameters)}  # that of forward
        groups = group_parameters(named_parameters, units, weight_decay, bucket_size, rule)
        self.frozen = groups.frozen
        make = partial(Bucket, mesh=mesh, gradient_dtype=gradient_dtype, arithmetic=arithmetic, seed=seed)
        sharded: list[Bucket] = []
        for unit, members in groups.sharded:
            unit.buckets = [make(group, resident=False, frozen=groups.shards_frozen) for group in members]
            sharded += unit.buckets
            for bucket in unit.buckets if not groups.shards_frozen else ():
                bucket.unit = unit
                bucket.transient = unit.block and not keep_gathered
        if seed is not None:
            initialize(self.frozen, mesh.tensor, seed)

        def position(bucket: Bucket) -> int:
            return min(order[slot.name] for slot in bucket.slots)

        # Backward completes first what forward uses last. A bucket with all norms, for instance, is complete at the end.
        resident = [make(group) for group in groups.resident]
        self.buckets = [*(() if groups.shards_frozen else sharded), *resident]
        self.frozen_buckets = sharded if groups.shards_frozen else []
        resident.sort(key=position, reverse=True)
        self._sums = GradientSums(
            self.buckets,
            resident,
            in_place=mesh.reduces_in_place,
            keep_gathered=keep_gathered,
            arithmetic=arithmetic,
        )
        self._gathers = ParameterGathers(resident, in_place=mesh.dp_shard.supports_reduction)
        # Those whose weights the next forward needs first are updated and gathered first.
        self._updated = sorted(self.buckets, key=position)
        device = named_parameters[0][1].device
        self.steps = torch.zeros((), device=device)  # updates applied, float32; bias correction counts them
        by_rule: dict[Rule, list[Bucket]] = {}
        for bucket in self._updated:
            by_rule.setdefault(bucket.rule, []).append(bucket)
        self._row_factors = RowFactors(self.buckets, row_factors, arithmetic) if row_factors else None
        self._updaters: dict[Rule, Updater] = {
            each: each.updater(buckets, mesh, arithmetic) for each, buckets in by_rule.items()
        }
        self.begin_step(1)

    def begin_step(self, microbatches: int) -> None:
        """Expect this many backward passes before `step`; the last starts the sums of complete buckets."""
        self._sums.begin_step(microbatches)

    def reduce(self) -> None:
        """Finish the sum of the gradients over all ranks; `step` calls it first."""
        self._sums.finish()

    @torch.no_grad()
    def step(
        self, learning_rate: float, skip: Tensor | None = None, row_factors: Tensor | None = None
    ) -> StepResult:
        """Reduce, clip, update and all-gather. No rank changes anything if the gradient norm is not finite.

        Args:
            skip: 0-dim on the device; unless it is 0, no rank changes anything either.
            row_factors: by which rows are multiplied after their update, flat float32 on the device, equal on all ranks; the
                first is 1.

        Raises:
            ValueError: rows have factors, but none are given, or the reverse.
        """
        if (row_factors is None) != (self._row_factors is None):
            raise ValueError("step: row_factors are given exactly if the optimizer was made with row_factors")
        self.reduce()
        self._gathers.wait()
        square = self._square_norm(self._clipped_gradients())
        self.wait_for_copy()
        norm, skipped, divisor = self.arithmetic.clip(square, skip, self.steps, self.clip)
        rates: dict[float, float | Tensor] = {
            factor: learning_rate * factor for factor in {bucket.rate for bucket in self.buckets}
        }
        if self.arithmetic.compiled:
            rates = {
                factor: upload(torch.tensor(rate, dtype=torch.float32), norm.device)
                for factor, rate in rates.items()
            }
        step = Step(self.steps, divisor, skipped, rates)
        for bucket in self._updated:
            self._publish(self._updaters[bucket.rule].update(bucket, step), row_factors, skipped)
        for updater in self._updaters.values():
            self._publish(updater.finish(), row_factors, skipped)
        for bucket in self.frozen_buckets:
            bucket.release()
        if not self._gathers.ahead:
            self._gathers.wait()
        self.begin_step(1)
        return StepResult(norm, skipped)

    def _publish(self, updated: Iterable[Bucket], factors: Tensor | None, skipped: Tensor) -> None:
        """Multiply rows of updated buckets, and start to gather their parameters, or let their next use do so."""
        for bucket in updated:
            if self._row_factors is not None and factors is not None:
                self._row_factors.apply(bucket, factors, skipped)
            if bucket.resident:
                self._gathers.start(bucket)
            else:
                bucket.release()  # values that an evaluation gathered are stale

    def gather_before_use(self, units: Sequence[Unit]) -> None:
        """Let `step` return before resident parameters are gathered; hooks wait before a unit's forward pass.

        Raises:
            ValueError: a resident parameter is in none of the units.
        """
        self._gathers.wait_before_use(units)

    def wait_for_parameters(self) -> None:
        """Wait until the resident parameters that `step` updated are gathered, as their uses do."""
        self._gathers.wait()

    @torch.no_grad()
    def rehearse(self, microbatches: int, row_factors: Tensor | None = None) -> None:
        """Run a step's computations without collectives, on arbitrary values, so that all are compiled.

        Args:
            row_factors: see `step`.
        """
        self.begin_step(microbatches)
        passes = min(microbatches, 2)  # the first gradient is assigned, the others are added
        for bucket in self.buckets:
            reductions = 1 if bucket.resident or (self.keep_gathered and not bucket.in_graph) else passes
            for slot in bucket.slots if not bucket.in_graph else ():
                for _ in range(passes):
                    slot.parameter.grad = torch.zeros_like(slot.parameter)
                    bucket.accumulate(slot)
            for _ in range(reductions):
                wide = torch.float32 if bucket.in_graph else bucket.gradient_dtype
                bucket.add_sum(torch.zeros_like(bucket.gradient_shard, dtype=wide))
            if bucket.late_axes:
                self.arithmetic.assign(bucket.gradient_shard, torch.zeros_like(bucket.gradient_shard))
            if not (bucket.shares_master or bucket.in_graph):
                self.arithmetic.assign(bucket.local_shard(bucket.values), bucket.master)
        for bucket in self.frozen_buckets:
            if not bucket.in_graph:
                self.arithmetic.assign(bucket.local_shard(bucket.values), bucket.master)
        square = self._local_square_norm(self._clipped_gradients())
        self.arithmetic.root(self._local_square_norm([(bucket, bucket.master) for bucket in self.buckets]))
        _, skipped, divisor = self.arithmetic.clip(
            square, torch.zeros_like(square, dtype=torch.bool), self.steps, self.clip
        )
        rates = dict.fromkeys({bucket.rate for bucket in self.buckets}, torch.zeros_like(square))
        step = Step(self.steps, divisor, skipped, rates)
        for bucket in self.buckets:
            self._updaters[bucket.rule].rehearse(bucket, step)
            if self._row_factors is not None and row_factors is not None:
                self._row_factors.apply(bucket, row_factors, skipped)

    def wait_for_copy(self) -> None:
        """Wait until an asynchronous checkpoint has copied the states, which are about to change."""
        if self.pending_copy is not None:
            self.pending_copy.result()
            self.pending_copy = None

    @torch.no_grad()
    def parameter_norm(self) -> Tensor:
        """Global norm of the weights, each counted once; 0-dim float32 on the device."""
        return self.arithmetic.root(self._square_norm([(bucket, bucket.master) for bucket in self.buckets]))

    def _square_norm(self, shards: Sequence[tuple[Bucket, Tensor]]) -> Tensor:
        """Squared norm over all ranks of this rank's shard of each bucket; NaN if any element is NaN."""
        return collectives.all_reduce(self._local_square_norm(shards), self.mesh.world)

    def _local_square_norm(self, shards: Sequence[tuple[Bucket, Tensor]]) -> Tensor:
        weights = [bucket.norm_weights for bucket, _ in shards]
        return self.arithmetic.square_norm([shard for _, shard in shards], weights)

    def _clipped_gradients(self) -> list[tuple[Bucket, Tensor]]:
        """The shards of gradients that the gradient norm includes."""
        return [(bucket, bucket.gradient_shard) for bucket in self.buckets if bucket.rule.clipped]

    def state_boxes(self) -> Iterator[tuple[ShardBox, dict[str, Tensor]]]:
        """The boxes of global tensors in this rank's shards, each with its view of every state."""
        for bucket in self.buckets:
            for box in bucket.boxes():
                yield box, {state: box.view(shard) for state, shard in bucket.states.items()}

    def frozen_boxes(self) -> Iterator[tuple[ShardBox, dict[str, Tensor]]]:
        """Boxes of global tensors in this rank's frozen weights, like `state_boxes`; no checkpoint saves them."""
        for bucket in self.frozen_buckets:
            for box in bucket.boxes():
                yield box, {"master": box.view(bucket.master)}
        for name, parameter in self.frozen:
            for part in layout_of(parameter).boxes(name, self.mesh.tensor.rank):
                where = ShardBox(part.name, part.shape, part.offsets, part.sizes, 0, part.replicas, False)
                yield where, {"master": part.view(parameter.detach())}

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Set the parameters from the master weights, after these were loaded."""
        self._gathers.wait()
        for bucket in self.buckets:
            if bucket.resident:
                bucket.start_gather()
                bucket.wait()
            else:
                bucket.release()
        for bucket in self.frozen_buckets:
            bucket.release()
