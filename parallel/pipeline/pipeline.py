"""Pipeline parallelism: each rank holds some stages of the model, and microbatches flow through all of them by a schedule.

Built on torch.distributed.pipelining, whose schedules order the forward and backward passes of m microbatches (schedules.py
says what each costs). Between neighbouring stages go hidden states forward and their gradients back, (tokens, h) a microbatch and
rank: 2·tokens·h elements a boundary. The first stage is given the tokens and the last one the targets; nothing is broadcast.

Gradients reach parameters by autograd's own accumulation, once a microbatch under every schedule, so that hooks on parameters
(ZeRO-1's) see what they see without a pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _RecvInfo

from parallel.mesh import Mesh
from parallel.pipeline.schedules import check_microbatches, one_forward_one_backward

SENDING = 2  # messages of a stage that may be under way


class Pipeline:
    """This rank's stages and their schedule.

    Args:
        stages: this rank's stages by number; each maps its input, tokens or hidden states, to hidden states.
        count: number of stages on all ranks.
        mesh: its pipeline axis; stage i lies on rank i mod P.
        schedule: one of `schedules.SCHEDULES`.
        ahead: forwards that ranks before the last run ahead with 1f1b (`forwards_ahead`).
        microbatches: m, of every step.
        tokens: shape of a microbatch's tokens, the first stage's input.
        hidden: shape of its hidden states between stages.
        dtype, device: of the hidden states.
        loss: (last hidden states, targets, scale=...) -> 0-dim sum over a microbatch; called on the last stage only.
        constants: keyword arguments that every stage is called with for every microbatch.

    Raises:
        ValueError: a number of microbatches that the schedule does not take.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        count: int,
        mesh: Mesh,
        *,
        schedule: str,
        ahead: int = 0,
        microbatches: int,
        tokens: tuple[int, ...],
        hidden: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        loss: Callable[[Tensor, Tensor, float], Tensor],
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        check_microbatches(schedule, mesh.pipeline.size, microbatches)
        self.device = device
        self.first, self.last = 0 in stages, count - 1 in stages
        # Shapes that are told need not be found out, by a whole microbatch forward and backward before the first step.
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        states = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
        self._stages = [
            _Stage(
                _WithConstants(module, dict(constants or {})),
                number,
                count,
                device,
                input_args=states if number else ids,
                output_args=states,
                group=mesh.pipeline.group,
            )
            for number, module in sorted(stages.items())
        ]
        options = {"n_microbatches": microbatches, "loss_fn": loss, "scale_grads": False}
        if schedule == "1f1b":
            self.schedule = _OneForwardOneBackward(self._stages, ahead, **options)
        elif schedule == "interleaved":
            self.schedule = ScheduleInterleaved1F1B(self._stages, **options)
        else:
            self.schedule = ScheduleInterleavedZeroBubble(self._stages, **options)

    def train(self, tokens: Tensor | None, targets: Tensor | None, scale: float, **each: Tensor) -> Tensor:
        """Forward and backward of all microbatches of a step; gradients of `scale` times the summed loss.

        Args:
            tokens: (m·b, ...), read on the first stage only.
            targets: (m·b, ...), read on the last stage only.
            each: keyword arguments for this rank's stages, cut into microbatches like the tokens.

        Returns:
            scale · summed loss, 0-dim float32; 0 on ranks without the last stage.
        """
        return self._run(self.schedule.step, tokens, targets, scale, each)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor | None, targets: Tensor | None, **each: Tensor) -> Tensor:
        """The summed loss of all microbatches, forward only; arguments and result as for `train`."""
        return self._run(self.schedule.eval, tokens, targets, 1.0, each)

    def _run(
        self,
        run: Callable[..., Any],
        tokens: Tensor | None,
        targets: Tensor | None,
        scale: float,
        each: Mapping[str, Tensor],
    ) -> Tensor:
        losses: list[Tensor] = []
        run(
            *((tokens,) if self.first else ()),
            target=targets if self.last else None,
            losses=losses,
            return_outputs=False,
            loss_kwargs={"scale": scale},
            **each,
        )
        for stage in self._stages:
            stage.finish_sending()
        if not self.last:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum(0)


class _OneForwardOneBackward(_PipelineScheduleRuntime):
    """1F1B in the form of torch's other schedules, so that messages travel while ranks compute, and with forwards ahead."""

    def __init__(self, stages: list[PipelineStage], ahead: int, **options: Any) -> None:
        super().__init__(stages, **options)
        kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
        ranks = self.pp_group_size
        self.pipeline_order = {
            rank: [
                _Action(rank, kinds[kind], i)
                for kind, i in one_forward_one_backward(ranks, rank, self._n_microbatches, ahead)
            ]
            for rank in range(ranks)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


class _WithConstants(nn.Module):
    """A stage's module, called with further arguments that are not cut into microbatches."""

    def __init__(self, module: nn.Module, constants: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.constants = module, constants

    def forward(self, x: Tensor, **each: Tensor) -> Tensor:
        return self.module(x, **self.constants, **each)


class _Stage(PipelineStage):
    """torch's stage, with two differences.

    It holds what it receives and sends only while that is needed: torch holds it for all m microbatches of a step, and
    memory for what is received for good. And weight gradients of a split backward reach the hooks on parameters, which torch's
    split goes past.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sending: deque[dist.Work] = deque()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Send at once, and leave nothing to the schedule, which would hold on to all that it sends until the step ends.

        To wait for an earlier message cannot block for good: its receive comes before this send in the order of the schedule.
        """
        self.finish_sending(SENDING - 1)
        self._sending.extend(dist.isend(op.tensor, group=op.group, group_dst=op.group_peer) for op in ops)
        return []

    def finish_sending(self, but: int = 0) -> None:
        """Wait until no more than so many messages are under way."""
        while len(self._sending) > but:
            self._sending.popleft().wait()

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        one = self._release(self.args_recv_info[0])
        self.args_recv_info = {i: tuple(map(copy, one)) for i in range(num_microbatches)}

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[_RecvInfo, ...]:
        return self._release(super()._create_grad_recv_info(act_send_info))

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...]) -> list[dist.P2POp]:
        for info in recv_infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        self._release(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        self._release(self.grad_recv_info[bwd_chunk_id])
        return received

    @staticmethod
    def _release(recv_infos: tuple[_RecvInfo, ...]) -> tuple[_RecvInfo, ...]:
        for info in recv_infos:
            info.buffer = None
        return recv_infos

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, *arguments: Any, **named: Any
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, *arguments, **named)
        if loss is not None:
            loss.detach_()  # the schedule keeps it to the end of the step, and with its graph what the stage received

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        parameters = list(self.submod.parameters())
        summed = [parameter.grad for parameter in parameters]
        # The first stage has no input to make a gradient of: there torch runs its whole backward, hooks and all.
        split = self.has_backward and not self.is_first
        if split:
            self.submod.zero_grad()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if split:
            gradients = [parameter.grad for parameter in parameters]
            for parameter, gradient in zip(parameters, summed, strict=True):
                parameter.grad = gradient
            torch.autograd.backward(parameters, gradients)
