"""ParameterGathers: all-gathers updated parameters of ZeRO-1, beside updates and the next forward.

Those of FSDP are gathered where they are used (fsdp.py). The parameters of a resident bucket are in turn

    updated      on each rank only its shard
    queued       until fewer than IN_FLIGHT buckets are being gathered; never, where a gather needs no copy for each rank
    gathering    on the process group's own stream
    gathered     once something has waited for them: a use (`wait_before_use`) or `wait_for`

Gathers begin and end in the order of the updates, which is the same on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from parallel.optimizer.buckets import IN_FLIGHT, Bucket
from parallel.optimizer.fsdp import Unit


class ParameterGathers:
    """The gathers in progress; see the module docstring.

    Args:
        resident: all resident buckets.
        in_place: whether a gather needs no copy for each rank, so that any number may be in progress.

    Attributes:
        ahead: whether every use waits for what it needs, so that a step need not.
    """

    def __init__(self, resident: Sequence[Bucket], *, in_place: bool) -> None:
        self._resident, self._limit = resident, len(resident) if in_place else IN_FLIGHT
        self._queued: deque[Bucket] = deque()
        self._gathering: deque[Bucket] = deque()
        self.ahead = False

    def start(self, bucket: Bucket) -> None:
        """Gather the parameters of a bucket that was updated, after those before it."""
        self._queued.append(bucket)
        self._fill()

    def wait_before_use(self, units: Sequence[Unit]) -> None:
        """Register hooks that wait for a unit's parameters before its forward pass.

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
                user.register_forward_pre_hook(lambda *_, needed=needed: self.wait_for(needed))
        self.ahead = True

    @torch.no_grad()
    def wait_for(self, buckets: Sequence[Bucket]) -> None:
        """Wait until these buckets' parameters are gathered, and start to gather the next ones."""
        while any(bucket in self._gathering or bucket in self._queued for bucket in buckets):
            self._gathering.popleft().wait()
            self._fill()

    def wait(self) -> None:
        """Wait until all parameters are gathered."""
        self.wait_for(self._resident)

    def _fill(self) -> None:
        while self._queued and len(self._gathering) < self._limit:
            self._gathering.append(self._queued.popleft())
            self._gathering[-1].start_gather()
