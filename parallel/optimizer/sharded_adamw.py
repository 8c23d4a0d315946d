"""AdamW, float32 master weights and moments sharded over data × context: ZeRO-1 (arXiv 1910.02054).

With `units`, matrices and their gradients are sharded too: FSDP (fsdp.py).

One step over the d ranks of `dp_shard`:

    gradients    accumulated over the microbatches in float32, reduce-scattered bucket by bucket during the last backward:
                 n(d-1)/d elements sent; each shard is all-reduced over its replicas (`dp_replicate`) beside the next buckets
    norm         over all ranks, each parameter once; if it is not finite, all ranks skip the step. It stays on the device,
                 as does everything computed from it: the host never waits
    AdamW        on the local shard (arXiv 1711.05101)
    parameters   all-gathered bucket by bucket while the next bucket is updated and the next forward runs, which waits
                 before each part of the model for its weights (`gather_before_use`): n(d-1)/d elements sent

Bytes per parameter in bf16 with float32 gradients: 2 + 4 + 12/d; with bf16 gradients 2 + 2 + 12/d. In float32 4 + 4 + 8/d: the
master weights are the local shard of the parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel import collectives
from parallel.device import upload
from parallel.initialization import initialize
from parallel.layout import layout_of
from parallel.mesh import Mesh
from parallel.optimizer.adamw import AdamW
from parallel.optimizer.arithmetic import EAGER, Arithmetic
from parallel.optimizer.buckets import BUCKET_SIZE, Bucket, ShardBox, Slot
from parallel.optimizer.fsdp import Unit
from parallel.optimizer.grouping import MATRICES, ChooseRule, EverywhereRule, Group, group_parameters
from parallel.optimizer.row_factors import ChooseFactors, RowFactors
from parallel.optimizer.rules import Rule, Step, Updater

# How many buckets are reduced at once, where a reduction needs memory of its own or is followed by a sum over replicas.
IN_FLIGHT = 2
Pending = collectives.PendingReduceScatter | collectives.PendingAllReduce


@dataclass(frozen=True)
class StepResult:
    """Global gradient norm before clipping, and 1 if skipped, else 0; 0-dim float32 on the device."""

    gradient_norm: Tensor
    skipped: Tensor


class ShardedAdamW:
    """AdamW with states sharded over the mesh's `dp_shard` axis (size 1: plain data parallelism).

    Args:
        named_parameters: with layouts (`parallel.parameter`); their memory moves into buckets.
        mesh: its `dp_shard` axis shards the states, `expert_shard` those of experts; over its other axes partial gradients and
            the norm are summed.
        betas, epsilon: of AdamW; `step` takes the learning rate.
        rule: of each parameter whose layout gives none; None: AdamW.
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
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        rule: ChooseRule | None = None,
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
        self.arithmetic, self._seed = arithmetic, seed
        self.mesh, self.clip = mesh, clip
        rule = rule or EverywhereRule(AdamW(betas, epsilon))
        self.pending_copy: Future[None] | None = None  # of the states, for a checkpoint
        self.buckets: list[Bucket] = []
        self.gradient_dtype, self.keep_gathered = gradient_dtype, keep_gathered
        named_parameters = list(named_parameters)
        order = {name: position for position, (name, _) in enumerate(named_parameters)}  # that of forward
        groups = group_parameters(named_parameters, units, weight_decay, bucket_size, rule)
        self.frozen_buckets: list[Bucket] = []  # of units
        self.frozen = groups.frozen
        for unit, members in groups.sharded:
            if groups.shards_frozen:
                unit.buckets = [self._frozen_bucket(group) for group in members]
                self.frozen_buckets += unit.buckets
                continue
            unit.buckets = [self._add_bucket(group, resident=False) for group in members]
            for bucket in unit.buckets:
                bucket.unit = unit
                bucket.transient = unit.block and not keep_gathered
        if seed is not None:
            initialize(self.frozen, mesh.tensor, seed)

        def position(bucket: Bucket) -> int:
            return min(order[slot.name] for slot in bucket.slots)

        # Backward completes first what forward uses last. A bucket with all norms, for instance, is complete at the end.
        self._resident = [self._add_bucket(group) for group in groups.resident]
        self._resident.sort(key=position, reverse=True)
        # Those whose weights the next forward needs first are updated and gathered first.
        self._updated = sorted(self.buckets, key=position)
        self._to_gather: deque[Bucket] = deque()
        self._gathering: deque[Bucket] = deque()
        self._gathers_ahead = False  # whether `step` returns before the parameters are gathered
        device = named_parameters[0][1].device
        self.steps = torch.zeros((), device=device)  # updates applied, float32; bias correction counts them
        by_rule: dict[Rule, list[Bucket]] = {}
        for bucket in self._updated:
            by_rule.setdefault(bucket.rule, []).append(bucket)
        self._row_factors = RowFactors(self.buckets, row_factors) if row_factors else None
        self._updaters: dict[Rule, Updater] = {
            each: each.updater(buckets, mesh, arithmetic) for each, buckets in by_rule.items()
        }
        self.begin_step(1)

    def _frozen_bucket(self, group: Group) -> Bucket:
        return Bucket(
            group.members,
            self.mesh,
            0.0,
            group.partial_axes,
            self.gradient_dtype,
            resident=False,
            frozen=True,
            arithmetic=self.arithmetic,
            seed=self._seed,
        )

    def _add_bucket(self, group: Group, resident: bool = True) -> Bucket:
        bucket = Bucket(
            group.members,
            self.mesh,
            group.weight_decay,
            group.partial_axes,
            self.gradient_dtype,
            resident,
            arithmetic=self.arithmetic,
            seed=self._seed,
            rule=group.rule,
            rate=group.rate,
        )
        self.buckets.append(bucket)
        for slot in bucket.slots:
            slot.parameter.register_post_accumulate_grad_hook(self._accumulation_hook(bucket, slot))
        return bucket

    def begin_step(self, microbatches: int) -> None:
        """Expect this many backward passes before `step`; the last starts the reduction of complete buckets."""
        self._reduced = 0  # resident buckets whose reduction was started
        self._summed = False  # whether `reduce` has run
        # Gradients that are being summed over `dp_shard`, and whether no microbatch of the step follows.
        self._reducing: deque[tuple[Bucket, Tensor, Pending | None, bool]] = deque()
        # Shards of gradients that are being summed over their replicas.
        self._replicating: deque[tuple[Bucket, collectives.PendingAllReduce]] = deque()
        for bucket in self.buckets:
            bucket.begin_step(microbatches)

    def _accumulation_hook(self, bucket: Bucket, slot: Slot) -> Callable[[nn.Parameter], None]:
        def accumulate(parameter: nn.Parameter) -> None:
            if parameter.grad is None:
                return  # compiled blocks also run the hooks of weights whose gradients are deferred
            bucket.accumulate(slot)
            if bucket.resident:
                # In the same order on every rank, in whatever order backward completes the buckets.
                while self._reduced < len(self._resident) and self._resident[self._reduced].awaited == 0:
                    self._start_next()
                return
            if bucket.awaited == 0 or (bucket.transient and bucket.microbatch_complete):
                bucket.release()
            if bucket.awaited == 0 or (not self.keep_gathered and bucket.microbatch_complete):
                self._start_reduce(bucket, complete=bucket.awaited == 0)

        return accumulate

    def _start_next(self) -> None:
        self._reduced += 1
        self._start_reduce(self._resident[self._reduced - 1])

    @torch.no_grad()
    def _start_reduce(self, bucket: Bucket, complete: bool = True) -> None:
        in_place = bucket.resident and self.mesh.reduces_in_place
        # A sum over replicas starts when the reduction is finished.
        limit = len(self.buckets) if in_place and bucket.replicate.size == 1 else IN_FLIGHT
        # All gradients of a compiled block arrive together: its buckets do not wait for each other.
        while self._reducing and (
            len(self._reducing) >= limit if bucket.resident else self._reducing[0][0].unit is not bucket.unit
        ):
            self._finish_reduce()
        started: Pending | None = None
        gradients = bucket.take_gradients()
        if bucket.axis.size > 1:
            out = bucket.gradient_shard if in_place else None
            started = collectives.PendingReduceScatter(gradients, bucket.axis, out)
        elif bucket.resident and bucket.replicate.size > 1:
            started = collectives.PendingAllReduce(gradients, bucket.replicate)
        self._reducing.append((bucket, gradients, started, complete))

    def _finish_reduce(self) -> None:
        """Await the oldest bucket's sum over `dp_shard`, add it to its shard, start the sum over replicas."""
        bucket, gradients, started, complete = self._reducing.popleft()
        if bucket.resident and started is None:
            return  # the shard is in place
        total = gradients if started is None else started.wait()
        replicated = bucket.replicate.size > 1 and not (bucket.resident and bucket.axis.size == 1)
        # Shards that microbatches add to are summed over replicas once, after the last one.
        if not (bucket.resident and replicated):
            bucket.add_sum(total)
            total = bucket.gradient_shard
        if replicated and complete:
            while len(self._replicating) >= IN_FLIGHT:
                self._finish_replicas()
            self._replicating.append((bucket, collectives.PendingAllReduce(total, bucket.replicate)))

    def _finish_replicas(self) -> None:
        """Wait for the sum of the oldest shard over its replicas."""
        bucket, pending = self._replicating.popleft()
        if bucket.resident:
            bucket.add_sum(pending.wait())
        else:
            self.arithmetic.assign(bucket.gradient_shard, pending.wait())

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
        while self._replicating:
            self._finish_replicas()
        # These sums wait until backward has ended: during it, the last stage would wait for the first, which waits for the
        # last stage's gradients.
        for bucket in self.buckets:
            replicas = (bucket.replicate,) if bucket.in_graph else ()
            for axis in (*replicas, *bucket.partial):
                if axis.size > 1:
                    total = collectives.all_reduce(bucket.gradient_shard, axis)
                    self.arithmetic.assign(bucket.gradient_shard, total)

    @torch.no_grad()
    def step(
        self, learning_rate: float, skip: Tensor | None = None, row_factors: Tensor | None = None
    ) -> StepResult:
        """Reduce, clip, update and all-gather. No rank changes anything if the gradient norm is not finite.

        Args:
            skip: 0-dim on the device; unless it is 0, no rank changes anything either.
            row_factors: by which rows are multiplied after their update, flat float32 on the device, equal on all ranks.

        Raises:
            ValueError: rows have factors, but none are given, or the reverse.
        """
        if (row_factors is None) != (self._row_factors is None):
            raise ValueError("step: row_factors are given exactly if the optimizer was made with row_factors")
        self.reduce()
        clipped = [bucket for bucket in self.buckets if bucket.rule.clipped]
        self._wait_for(self._resident)
        square = self._square_norm([(bucket, bucket.gradient_shard) for bucket in clipped])
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
        factors = None if row_factors is None else row_factors.where(skipped == 0, 1.0)
        for bucket in self._updated:
            self._publish(self._updaters[bucket.rule].update(bucket, step), factors)
        for updater in self._updaters.values():
            self._publish(updater.finish(), factors)
        for bucket in self.frozen_buckets:
            bucket.release()
        if not self._gathers_ahead:
            self._wait_for(self._resident)
        self.begin_step(1)
        return StepResult(norm, skipped)

    def _publish(self, updated: Iterable[Bucket], factors: Tensor | None) -> None:
        """Multiply rows of updated buckets, and start to gather their parameters, or let their next use do so."""
        for bucket in updated:
            if self._row_factors is not None and factors is not None:
                self._row_factors.apply(bucket, factors)
            if bucket.resident:
                self._to_gather.append(bucket)
                self._start_gathers()
            else:
                bucket.release()  # values that an evaluation gathered are stale

    def gather_before_use(self, units: Sequence[Unit]) -> None:
        """Let `step` return before resident parameters are gathered; hooks wait before a unit's forward pass.

        Raises:
            ValueError: a resident parameter is in none of the units.
        """
        covered = tuple(prefix for unit in units for prefix in unit.prefixes)
        for slot in (slot for bucket in self._resident for slot in bucket.slots):
            if not slot.name.startswith(covered):
                raise ValueError(f"gather_before_use: no unit contains the parameter {slot.name}")
        for unit in units:
            needed = [b for b in self._resident if any(s.name.startswith(unit.prefixes) for s in b.slots)]
            for user in unit.users:
                user.register_forward_pre_hook(lambda *_, needed=needed: self._wait_for(needed))
        self._gathers_ahead = True

    def _start_gathers(self) -> None:
        # In place, unless the backend needs a copy for each rank.
        limit = len(self.buckets) if self.mesh.dp_shard.supports_reduction else IN_FLIGHT
        while self._to_gather and len(self._gathering) < limit:
            self._gathering.append(self._to_gather.popleft())
            self._gathering[-1].start_gather()

    @torch.no_grad()
    def _wait_for(self, buckets: Sequence[Bucket]) -> None:
        """Wait until these buckets' parameters are gathered, and start to gather the next ones."""
        while any(bucket in self._gathering or bucket in self._to_gather for bucket in buckets):
            self._gathering.popleft().wait()
            self._start_gathers()

    @torch.no_grad()
    def rehearse(self, microbatches: int) -> None:
        """Run a step's computations without collectives, on arbitrary values, so that all are compiled."""
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
            if not (bucket.shares_master or bucket.in_graph):
                self.arithmetic.assign(bucket.local_shard(bucket.values), bucket.master)
        for bucket in self.frozen_buckets:
            if not bucket.in_graph:
                self.arithmetic.assign(bucket.local_shard(bucket.values), bucket.master)
        clipped = [bucket for bucket in self.buckets if bucket.rule.clipped]
        weights = [bucket.norm_weights for bucket in clipped]
        square = self.arithmetic.square_norm([bucket.gradient_shard for bucket in clipped], weights)
        weights = [bucket.norm_weights for bucket in self.buckets]
        self.arithmetic.root(self.arithmetic.square_norm([b.master for b in self.buckets], weights))
        _, skipped, divisor = self.arithmetic.clip(
            square, torch.zeros_like(square, dtype=torch.bool), self.steps, self.clip
        )
        rates = dict.fromkeys({bucket.rate for bucket in self.buckets}, torch.zeros_like(square))
        step = Step(self.steps, divisor, skipped, rates)
        for bucket in self.buckets:
            self._updaters[bucket.rule].rehearse(bucket, step)

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
        weights = [bucket.norm_weights for bucket, _ in shards]
        local = self.arithmetic.square_norm([shard for _, shard in shards], weights)
        return collectives.all_reduce(local, self.mesh.world)

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
        self._wait_for(self._resident)
        for bucket in self.buckets:
            if bucket.resident:
                bucket.start_gather()
                bucket.wait()
            else:
                bucket.release()
        for bucket in self.frozen_buckets:
            bucket.release()
