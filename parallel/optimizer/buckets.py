"""Buckets: parameters concatenated in flat memory, so that one collective and one kernel serve many.

The parameters of a bucket have the same dtype, weight decay, learning-rate multiplier, update rule and partial axes, and either
all belong to experts or none does. They become views of `values`, their summed gradients are views of `gradients`. With d ranks
in `dp_shard` (for experts `expert_shard`), the flat memory is padded to d equal shards: rank r owns elements
[r·n/d, (r+1)·n/d), and keeps float32 master weights and the rule's states of these only. Shard boundaries may fall inside a
parameter.

Parameters and shards are aligned to 128 bytes for vector loads and collectives. Gaps and padding are zero.

When a bucket has memory, besides that of the states:

    kind                values                             gradients      shard of the summed gradients
    resident (ZeRO-1)   always                             always         a view of `gradients`
    sharded (FSDP)      from `start_gather` to `release`   until summed   always
    frozen (LoRA)       from `start_gather` to `release`   never          never
    in a graph          never: the graph has it            never          always
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import collectives
from parallel.device import Device
from parallel.initialization import initialize
from parallel.layout import Box, GlobalBox, layout_of
from parallel.mesh import Axis, Mesh
from parallel.optimizer.arithmetic import EAGER, Arithmetic
from parallel.optimizer.rules import Rule, SignStep

ALIGNMENT = 128  # bytes
BUCKET_SIZE = 10_000_000  # elements
IN_FLIGHT = 2  # buckets in a collective at once, if each needs memory of its own
LATENCY = 20e-6  # seconds per message between nodes; it may be a fifth of the message's time


Named = tuple[str, nn.Parameter]


class Group(NamedTuple):
    """The parameters of one bucket."""

    rule: Rule
    rate: float  # learning-rate multiplier
    weight_decay: float  # divided by the multiplier, so that equal decays shrink weights equally in a step
    partial_axes: tuple[str, ...]  # over which their gradients are partial sums
    members: list[Named]


@dataclass(frozen=True)
class ShardBox(GlobalBox):
    """A box of a global tensor inside this rank's shard of a bucket."""

    start: int  # of its first element in the shard, where it is contiguous
    replicas: int  # number of tensor ranks that hold this box
    saved: bool  # whether this rank, among those with a replica of the box, writes it to checkpoints
    replica: int = 0  # index of this rank among those tensor ranks

    def view(self, shard: Tensor) -> Tensor:
        """The box in a flat shard."""
        return shard[self.start : self.start + math.prod(self.sizes)].view(self.sizes)


@dataclass
class Slot:
    """A parameter in a bucket."""

    name: str
    parameter: nn.Parameter
    start: int  # of its first element in the bucket
    filled: bool = False  # whether the bucket's `gradients` hold one of this parameter

    def view(self, flat: Tensor) -> Tensor:
        """Its view of the bucket's values or gradients."""
        return flat[self.start : self.start + self.parameter.numel()].view_as(self.parameter)


class Bucket:
    """Flat memory of some parameters; see the module docstring.

    Args:
        group: its parameters, which move into the bucket, and become views of it; and what they have in common.
        mesh: its `dp_shard` axis, for experts `expert_shard`, shards the bucket.
        gradient_dtype: of the summed gradients.
        resident: whether values and gradients stay in memory.
        frozen: whether they are never updated: no gradients, no states, and `master` in the parameters' dtype.
        arithmetic: the functions that it computes with.
        seed: of deferred parameters (`layout.deferred_parameters`), of which a bucket that is not resident initializes its shard;
            None: parameters have values.

    Attributes:
        values: all parameters, in their dtype.
        gradients: this rank's gradients of all parameters; None if not resident and there are none.
        gradient_shard: this rank's shard of the summed gradients.
        master: this rank's shard of the master weights, float32 unless frozen.
        states: `master` and this rank's shards of the rule's states, float32, by name; empty if frozen.
        norm_weights: weights of the shard's equal blocks in squared norms: 1 / replicas, so that each element counts once over
            all ranks; 0 for padding.
    """

    def __init__(
        self,
        group: Group,
        mesh: Mesh,
        gradient_dtype: torch.dtype,
        *,
        resident: bool = True,
        frozen: bool = False,
        arithmetic: Arithmetic = EAGER,
        seed: int | None = None,
    ) -> None:
        self.mesh, self.resident, self.frozen, self.arithmetic = mesh, resident, frozen, arithmetic
        self.rule, self.rate, self.weight_decay, partial, named_parameters = group
        layout = layout_of(named_parameters[0][1])
        # A sign must not depend on rounding.
        self.gradient_dtype = torch.float32 if isinstance(self.rule, SignStep) else gradient_dtype
        experts = layout.expert_ranks is not None
        self.axis = mesh.expert_shard if experts else mesh.dp_shard
        self.replicate = mesh.expert_replicate if experts else mesh.dp_replicate  # ranks with the same shard
        self.partial: list[Axis] = [getattr(mesh, name) for name in partial]
        self._hold(named_parameters)
        self._initialize(named_parameters, seed)
        self._allocate_states()
        self.norm_weights = self._norm_weights()
        self.unit: object | None = None  # that FSDP gathers it with; the optimizer sets this and the next
        self.transient = False  # whether to release the values when a microbatch's gradients are complete
        self.in_graph = False  # whether a graph gathers the values and reduces the gradients
        self._gathering: dist.Work | None = None
        # whether `values` holds the parameters, or will once the gather in progress ends
        self.gathered = True
        # whether this rank's shard of `values` holds the master weights since their update
        self.assigned = False
        if not resident:
            self.release()

    def _hold(self, named_parameters: list[tuple[str, nn.Parameter]]) -> None:
        """Allocate `values` and choose each parameter's place in it."""
        first = named_parameters[0][1]
        sizes = [parameter.numel() for _, parameter in named_parameters]
        starts, padded = pack(sizes, self.axis.size, first.dtype, self.gradient_dtype)
        self.slots = [Slot(*named, start) for named, start in zip(named_parameters, starts, strict=True)]
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        self._gaps = [gap for gap in zip(ends, [*starts[1:], padded], strict=True) if gap[0] < gap[1]]
        self.values = torch.zeros(padded, dtype=first.dtype, device=first.device)
        self.length = padded // self.axis.size  # of the shard
        self.first = self.axis.rank * self.length

    def _initialize(self, named_parameters: list[tuple[str, nn.Parameter]], seed: int | None) -> None:
        """Make the parameters views of `values`, with the values that they have or, if deferred, initial ones."""
        for slot in self.slots:
            view = slot.view(self.values)
            if seed is None:
                view.copy_(slot.parameter.detach())
            slot.parameter.data = view
        if seed is not None and self.resident:
            initialize(named_parameters, self.mesh.tensor, seed)
        elif seed is not None:  # the rest is gathered before use
            self._initialize_shard(self.local_shard(self.values), seed)

    def _allocate_states(self) -> None:
        """Allocate this rank's shard of the optimizer's states, and memory for gradients."""
        shard = self.local_shard(self.values)
        self.shares_master = self.resident and shard.dtype == torch.float32
        kept = shard.dtype if self.frozen else torch.float32
        self.master = shard if self.shares_master else shard.to(kept, copy=True)
        self.gradients: Tensor | None = None
        self.states: dict[str, Tensor] = {}
        if self.frozen:
            self.gradient_shard = torch.empty(0, dtype=self.gradient_dtype, device=shard.device)
            return
        self.states["master"] = self.master
        for state in self.rule.states:
            self.states[state] = torch.zeros_like(self.master)
        if self.resident:
            self.gradients = torch.zeros_like(self.values, dtype=self.gradient_dtype)
            self.gradient_shard = self.local_shard(self.gradients)
        else:
            self.gradient_shard = torch.zeros_like(shard, dtype=self.gradient_dtype)

    def begin_step(self, microbatches: int) -> None:
        """Expect this many gradients of each parameter."""
        self.awaited = 0 if self.in_graph else len(self.slots) * microbatches  # gradients
        self._summed = False  # whether `gradient_shard` holds a sum of this step
        for slot in self.slots:
            slot.filled = False

    @property
    def late_axes(self) -> list[Axis]:
        """Axes over which the shard of the gradients is summed after the step's last backward pass."""
        replicas = (self.replicate,) if self.in_graph else ()
        return [axis for axis in (*replicas, *self.partial) if axis.size > 1]

    @property
    def microbatch_complete(self) -> bool:
        """Whether all parameters have the same number of gradients."""
        return self.awaited % len(self.slots) == 0

    @torch.no_grad()
    def accumulate(self, slot: Slot) -> None:
        """Add a parameter's gradient to `gradients`, and free it."""
        if self.gradients is None:
            self.gradients = self._allocate_gradients()
        combine = self.arithmetic.add if slot.filled else self.arithmetic.assign
        gradient: Any = slot.parameter.grad  # not None, in a hook that runs when it is complete
        combine(slot.view(self.gradients), gradient)
        slot.filled, slot.parameter.grad = True, None
        self.awaited -= 1

    def take_gradients(self) -> Tensor:
        """Return `gradients`, zeros where missing, for reduction; if not resident, later ones get new memory."""
        gradients = self._allocate_gradients() if self.gradients is None else self.gradients
        for slot in self.slots:
            if not slot.filled:
                self.arithmetic.clear(slot.view(gradients))
            slot.filled = False
        if not self.resident:
            self.gradients = None
        return gradients

    def _allocate_gradients(self) -> Tensor:
        """Memory for gradients, zero between parameters and undefined in them."""
        gradients = torch.empty_like(self.values, dtype=self.gradient_dtype)
        for start, end in self._gaps:
            self.arithmetic.clear(gradients[start:end])
        return gradients

    def complete_sum(self) -> None:
        """Set the shard of the summed gradients to zero if there were none."""
        if not self._summed:
            self.arithmetic.clear(self.gradient_shard)

    @torch.no_grad()
    def add_sum(self, shard: Tensor) -> None:
        """Add a shard of summed gradients to those of earlier microbatches, unless it is `gradient_shard`."""
        if shard is not self.gradient_shard:
            combine = self.arithmetic.add if self._summed else self.arithmetic.assign
            combine(self.gradient_shard, shard)
        self._summed = True

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start to fill `values` from all ranks' master weights, unless that is done; read them after `wait`."""
        if not self.resident:
            if self.gathered:
                return
            resize_storage(self.values, self.values.nbytes)
        self.gathered = True
        if not (self.shares_master or self.assigned):
            self.arithmetic.assign(self.local_shard(self.values), self.master)
        self.assigned = False
        if self.axis.size > 1:
            self._gathering = collectives.start_all_gather_into(self.values, self.axis)

    def wait(self) -> None:
        """Wait for the gather in progress."""
        if self._gathering is not None:
            collectives.wait_work(self._gathering)
            self._gathering = None

    def parts(self) -> list[tuple[int, torch.Size | None]]:
        """Elements and shape of each parameter, and of each gap between them (None), in order."""
        held = [(slot.start, (slot.parameter.numel(), slot.parameter.shape)) for slot in self.slots]
        gaps = [(start, (end - start, None)) for start, end in self._gaps]
        return [part for _, part in sorted([*held, *gaps], key=lambda each: each[0])]

    def gather_in_graph(self, shard: nn.Parameter) -> None:
        """Receive gradients, summed over `dp_shard`, from `shard`, the master weights that a graph gathers."""
        self.in_graph = True
        shard.register_post_accumulate_grad_hook(weak_hook(WeakMethod(self._take_sum)))

    def _take_sum(self, shard: Tensor) -> None:
        """Add the gradient of a shard, and free it."""
        if shard.grad is not None:
            self.add_sum(shard.grad)
        shard.grad = None

    def release(self) -> None:
        """Free the memory of `values`, until the next `start_gather`."""
        self.wait()
        self.gathered = False
        resize_storage(self.values, 0)

    def local_shard(self, flat: Tensor) -> Tensor:
        """This rank's shard of a flat tensor, as a view."""
        return flat[self.first : self.first + self.length]

    def _norm_weights(self) -> Tensor:
        shared = math.prod(axis.size for axis in self.partial if axis.name == "embedding")
        copies = self.replicate.size * shared
        return self.block_weights(lambda box: 1 / (box.replicas * copies)).to(self.values.device)

    @property
    def block(self) -> int:
        """Elements of the shard's equal blocks, each within a row; the same on every rank."""
        # The rows in a shard differ between ranks, but the block size must not: graphs do not depend on the rank.
        rows = (math.prod(slot.parameter.shape[1:]) for slot in self.slots)
        return math.gcd(self.length, *rows, *(slot.start for slot in self.slots))

    def block_weights(self, weight: Callable[[Box], float]) -> Tensor:
        """A weight for each of the shard's blocks, on the host: that of its box; 0 for padding."""
        block = self.block
        weights = torch.zeros(self.length // block)
        for start, box in self._local_boxes(self.axis.rank, self.mesh.tensor.rank):
            low, high = max(start, 0), min(start + math.prod(box.sizes), self.length)
            if low < high:
                weights[low // block : high // block] = weight(box)
        return weights

    def boxes(self, shard: int | None = None, tensor: int | None = None) -> Iterator[ShardBox]:
        """The boxes of global tensors in a rank's shard, without padding.

        Args:
            shard: its rank over `axis`, by default this rank's.
            tensor: its tensor rank, by default this rank's.
        """
        shard = self.axis.rank if shard is None else shard
        tensor = self.mesh.tensor.rank if tensor is None else tensor
        first_copy = self.replicate.rank == 0
        first_stage = all(axis.rank == 0 for axis in self.partial if axis.name == "embedding")
        for begin, box in self._local_boxes(shard, tensor):
            saved = first_copy and first_stage and box.replica == 0
            low, high = max(0, -begin), min(math.prod(box.sizes), self.length - begin)
            for start, offsets, sizes in split_range(box.sizes, low, high):
                offsets = tuple(a + b for a, b in zip(box.offsets, offsets, strict=True))
                replicas = box.replicas, saved, box.replica
                yield ShardBox(box.name, box.shape, offsets, sizes, begin + start, *replicas)

    def parameter_boxes(self) -> Iterator[Box]:
        """The boxes of all parameters on this tensor rank, of all shards."""
        for slot in self.slots:
            yield from layout_of(slot.parameter).boxes(slot.name, self.mesh.tensor.rank)

    @torch.no_grad()
    def _initialize_shard(self, shard: Tensor, seed: int) -> None:
        layouts = [(slot.name, layout_of(slot.parameter)) for slot in self.slots]
        rank = self.mesh.tensor.rank
        initializers = {
            box.name: layout.initializer for name, layout in layouts for box in layout.boxes(name, rank)
        }
        for box in self.boxes():
            initializers[box.name].fill(box.view(shard), box, seed)

    def _local_boxes(self, shard: int, tensor: int) -> Iterator[tuple[int, Box]]:
        """Boxes of all parameters on a rank, each with its first element's position relative to its shard."""
        for slot in self.slots:
            row = slot.parameter.shape[1:]
            for box in layout_of(slot.parameter).boxes(slot.name, tensor):
                assert box.sizes[1:] == tuple(row), "only rows are padded, so a box is contiguous"
                yield slot.start - shard * self.length + box.local_offsets[0] * math.prod(row), box


def pack(sizes: Sequence[int], shards: int, *dtypes: torch.dtype) -> tuple[list[int], int]:
    """Starts of tensors in flat memory, aligned in each dtype, and its length, a multiple of `shards`."""
    unit = ALIGNMENT // min(dtype.itemsize for dtype in dtypes)
    ends = list(accumulate(math.ceil(size / unit) * unit for size in sizes))
    return [0, *ends[:-1]], math.ceil(ends[-1] / (shards * unit)) * shards * unit


def bucket_size(shards: int, device: Device) -> int:
    """Minimum number of elements of a bucket, for large messages: a rank sends one shard of it at a time."""
    message = 4 * LATENCY * (device.network or 0) / torch.float32.itemsize
    return max(BUCKET_SIZE, shards * round(message))


def resize_storage(flat: Tensor, size: int) -> None:
    """Free or allocate the memory of a tensor and all its views, which autograd may have saved."""
    flat.untyped_storage().resize_(size)


def split_range(
    shape: tuple[int, ...], low: int, high: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut [low, high) of a row-major tensor into contiguous boxes: (first element, offsets, sizes).

    A matrix yields at most three: the end of a row, complete rows, the beginning of a row.
    """
    if len(shape) == 1:
        if low < high:
            yield low, (low,), (high - low,)
        return
    width = math.prod(shape[1:])
    zeros = (0,) * (len(shape) - 1)
    while low < high:
        row, column = divmod(low, width)
        if column == 0 and high - low >= width:
            rows = (high - low) // width
            yield low, (row, *zeros), (rows, *shape[1:])
            low += rows * width
        else:
            stop = min(high, (row + 1) * width)
            for start, offsets, sizes in split_range(shape[1:], column, stop - row * width):
                yield row * width + start, (row, *offsets), (1, *sizes)
            low = stop


def weak_hook(method: WeakMethod[Callable[..., None]], *arguments: int) -> Callable[[Tensor], None]:
    """Call a method as long as its object lives.

    Garbage collection does not see through hooks of a tensor that C++ code holds: these would keep all buckets forever.
    """

    def hook(parameter: Tensor) -> None:
        bound = method()
        if bound is not None:
            bound(parameter, *arguments)

    return hook
