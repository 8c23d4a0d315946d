"""The pieces that stages are made of, as a rank sees them, and what each takes.

A stage is a first piece (embedding and a layer), layers that are all alike, and a last piece (a layer, the final norm and the
loss); each kind is built once on the meta device and run forward and backward under a `Meter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from modeling.models.build import DTYPES, MODELS
from modeling.planning.meter import Meter
from parallel import Mesh
from parallel import device as devices
from parallel.activation_checkpointing import recompute
from parallel.attention import kernels
from parallel.device import Device
from parallel.mesh import AXES
from profiles.schema import Profile

META = torch.device("meta")


@dataclass(frozen=True)
class Piece:
    """What a microbatch takes in one piece.

    Attributes:
        kept: bytes that are alive between forward and backward, its input aside.
        forward, backward: the most bytes that are alive during each, its input aside.
        flops: of both, recomputation and padding included.
        sent: bytes that the rank sends in both, by axis.
    """

    kept: int
    forward: int
    backward: int
    flops: float
    sent: Mapping[str, int]


Counted = dict[tuple[Any, ...], Any]


class Pieces:
    """A profile's pieces, each counted when it is first asked for.

    Args:
        counted: what was counted of the same model under other profiles, to which this is added.
    """

    def __init__(self, profile: Profile, counted: Counted | None = None) -> None:
        self.profile = profile
        self._counted: Counted = {} if counted is None else counted

    @cached_property
    def device(self) -> Device:
        cluster = self.profile.cluster
        return devices.resolve(cluster.device, cluster.accelerator)

    @cached_property
    def mesh(self) -> Mesh:
        """As the first rank sees it."""
        profile, parallel = self.profile, self.profile.parallel
        degrees = (parallel.pipeline, profile.data_parallel, parallel.context, parallel.tensor)
        return Mesh(*degrees, profile.kv_replication, rank=0, reduces=self.device.reduces)

    @property
    def hidden_bytes(self) -> int:
        """Of a microbatch's hidden states between layers, on one rank."""
        train, parallel = self.profile.train, self.profile.parallel
        tokens = train.micro_batch_size * train.sequence_length // parallel.context
        shards = parallel.tensor if parallel.sequence_parallel else 1
        return tokens // shards * self.profile.model.hidden_size * DTYPES[train.precision].itemsize

    def of(self, layers: range) -> list[Piece]:
        """The pieces of a stage, one a layer, in order."""
        train, end = self.profile.train, self.profile.model.num_hidden_layers - 1
        again = len(layers) if train.recompute_layers is None else train.recompute_layers
        return [
            self._piece(layer == 0, layer == end, train.recompute if place < again else "none")
            for place, layer in enumerate(layers)
        ]

    @property
    def _degrees(self) -> tuple[Any, ...]:
        """What of the mesh shapes a layer; a pipeline does where its ends share a weight."""
        parallel = self.profile.parallel
        return (parallel.tensor, parallel.context, parallel.sequence_parallel, parallel.pipeline > 1)

    def stage(self, layers: range) -> nn.Module:
        """A stage of as many layers as these, at the same end of the model, on the meta device."""
        count = self.profile.model.num_hidden_layers
        key = (*self._degrees, 0 in layers, count - 1 in layers, len(layers))
        if key not in self._counted:
            self._counted[key] = self._build(layers)
        return self._counted[key]

    def _build(self, layers: range) -> nn.Module:
        train, model = self.profile.train, self.profile.model
        return MODELS[model.architecture](
            model,
            self.mesh,
            layers,
            sequence_parallel=self.profile.parallel.sequence_parallel,
            dtype=DTYPES[train.precision],
            device=META,
        )

    def _piece(self, first: bool, last: bool, mode: str) -> Piece:
        train = self.profile.train
        shape = (train.micro_batch_size, train.sequence_length // self.profile.parallel.context)
        key = (*self._degrees, *shape, first, last, mode)
        if key not in self._counted:
            count = self.profile.model.num_hidden_layers
            layer = 0 if first else count - 1 if last else 1
            self._counted[key] = self._count(self._build(range(layer, layer + 1)), mode)
        return self._counted[key]

    def _count(self, stage: nn.Module, mode: str) -> Piece:
        """One microbatch forward and backward, as the training program runs it."""
        recompute(stage.layers.values(), mode)
        for parameter in stage.parameters():
            parameter.register_post_accumulate_grad_hook(
                _release
            )  # ZeRO-1 takes it over, and no longer needs it
        train = self.profile.train
        b, s = train.micro_batch_size, train.sequence_length // self.mesh.context.size
        tokens = torch.empty(b, s, dtype=torch.int64, device=META)
        positions, keys = tokens[0], tokens[:, 0]
        x = tokens if stage.first else self._hidden()
        sizes = {name: getattr(self.mesh, name).size for name in (*AXES, "kv_replica", "zero", "ends")}
        known = [*stage.parameters(), *stage.buffers(), tokens, x]
        with Meter(known, sizes, kernels.present(self.device.attention)) as meter:
            y = stage(x, positions, samples=keys)
            if stage.last:
                y = stage.loss(y, tokens)
            kept, forward, meter.peak = meter.live, meter.peak, meter.live
            y.backward(torch.empty_like(y))
        return Piece(kept, forward, meter.peak, meter.flops, dict(meter.sent))

    def _hidden(self) -> Tensor:
        width, dtype = self.profile.model.hidden_size, DTYPES[self.profile.train.precision]
        rows = self.hidden_bytes // (width * dtype.itemsize)
        return torch.empty(rows, width, dtype=dtype, device=META, requires_grad=True)


def _release(parameter: nn.Parameter) -> None:
    parameter.grad = None
