"""AdamW (arXiv 1711.05101) on flat float32 tensors: a kernel or a compilable function.

With g the gradient divided by `divisor`, m and v the moments, at update t:

    m = β1 m + (1-β1) g;   v = β2 v + (1-β2) g²;   w = (1 - ηλ) w - η/(1-β1^t) · m / (√v / √(1-β2^t) + ε)

All values that depend on the step are on the device, so that the host never waits: the update's number, the divisor, and whether
to skip. One kernel, or one compiled graph, updates a full shard; graphs depend on its length only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel.device import has_adamw_kernel
from parallel.optimizer.rules import ElementwiseRule
from parallel.torch_internals import fused_adamw

if TYPE_CHECKING:
    from parallel.mesh import Mesh
    from parallel.optimizer.arithmetic import Arithmetic
    from parallel.optimizer.buckets import Bucket
    from parallel.optimizer.rules import Step, Updater

Scalars = tuple[Tensor, Tensor, Tensor, Tensor]
Update = Callable[[Tensor, Tensor, Tensor, Tensor, Scalars, Tensor], None]


@dataclass(frozen=True)
class AdamW(ElementwiseRule):
    """The rule AdamW with its hyperparameters, except the learning rate and weight decay, which vary."""

    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    clipped: bool = True
    traffic: int = 24  # weights and moments, read and written

    def constants(self, weight_decay: float, device: torch.device) -> Tensor:
        """The constants of `update`: 1-β1, β2, 1-β2, log β1, log β2, ε, λ; (7) float32."""
        beta1, beta2 = self.betas
        logs = (math.log(beta) if beta else -math.inf for beta in self.betas)
        return torch.tensor([1 - beta1, beta2, 1 - beta2, *logs, self.epsilon, weight_decay], device=device)

    def updater(self, buckets: Sequence[Bucket], mesh: Mesh, arithmetic: Arithmetic) -> Updater:
        """An updater of these buckets."""
        return _Updater(self, buckets, arithmetic)


class _Updater:
    def __init__(self, rule: AdamW, buckets: Sequence[Bucket], arithmetic: Arithmetic) -> None:
        self._rule, self._compiled = rule, arithmetic.update
        decays = {bucket.weight_decay: bucket.master.device for bucket in buckets}
        self._constants = {decay: rule.constants(decay, device) for decay, device in decays.items()}

    def update(self, bucket: Bucket, step: Step) -> Iterable[Bucket]:
        shared = bucket.shares_master or not bucket.resident
        bucket.assigned = adamw(
            bucket.master,
            bucket.gradient_shard,
            bucket.states["exp_avg"],
            bucket.states["exp_avg_sq"],
            settings=self._rule,
            weight_decay=bucket.weight_decay,
            constants=self._constants[bucket.weight_decay],
            step=step.number,
            learning_rate=step.rates[bucket.rate],
            divisor=step.divisor,
            skip=step.skip,
            compiled=self._compiled,
            values=None if shared else bucket.local_shard(bucket.values),
        )
        return (bucket,)

    def finish(self) -> Iterable[Bucket]:
        return ()

    def rehearse(self, bucket: Bucket, step: Step) -> None:
        self.update(bucket, step)


def adamw(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    settings: AdamW,
    weight_decay: float,
    constants: Tensor,
    step: Tensor,
    learning_rate: float | Tensor,
    divisor: Tensor,
    skip: Tensor,
    compiled: Update | None = None,
    values: Tensor | None = None,
) -> bool:
    """One in-place AdamW step on flat float32 tensors of equal length; the gradient may have any dtype.

    Args:
        constants: `settings.constants(weight_decay, ...)`.
        step: number of this update, counted from 1; 0-dim float32 on the device, as are the divisor and `skip`.
        learning_rate: a number, or 0-dim float32 on the device, which a compiled update needs.
        divisor: of the gradient, for clipping.
        skip: 1 to change nothing, else 0.
        compiled: compiled `update`; None uses a kernel, or `update` if the device has none.
        values: the weights in the parameters' dtype, which the kernel for GPUs also writes.

    Returns:
        whether it wrote `values`.
    """
    if compiled is None and weights.is_cuda:
        from parallel.optimizer import gpu_kernels

        scalars = step, float(learning_rate), divisor, skip
        gpu_kernels.update(weights, gradient, exp_avg, exp_avg_sq, *scalars, constants, values)
        return values is not None
    if compiled is None and has_adamw_kernel(weights.device.type):
        fused_adamw(
            [weights], [gradient.float()], [exp_avg], [exp_avg_sq], [], [step],
            lr=learning_rate, beta1=settings.betas[0], beta2=settings.betas[1], weight_decay=weight_decay,
            eps=settings.epsilon, amsgrad=False, maximize=False, grad_scale=divisor, found_inf=skip,
        )  # fmt: skip
        return False
    rate = learning_rate if isinstance(learning_rate, Tensor) else torch.full_like(step, learning_rate)
    (compiled or update)(weights, gradient, exp_avg, exp_avg_sq, (step, rate, divisor, skip), constants)
    return False


def update(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Scalars,
    constants: Tensor,
) -> None:
    """The AdamW formula, in place; scalars: t, η, divisor, skip; constants (7): see `AdamW.constants`."""
    step, rate, divisor, skip = scalars
    new1, old2, new2, log1, log2, epsilon, decay = constants.unbind()
    skip = skip > 0
    gradient = gradient.float() / divisor
    average = exp_avg + (gradient - exp_avg) * new1
    average_sq = exp_avg_sq * old2 + gradient * gradient * new2
    correction1, correction2 = -torch.expm1(step * log1), -torch.expm1(step * log2)
    root = (average_sq / correction2).sqrt() + epsilon
    updated = weights * (1 - rate * decay) - average / root * (rate / correction1)
    for old, new in ((weights, updated), (exp_avg, average), (exp_avg_sq, average_sq)):
        old.copy_(old.where(skip, new))
