"""Update rules: how the weights of a bucket follow from their gradients and states.

A rule is a value, its hyperparameters; parameters with equal rules may share a bucket. It names the states that it needs besides
the master weights: the bucket allocates them, and checkpoints, rollbacks and repairs of replicas treat them by name. An optimizer
makes one updater of each rule that it uses.

    AdamW       adamw.py    matrices and vectors, elementwise
    SignStep    here        the selection bias of a router
    Muon        muon.py     matrices, each as a whole

Another rule takes a file with both classes, and its choice for some parameters (`grouping.ChooseRule`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from parallel.layout import Layout
    from parallel.mesh import Mesh
    from parallel.optimizer.arithmetic import Arithmetic
    from parallel.optimizer.buckets import Bucket


@dataclass(frozen=True)
class Step:
    """What a step of the optimizer uses for all buckets; tensors are 0-dim float32 on the device."""

    number: Tensor  # of this update, counted from 1
    divisor: Tensor  # of the gradients, for clipping
    skip: Tensor  # 1 to change nothing, else 0
    rates: Mapping[float, float | Tensor]  # learning rate by multiplier; tensors where updates are compiled


class Updater(Protocol):
    """Updates the buckets of one rule."""

    def update(self, bucket: Bucket, step: Step) -> Iterable[Bucket]:
        """Start a bucket's update. Returns the buckets whose updates have ended, in the order of their starts."""

    def finish(self) -> Iterable[Bucket]:
        """End the updates in progress. Returns their buckets."""

    def rehearse(self, bucket: Bucket, step: Step) -> None:
        """Run a bucket's computations without collectives, so that all are compiled."""


class Rule(Protocol):
    """An update rule with its hyperparameters, except learning rate and weight decay; hashable."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of its float32 states; each has an element for each weight."""

    @property
    def clipped(self) -> bool:
        """Whether the gradient norm includes its gradients, which clipping divides."""

    @property
    def traffic(self) -> int:
        """Bytes of memory per weight that an update reads and writes, besides the gradient."""

    @property
    def exchanged(self) -> int:
        """Bytes per weight that the ranks of a matrix send each other in an update; 0: elementwise."""

    def multiply_adds(self, layout: Layout) -> int:
        """Those of matrix products in an update of a parameter's global tensors."""

    def rate(self, layout: Layout) -> float:
        """Learning-rate multiplier of a parameter."""

    def updater(self, buckets: Sequence[Bucket], mesh: Mesh, arithmetic: Arithmetic) -> Updater:
        """An updater of these buckets, all that have this rule."""


class ElementwiseRule:
    """What all rules have in common that update each weight by itself."""

    exchanged = 0

    def multiply_adds(self, layout: Layout) -> int:
        return 0

    def rate(self, layout: Layout) -> float:
        return layout.rate


@dataclass(frozen=True)
class SignStep(ElementwiseRule):
    """Move weights by `size` against the sign of their gradient, whatever the learning rate is."""

    size: float
    states: tuple[str, ...] = ()
    clipped: bool = False
    traffic: int = 8

    def updater(self, buckets: Sequence[Bucket], mesh: Mesh, arithmetic: Arithmetic) -> Updater:
        return _SignStepUpdater(self, arithmetic)


class _SignStepUpdater:
    def __init__(self, rule: SignStep, arithmetic: Arithmetic) -> None:
        self._rule, self._arithmetic = rule, arithmetic

    def update(self, bucket: Bucket, step: Step) -> Iterable[Bucket]:
        self.rehearse(bucket, step)
        return (bucket,)

    def finish(self) -> Iterable[Bucket]:
        return ()

    def rehearse(self, bucket: Bucket, step: Step) -> None:
        self._arithmetic.sign_step(bucket.master, bucket.gradient_shard, step.skip, self._rule.size)
