"""Exchange of rows between the order of a rank's tokens and that of its experts.

How many rows two ranks exchange depends on the data, and an all-to-all needs the numbers on the host. The host must wait for them
once, but the device must not wait for the host: `sort_by_expert` starts the copy, and `send` waits for it, when the caller has
queued work that does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel import collectives
from parallel.device import Download
from parallel.experts.pending import Pending
from parallel.mesh import Axis

_copies: Pending[Download] = Pending()  # of `Routes.splits`


class Routes(NamedTuple):
    """Which rows go where, with T tokens and k experts for each, E/n of this rank's."""

    order: Tensor  # (T·k) int32, the choice of each row, in order of experts
    positions: Tensor  # (T, k) int32, the row of each choice
    received: Tensor  # (n, E/n) rows that each rank sends here for each expert
    splits: Tensor  # (2, n) rows to and from each rank, on the host; complete after the first `Exchange.send`


def sort_by_expert(indices: Tensor, local: int, axis: Axis, splits: Tensor | None = None) -> Routes:
    """Sort the choices (T, k) by expert, and exchange their numbers.

    Args:
        local: experts per rank.
        splits: of `Routes`, if the host knows them; None: it waits for them in `Exchange.send`.
    """
    flat = indices.flatten()
    # Sorts instead of scatters, for which deterministic GPUs launch a dozen kernels.
    # GPUs sort narrower numbers in fewer passes.
    by_expert, order = flat.to(torch.int16).sort(stable=True)  # (T·k)
    order = order.to(torch.int32)
    edges = torch.arange(local * axis.size + 1, dtype=torch.int16, device=flat.device)
    sent = torch.searchsorted(by_expert, edges).diff().view(axis.size, local)
    arriving = collectives.start_all_to_all(sent.flatten(), axis) if axis.size > 1 else sent
    positions = order.argsort().to(torch.int32).view_as(indices)  # beside the exchange
    if axis.size == 1:
        return Routes(order, positions, sent, flat.new_empty(0, device="cpu"))
    received = collectives.wait(arriving).view_as(sent)
    if splits is not None:
        return Routes(order, positions, received, splits)
    copy = Download(torch.stack((sent.sum(1), received.sum(1))))
    return Routes(order, positions, received, _copies.put(copy.host, copy))


class Exchange:
    """Moves rows between the order of this rank's tokens and that of this rank's experts."""

    def __init__(self, routes: Routes, axis: Axis) -> None:
        self.axis, self.routes = axis, routes
        self.order, self.positions = routes.order, routes.positions

    @cached_property
    def splits(self) -> tuple[list[int], list[int]]:
        """Rows to and from each rank; the host waits for them, once in a forward and its backward pass."""
        copy = _copies.take(self.routes.splits)
        send, receive = (self.routes.splits if copy is None else copy.wait()).tolist()
        return send, receive

    @cached_property
    def counts(self) -> Tensor:
        """Rows of each expert (E/n)."""
        return self.routes.received.sum(0)

    @cached_property
    def offsets(self) -> Tensor:
        """One past each expert's last row (E/n), int32."""
        return self.counts.cumsum(0).to(torch.int32)

    @cached_property
    def rows(self) -> int:
        """m, of this rank's experts."""
        return len(self.order) if self.axis.size == 1 else sum(self.splits[1])

    def ranges(self) -> Iterator[tuple[int, int]]:
        """First row of each expert and one past its last, on the host."""
        return pairwise((0, *self.offsets.tolist()))

    def gather(self, x: Tensor) -> Tensor:
        """Repeat a token's row for each of its experts: (T, ...) -> (T·k, ...), sorted by expert."""
        return x.index_select(0, self.order // self.positions.shape[1])

    def send(self, rows: Tensor) -> Tensor:
        """Start to exchange rows (T·k, ...) sorted by expert, for `receive`, `gather` queued before."""
        if self.axis.size == 1:
            return rows
        return collectives.start_uneven_all_to_all(rows, *self.splits, self.axis)

    def receive(self, sent: Tensor) -> Tensor:
        """Rows (m, ...) of this rank's experts, grouped by expert, that `send` started to exchange."""
        if self.axis.size == 1:
            return sent
        regroup = self._regroup  # is computed beside the exchange
        return collectives.wait(sent).index_select(0, regroup)

    def send_back(self, rows: Tensor) -> Tensor:
        """Start to return rows (m, ...) of this rank's experts to their source ranks, for `receive_back`."""
        if self.axis.size == 1:
            return rows
        send, receive = self.splits
        ungrouped = rows.index_select(0, self._ungroup)
        return collectives.start_uneven_all_to_all(ungrouped, receive, send, self.axis)

    def receive_back(self, sent: Tensor) -> Tensor:
        """Rows (T·k, ...) of this rank's tokens, sorted by expert, that `send_back` started to return."""
        return sent if self.axis.size == 1 else collectives.wait(sent)

    def sum_over_tokens(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the rows (T·k, h) of each token, times weights (T, k) if given -> (T, h), in the rows' dtype."""
        if rows.dtype == torch.float32 and rows.device.type == "cpu":
            weights = None if weights is None else weights.float()
            return F.embedding_bag(self.positions, rows, mode="sum", per_sample_weights=weights)
        if rows.is_cuda:
            from parallel.experts import gpu_kernels

            return gpu_kernels.sum_rows(rows, self.positions, weights)
        chosen = rows[self.positions]  # (T, k, h)
        return (chosen if weights is None else chosen * weights[..., None]).sum(1).to(rows.dtype)

    @cached_property
    def _regroup(self) -> Tensor:
        """Received rows, by rank, to rows by expert."""
        received = self.routes.received
        experts = torch.arange(received.shape[1], dtype=torch.int16, device=received.device)
        owners = experts.repeat(self.axis.size).repeat_interleave(received.flatten(), output_size=self.rows)
        return torch.argsort(owners, stable=True)

    @cached_property
    def _ungroup(self) -> Tensor:
        """Rows by expert to rows by rank."""
        return self._regroup.to(torch.int32).argsort()

    def owners(self) -> Tensor:
        """Each row's expert (m), int32."""
        return self.of_rows(torch.arange(len(self.counts), dtype=torch.int32, device=self.counts.device))

    def of_rows(self, of_experts: Tensor) -> Tensor:
        """Repeat each expert's entry of a tensor (E/n, ...) for each of its rows -> (m, ...)."""
        return of_experts.repeat_interleave(self.counts, 0, output_size=self.rows)
