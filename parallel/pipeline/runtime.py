"""Subclasses of torch.distributed.pipelining: less memory, working parameter hooks, extra warmup."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from parallel.layers.deferred import DeferredGradients
from parallel.pipeline.schedules import lane, one_forward_one_backward
from parallel.torch_internals import Action, ComputationType, PipelineScheduleRuntime, RecvInfo

SENDS_IN_FLIGHT = 2  # of one stage


class OneForwardOneBackward(PipelineScheduleRuntime):
    """1F1B with extra warmup forwards as a torch runtime schedule, which overlaps send/recv with compute."""

    def __init__(self, stages: list[PipelineStage], extra_forwards: int, **options: Any) -> None:
        super().__init__(stages, **options)
        computations = {"F": ComputationType.FORWARD, "B": ComputationType.FULL_BACKWARD}
        ranks = self.pp_group_size
        self.pipeline_order = {
            rank: [
                Action(rank, computations[kind], i)
                for kind, i in one_forward_one_backward(ranks, rank, self._n_microbatches, extra_forwards)
            ]
            for rank in range(ranks)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


class WithConstants(nn.Module):
    """Calls a stage's module with further arguments that are not split into microbatches."""

    def __init__(self, module: nn.Module, constants: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.constants = module, constants

    def forward(self, x: Tensor, **inputs: Tensor) -> Tensor:
        return self.module(x, **self.constants, **inputs)


class LowMemoryStage(PipelineStage):
    """torch's PipelineStage with five differences.

    Memory: messages live only while they are needed. torch keeps what a step sends until the step ends, and receive
    buffers of all m microbatches forever.

    Hooks: in a split backward, weight gradients reach the hooks on parameters, which torch's split bypasses.

    Agreement: stages agree once that their shapes are known, not at each change between training and evaluation.

    Lanes: with several process groups of the same ranks, edges between stages alternate between them. A device runs the messages
    of one group in the order in which they were queued, so a receive that was posted early would block sends on another edge.

    Losses: backward starts from `loss_gradient`; torch starts from 1 and scales the losses with separate operators.
    """

    loss_gradient: Tensor  # 0-dim; of the last stage's losses

    def __init__(self, *arguments: Any, lanes: Sequence[dist.ProcessGroup | None], **options: Any) -> None:
        super().__init__(*arguments, **{"group": lanes[0], **options})
        self._lanes = lanes
        self._sends: deque[dist.Work] = deque()
        self._agreed, self._known_shapes = False, torch.ones(1, dtype=torch.int32)
        self._deferred = DeferredGradients(self.submod)
        if self._deferred.layers:
            self.dw_builder = self._deferred.take

    # Agreement: by messages between neighbours, which the host waits for.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return (
            self._known_shapes if self._agreed else super()._warmup_forward_vote(has_backward, received_acc)
        )

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        if self._agreed:
            return self._known_shapes
        self._agreed = True
        return super()._warmup_backward_result(received_result)

    # Sends: started here instead of by the schedule, which would keep every message until the end of the step.

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._start_sends(self._on_lane(self.stage_index, super().get_fwd_send_ops(fwd_chunk_id)))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._start_sends(self._on_lane(self.stage_index - 1, super().get_bwd_send_ops(bwd_chunk_id)))
        return []

    def _start_sends(self, ops: list[dist.P2POp]) -> None:
        # This cannot deadlock: the schedule orders the receive of an earlier message before this send.
        self.wait_for_sends(SENDS_IN_FLIGHT - 1)
        started = (dist.isend(op.tensor, group=op.group, group_dst=op.group_peer) for op in ops)
        self._sends.extend(work for work in started if work is not None)

    def wait_for_sends(self, remaining: int = 0) -> None:
        """Wait until at most `remaining` sends are in flight."""
        while len(self._sends) > remaining:
            self._sends.popleft().wait()

    def _on_lane(self, edge: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Messages of an edge, by the number of its first stage, in the edge's process group."""
        op: Any  # whose group may be None, the default one
        for op in ops:
            op.group = self._lanes[lane(edge, self.group_size, len(self._lanes))]
        return ops

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._on_lane(self.stage_index - 1, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._on_lane(self.stage_index, super().get_bwd_recv_ops(bwd_chunk_id))

    # Receives: a buffer is allocated right before its receive and released once the stage has taken the message.

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        infos = self._release_buffers(self.args_recv_info[0])
        self.args_recv_info = {i: tuple(map(copy, infos)) for i in range(num_microbatches)}

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[RecvInfo, ...]:
        return self._release_buffers(super()._create_grad_recv_info(act_send_info))

    def _get_recv_ops(self, recv_infos: tuple[RecvInfo, ...], *group: Any) -> list[dist.P2POp]:
        # group: of torch 2.14, which `_on_lane` replaces
        for info in recv_infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        return super()._get_recv_ops(recv_infos, *group)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        self._release_buffers(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        self._release_buffers(self.grad_recv_info[bwd_chunk_id])
        return received

    @staticmethod
    def _release_buffers(recv_infos: tuple[RecvInfo, ...]) -> tuple[RecvInfo, ...]:
        for info in recv_infos:
            info.buffer = None
        return recv_infos

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        if not self._deferred.layers or not torch.is_grad_enabled():
            return super().forward_one_chunk(*arguments, **options)
        self._deferred.begin()
        output = super().forward_one_chunk(*arguments, **options)
        self._deferred.keep()
        return output

    # Backward

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self.is_last and backward_type != "weight":
            output = bwd_kwargs["stage_output"]
            (loss,) = output if isinstance(output, tuple) else (output,)
            gradient = self.loss_gradient.to(loss.dtype)
            gradients = (gradient,) if isinstance(output, tuple) else gradient
            bwd_kwargs = {**bwd_kwargs, "output_grads": gradients}
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, *arguments: Any, **options: Any
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, *arguments, **options)
        if loss is not None:
            loss.detach_()  # the schedule keeps it until the step ends; with its graph it would keep the received states

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        # The first stage has no input gradient, so torch runs an ordinary backward there, which calls the hooks. Deferred
        # gradients call them too.
        if self.is_first or not self.has_backward or self.dw_builder:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            return
        parameters = list(self.submod.parameters())
        accumulated = [parameter.grad for parameter in parameters]
        self.submod.zero_grad()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        gradients = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, accumulated, strict=True):
            parameter.grad = gradient
        # accumulates through AccumulateGrad nodes, and so calls hooks
        torch.autograd.backward(parameters, gradients)
