"""Exchange of rows between the order of a rank's tokens and that of its experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel import collectives
from parallel.device import Download
from parallel.mesh import Axis


class Exchange:
    """Moves rows between the order of this rank's tokens and that of this rank's experts.

    Args:
        indices: (T, k).
        local: number of experts per rank.
        received: (n, local) number of rows that each rank sends here for each expert, if known.
        splits: (2, n) numbers of rows to and from each rank, on the host, if `received` is known and n > 1.
    """

    def __init__(
        self,
        indices: Tensor,
        local: int,
        axis: Axis,
        received: Tensor | None = None,
        splits: Tensor | None = None,
    ) -> None:
        self.axis, self.k = axis, indices.shape[1]
        flat = indices.flatten()
        self.rows = len(flat)  # m, of this rank's experts
        self.splits = flat.new_empty(0, device="cpu")
        # Sorts instead of scatters, for which deterministic GPUs launch a dozen kernels.
        # GPUs sort narrower numbers in fewer passes.
        by_expert, self.order = flat.to(torch.int16).sort(stable=True)  # (T·k)
        self.positions = self.order.to(torch.int32).argsort().view_as(indices)  # (T, k), of each choice's row
        if received is None:
            edges = torch.arange(local * axis.size + 1, dtype=torch.int16, device=flat.device)
            received = sent = torch.searchsorted(by_expert, edges).diff().view(axis.size, local)
            if axis.size > 1:
                received = collectives.wait(collectives.start_all_to_all(sent.flatten(), axis)).view_as(sent)
                # the only host synchronization of forward and backward
                splits = Download(torch.stack((sent.sum(1), received.sum(1)))).wait()
        self.received = received
        if axis.size > 1 and splits is not None:
            self.splits = splits
            self.send, self.receive = splits.tolist()
            self.rows = sum(self.receive)
            experts = torch.arange(local, dtype=torch.int16, device=flat.device).repeat(axis.size)
            owners = experts.repeat_interleave(received.flatten(), output_size=self.rows)
            self.regroup = torch.argsort(owners, stable=True)  # received rows, by rank, to rows by expert
        self.counts = self.received.sum(0)  # (local) rows of each expert
        self.offsets = self.counts.cumsum(0).to(torch.int32)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """First row of each expert and one past its last, on the host."""
        return pairwise((0, *self.offsets.tolist()))

    def gather(self, x: Tensor) -> Tensor:
        """Repeat a token's row for each of its experts: (T, ...) -> (T·k, ...), sorted by expert."""
        return x.index_select(0, self.order // self.k)

    def to_experts(self, rows: Tensor) -> Tensor:
        """Exchange rows (T·k, ...) sorted by expert -> (m, ...) of this rank's experts, grouped by expert."""
        if self.axis.size == 1:
            return rows
        arrived = collectives.start_uneven_all_to_all(rows, self.send, self.receive, self.axis)
        return collectives.wait(arrived).index_select(0, self.regroup)

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Return rows of this rank's experts (m, ...) to their tokens -> (T, k, ...)."""
        return self._back(rows)[self.positions]

    def sum_over_tokens(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the rows (m, h) of each token, times its weights (T, k) if given -> (T, h), in the rows' dtype."""
        rows = self._back(rows)
        if rows.dtype == torch.float32 and rows.device.type == "cpu":
            weights = None if weights is None else weights.float()
            return F.embedding_bag(self.positions, rows, mode="sum", per_sample_weights=weights)
        if rows.is_cuda:
            from parallel.experts import gpu_sums

            return gpu_sums.sum_rows(rows, self.positions, weights)
        chosen = rows[self.positions]  # (T, k, h)
        return (chosen if weights is None else chosen * weights[..., None]).sum(1).to(rows.dtype)

    def _back(self, rows: Tensor) -> Tensor:
        """Send rows of this rank's experts back to their source ranks, sorted there by expert -> (T·k, ...)."""
        if self.axis.size == 1:
            return rows
        ungrouped = rows.index_select(0, self._ungroup)
        return collectives.wait(
            collectives.start_uneven_all_to_all(ungrouped, self.receive, self.send, self.axis)
        )

    @cached_property
    def _ungroup(self) -> Tensor:
        """Rows by expert to rows by rank."""
        return self.regroup.to(torch.int32).argsort()

    def owners(self) -> Tensor:
        """Each row's expert (m), int32."""
        return self.of_rows(torch.arange(len(self.counts), dtype=torch.int32, device=self.counts.device))

    def of_rows(self, of_experts: Tensor) -> Tensor:
        """Repeat each expert's entry of a tensor (local, ...) for each of its rows -> (m, ...)."""
        return of_experts.repeat_interleave(self.counts, 0, output_size=self.rows)
