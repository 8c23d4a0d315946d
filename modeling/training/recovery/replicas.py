"""Replica check: finds weights whose copies differ between ranks in training, and makes them equal."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from modeling.training.metrics import record_event
from modeling.training.trainer import Trainer
from parallel import ShardedAdamW
from parallel.optimizer.replicas import ReplicaCheck, differing_replicas, synchronize_replicas

log = logging.getLogger(__name__)

NAMED = 3  # number of weights that a warning names


class Replicas:
    """The replicated weights of a run. Every method is called on all ranks.

    Args:
        run: the run folder.
    """

    def __init__(self, trainer: Trainer, optimizer: ShardedAdamW, run: Path) -> None:
        self._trainer, self._optimizer, self._run = trainer, optimizer, run
        self._every = trainer.profile.train.check_replicas_every
        self._check = ReplicaCheck(optimizer.buckets, trainer.mesh, optimizer.arithmetic)

    def count_differing(self, step: int) -> Tensor:
        """`ReplicaCheck.count` of the weights before this step if it is due, else 0; the host does not wait."""
        due = self._every and step % self._every == 0
        return self._check.count() if due else self._check.none

    def synchronize(self, step: int) -> None:
        """Overwrite replicas that differ by the first rank's, as a resume would, and log a warning.

        Args:
            step: step at which they were found to differ, or that is about to be saved.
        """
        # Counted first, by compiled programs: naming the weights takes many operators outside of them.
        if not sum(self._trainer.sum_on_host(self._check.count().cpu())):
            return
        buckets, mesh = self._optimizer.buckets, self._trainer.mesh
        found = differing_replicas(buckets, mesh)
        if not found:
            return
        self._optimizer.wait_for_copy()
        synchronize_replicas(buckets, mesh)
        self._optimizer.gather_parameters()
        if self._trainer.leader:
            largest = sorted(found, key=found.__getitem__, reverse=True)
            names = ", ".join(f"{name} by {found[name]:.2g}" for name in largest[:NAMED])
            more = f" ({len(found)} in all)" if len(found) > NAMED else ""
            reason = f"replicas differ between ranks: {names}{more}; overwritten by those of the first rank"
            log.warning(f"step {step}: {reason}")
            record_event(self._run, "replicas differ", step=step, weights=largest, reason=reason)
