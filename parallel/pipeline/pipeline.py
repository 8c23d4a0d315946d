"""Pipeline parallelism: each rank holds some stages; a schedule runs microbatches through all.

Built on torch.distributed.pipelining, whose schedules order the forward and backward passes of m microbatches (`schedules.py`
has the cost of each). Neighbouring stages exchange hidden states in forward and their gradients in backward, (tokens, h) per
microbatch and rank: 2·tokens·h elements per boundary. Only the first stage gets the tokens and only the last one the targets;
nothing is broadcast.

Under every schedule autograd accumulates each parameter's gradient once per microbatch, so hooks on parameters (ZeRO-1's) work
as they do without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from parallel.mesh import Mesh
from parallel.pipeline.runtime import LowMemoryStage, OneForwardOneBackward, WithConstants
from parallel.pipeline.schedules import check_microbatches


class Pipeline:
    """This rank's stages and their schedule.

    Args:
        stages: this rank's stages by number; each maps its input, tokens or hidden states, to hidden states.
        count: number of stages on all ranks.
        mesh: with the pipeline axis of P ranks; stage i is on rank i mod P.
        schedule: one of `schedules.SCHEDULES`.
        extra_forwards: forwards that 1f1b adds to the warmup of all ranks but the last (`choose_extra_forwards`).
        microbatches: m, the same in every step.
        tokens: shape of a microbatch's tokens, the first stage's input.
        hidden: shape of its hidden states between stages.
        dtype, device: of the hidden states.
        loss: (last hidden states, targets) -> 0-dim sum over a microbatch; called on the last stage only.
        add: adds two losses; a compiled program on devices that run compiled programs only.
        constants: keyword arguments of every stage, the same for every microbatch.

    Raises:
        ValueError: the schedule does not support this number of microbatches.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        count: int,
        mesh: Mesh,
        *,
        schedule: str,
        extra_forwards: int = 0,
        microbatches: int,
        tokens: tuple[int, ...],
        hidden: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        loss: Callable[[Tensor, Tensor], Tensor],
        add: Callable[[Tensor, Tensor], Tensor] = torch.add,
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        check_microbatches(schedule, mesh.pipeline.size, microbatches)
        self.add, self.nothing = add, torch.zeros((), device=device)
        self.first, self.last = 0 in stages, count - 1 in stages
        # Given the shapes, torch need not infer them by running a microbatch before the first step.
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        states = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
        self._stages = [
            LowMemoryStage(
                WithConstants(module, dict(constants or {})),
                number,
                count,
                device,
                input_args=states if number else ids,
                output_args=states,
                lanes=mesh.pipeline_lanes,
            )
            for number, module in sorted(stages.items())
        ]
        options: dict[str, Any] = {"n_microbatches": microbatches, "loss_fn": loss, "scale_grads": False}
        self.schedule: OneForwardOneBackward | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble
        if schedule == "1f1b":
            self.schedule = OneForwardOneBackward([*self._stages], extra_forwards, **options)
        elif schedule == "interleaved":
            self.schedule = ScheduleInterleaved1F1B([*self._stages], **options)
        else:
            self.schedule = ScheduleInterleavedZeroBubble([*self._stages], **options)

    def train(self, tokens: Tensor | None, targets: Tensor | None, scale: Tensor, **inputs: Tensor) -> Tensor:
        """Forward and backward of a step's microbatches; accumulates gradients of `scale` · summed loss.

        Args:
            tokens: (m·b, ...), used on the first stage only.
            targets: (m·b, ...), used on the last stage only.
            scale: 0-dim, on the device.
            inputs: further keyword arguments of this rank's stages, split into microbatches like the tokens.

        Returns:
            summed loss, 0-dim; 0 on ranks without the last stage.
        """
        for stage in self._stages:
            stage.loss_gradient = scale
        losses = self._run(self.schedule.step, tokens, targets, inputs)
        return reduce(self.add, losses) if losses else self.nothing

    @torch.no_grad()
    def evaluate(self, tokens: Tensor | None, targets: Tensor | None, **inputs: Tensor) -> Tensor:
        """The summed loss of all microbatches, forward only; arguments and result as for `train`."""
        losses = self._run(self.schedule.eval, tokens, targets, inputs)
        return reduce(self.add, losses) if losses else self.nothing

    def _run(
        self,
        run: Callable[..., Any],
        tokens: Tensor | None,
        targets: Tensor | None,
        inputs: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Run the schedule. Returns the losses of the microbatches; empty without the last stage."""
        losses: list[Tensor] = []
        run(
            *((tokens,) if self.first else ()),
            target=targets if self.last else None,
            losses=losses,
            return_outputs=False,
            **inputs,
        )
        for stage in self._stages:
            stage.wait_for_sends()
        return [loss.detach() for loss in losses] if self.last else []
