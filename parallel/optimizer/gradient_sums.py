"""GradientSums: sums gradients over all ranks, bucket by bucket, while backward is still running.

With d ranks in `dp_shard` (for experts `expert_shard`) and r replicas of each shard, the gradients of a bucket are in turn

    awaited       hooks add those of each parameter to the bucket's memory
    scattering    reduce-scattered over d ranks: at most IN_FLIGHT buckets at once, or any number where that needs no memory
    replicating   this rank's shard is all-reduced over its r replicas, beside the next buckets: at most IN_FLIGHT at once
    summed        in the bucket's `gradient_shard`

If d is 1, a resident bucket is all-reduced over its replicas in place of the reduce-scatter. Both queues are first in, first out,
and buckets enter them in the same order on every rank. Which gradients are summed together:

    resident (ZeRO-1)   those of all microbatches of a step, once the earlier buckets have started
    sharded (FSDP)      those of a microbatch, or with `keep_gathered` of a step; over replicas only after the last microbatch
    in a graph          the graph scatters them; `finish` does the rest
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor

from parallel import collectives
from parallel.optimizer.arithmetic import Arithmetic
from parallel.optimizer.buckets import IN_FLIGHT, Bucket, weak_hook

Pending = collectives.PendingReduceScatter | collectives.PendingAllReduce


@dataclass(frozen=True)
class _Scattering:
    """Gradients of a bucket that are being summed over `dp_shard`."""

    bucket: Bucket
    gradients: Tensor
    pending: Pending | None  # None: a single rank has them
    last: bool  # whether no microbatch of the step follows


class GradientSums:
    """The sums of a step's gradients; see the module docstring.

    Args:
        buckets: all that are updated; gets hooks on their parameters.
        resident: those of them that are resident, in the order in which backward completes them.
        in_place: whether a reduce-scatter of a resident bucket needs no memory.
        keep_gathered: whether gradients of other buckets are summed once per step instead of per microbatch.
        arithmetic: the functions that it computes with.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        resident: Sequence[Bucket],
        *,
        in_place: bool,
        keep_gathered: bool,
        arithmetic: Arithmetic,
    ) -> None:
        self._buckets, self._resident = buckets, resident
        self._in_place, self._keep_gathered, self._arithmetic = in_place, keep_gathered, arithmetic
        for number, bucket in enumerate(buckets):
            for position, slot in enumerate(bucket.slots):
                hook = weak_hook(WeakMethod(self._accumulate), number, position)
                slot.parameter.register_post_accumulate_grad_hook(hook)

    def begin_step(self, microbatches: int) -> None:
        """Expect this many backward passes before `finish`."""
        self._finished = False
        self._awaited = deque(self._resident)
        self._scattering: deque[_Scattering] = deque()
        self._replicating: deque[tuple[Bucket, collectives.PendingAllReduce]] = deque()
        for bucket in self._buckets:
            bucket.begin_step(microbatches)

    @torch.no_grad()
    def finish(self) -> None:
        """Finish all sums after the last backward pass; does nothing if that is done."""
        if self._finished:
            return
        self._finished = True
        while self._awaited:  # some parameters got no gradient
            self._scatter(self._awaited.popleft())
        for bucket in self._buckets:
            if bucket.in_graph:
                bucket.complete_sum()
            elif not bucket.resident and bucket.awaited:
                self._scatter(bucket)
        while self._scattering:
            self._finish_scatter()
        while self._replicating:
            self._finish_replicas()
        # These sums wait until backward has ended: during it, the last stage would wait for the first, which waits for the
        # last stage's gradients.
        for bucket in self._buckets:
            for axis in bucket.late_axes:
                total = collectives.all_reduce(bucket.gradient_shard, axis)
                self._arithmetic.assign(bucket.gradient_shard, total)

    def _accumulate(self, parameter: Tensor, number: int, position: int) -> None:
        """Add the gradient of the parameter at this position of a bucket, and start what is complete."""
        if parameter.grad is None:
            return  # compiled blocks also run the hooks of weights whose gradients are deferred
        bucket = self._buckets[number]
        bucket.accumulate(bucket.slots[position])
        if bucket.resident:
            # In the same order on every rank, in whatever order backward completes the buckets.
            while self._awaited and self._awaited[0].awaited == 0:
                self._scatter(self._awaited.popleft())
            return
        last = bucket.awaited == 0
        if last or (bucket.transient and bucket.microbatch_complete):
            bucket.release()
        if last or (not self._keep_gathered and bucket.microbatch_complete):
            self._scatter(bucket, last)

    @torch.no_grad()
    def _scatter(self, bucket: Bucket, last: bool = True) -> None:
        in_place = bucket.resident and self._in_place
        # A sum over replicas starts when the reduce-scatter is finished.
        limit = len(self._buckets) if in_place and bucket.replicate.size == 1 else IN_FLIGHT
        # All gradients of a compiled block arrive together: its buckets do not wait for each other.
        while self._scattering and (
            len(self._scattering) >= limit
            if bucket.resident
            else self._scattering[0].bucket.unit is not bucket.unit
        ):
            self._finish_scatter()
        pending: Pending | None = None
        gradients = bucket.take_gradients()
        if bucket.axis.size > 1:
            out = bucket.gradient_shard if in_place else None
            pending = collectives.PendingReduceScatter(gradients, bucket.axis, out)
        elif bucket.resident and bucket.replicate.size > 1:
            pending = collectives.PendingAllReduce(gradients, bucket.replicate)
        self._scattering.append(_Scattering(bucket, gradients, pending, last))

    def _finish_scatter(self) -> None:
        """Wait for the oldest bucket's shard, add it to the sum, and start its sum over replicas."""
        entry = self._scattering.popleft()
        bucket = entry.bucket
        if bucket.resident and entry.pending is None:
            return  # the shard is in place
        if entry.pending is None:
            total = entry.gradients
        elif bucket.resident and isinstance(entry.pending, collectives.PendingReduceScatter):
            total = entry.pending.wait(bucket.gradient_shard)
        else:
            total = entry.pending.wait()
        replicated = bucket.replicate.size > 1 and not (bucket.resident and bucket.axis.size == 1)
        # Shards that microbatches add to are summed over replicas once, after the last one.
        if not (bucket.resident and replicated):
            bucket.add_sum(total)
            total = bucket.gradient_shard
        if replicated and entry.last:
            while len(self._replicating) >= IN_FLIGHT:
                self._finish_replicas()
            self._replicating.append((bucket, collectives.PendingAllReduce(total, bucket.replicate)))

    def _finish_replicas(self) -> None:
        """Wait for the sum of the oldest shard over its replicas."""
        bucket, pending = self._replicating.popleft()
        if bucket.resident:
            bucket.add_sum(pending.wait())
        else:
            self._arithmetic.assign(bucket.gradient_shard, pending.wait())
