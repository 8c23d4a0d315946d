"""Write checkpoints, synchronously or while training continues.

    begin    rank 0 makes room; each rank copies its shards to host memory: on a CPU in a thread, overlapping the next
             forward and backward (the next update waits for it); from a device before returning
    (write)  a thread of each rank writes the rank's boxes to one file, without communication
    finish   rank 0 gathers the positions of all boxes, writes DCP's index and the marker last; all ranks learn the outcome

Only `begin` and `finish` are collective, so no collective of a save runs concurrently with those of training. The plan (which
rank writes which box) is the same for every save of a run and is computed once.

Memory of asynchronous saves, and of all saves from a device: 12 bytes of host memory per parameter of the shard, page-locked
where that speeds up the copy. A device's shards are copied in full, three copies per bucket, however many boxes they hold.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from parallel.checkpoint.boxes import BoxedTensor, SavePlanner, boxed_tensors
from parallel.checkpoint.locations import Location, discard, write_marker
from parallel.checkpoint.object_stores import unexplained
from parallel.checkpoint.writer import Writer, WrittenFiles
from parallel.device import host_memory_for, random_states, set_current_device
from parallel.optimizer.sharded_adamw import ShardedAdamW

log = logging.getLogger(__name__)
T = TypeVar("T")


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; it stays incomplete."""


class StaleAttempt(RuntimeError):
    """Fencing check failed: another writer took over the run, so this one must not publish anything."""


@dataclass
class _PendingSave:
    checkpoint: Location
    marker: dict[str, Any]
    writer: Writer | str  # or the error of creating it
    written: Future[WrittenFiles | str]  # by this rank, or the error


class Saver:
    """Writes an optimizer's checkpoints, one at a time.

    Args:
        optimizer: its shards are saved.
        asynchronous: whether training continues while they are written.
        fencing_check: rank 0 calls it before it removes anything and right before it writes a marker; it raises
            `StaleAttempt` if this process no longer owns the run.
    """

    def __init__(
        self,
        optimizer: ShardedAdamW,
        *,
        asynchronous: bool = False,
        fencing_check: Callable[[], None] = lambda: None,
    ) -> None:
        self.optimizer, self.asynchronous, self.fencing_check = optimizer, asynchronous, fencing_check
        mesh = optimizer.mesh
        self.rank, self.world, self._group = mesh.rank, mesh.size, mesh.host
        self._pending: _PendingSave | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []  # device memory, host memory for its copy
        self._random: dict[str, Tensor] = {}
        self._planner = SavePlanner()
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None  # on rank 0
        self._thread = None
        if asynchronous:  # torch's current device is per thread
            self._thread = ThreadPoolExecutor(1, "checkpoint", set_current_device, (self._device,))
        self._removals: list[Future[None]] = []  # queued on the thread

    @property
    def pending(self) -> bool:
        """Whether a save awaits `finish`; the same on all ranks."""
        return self._pending is not None

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing, so that `finish` would wait."""
        return self._pending is not None and not self._pending.written.done()

    def begin(self, checkpoint: Location, marker: dict[str, Any]) -> None:
        """Begin a save that replaces what is at `checkpoint`. Collective.

        Args:
            checkpoint: folder or URI; with several nodes, on a shared file system.
            marker: JSON values: step, consumed samples, the profile.

        Raises:
            SaveFailed: rank 0 could not make room; raised on all ranks.
            StaleAttempt: the fencing check failed; raised on all ranks.
        """
        assert self._pending is None, "finish the previous save first"

        def make_room() -> str:
            self.fencing_check()  # the existing checkpoint may be a successor's
            while self._removals:  # one may be of this folder
                self._removals.pop().result()
            discard(checkpoint)
            return uuid4().hex[:8]

        writer = _create_writer(checkpoint, self._on_rank_0(make_room))
        if self._plan is None:
            self._make_plan()
        if self._thread and self._device.type == "cpu":
            self.optimizer.pending_copy = self._thread.submit(self._copy)
        else:
            self._copy()
        for kind, state in random_states(self._device).items():
            self._random[kind].copy_(state)
        marker = {
            **marker,
            "optimizer_steps": round(self.optimizer.steps.item()),
            "mesh": self.optimizer.mesh.shape,
            "versions": {
                **marker.get("versions", {}),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
        }
        written: Future[WrittenFiles | str]
        if self._thread:
            written = self._thread.submit(self._write, writer)
        else:
            written = Future()
            written.set_result(self._write(writer))
        self._pending = _PendingSave(checkpoint, marker, writer, written)

    def finish(self) -> None:
        """Wait for all ranks' files and complete the checkpoint. Collective.

        Raises:
            SaveFailed: a rank could not write; raised on all ranks, after removing the partial checkpoint if possible.
            StaleAttempt: the fencing check failed; raised on all ranks.
        """
        save, self._pending = self._pending, None
        assert save is not None, "begin a save first"
        results = self._gather(save.written.result())

        def complete() -> None:
            self.fencing_check()
            try:
                errors = [
                    f"rank {rank}: {error}" for rank, error in enumerate(results) if isinstance(error, str)
                ]
                if errors:
                    raise SaveFailed(errors[0])
                assert isinstance(save.writer, Writer)
                assert self._metadata is not None
                written = [each for each in results if not isinstance(each, str)]
                files = save.writer.write_index(self._metadata, written)
                self.fencing_check()
                write_marker(save.checkpoint, {**save.marker, "files": files})
            except StaleAttempt:
                raise
            except Exception:
                _discard_or_warn(save.checkpoint)
                raise

        self._on_rank_0(complete)

    def discard(self, checkpoint: Location) -> None:
        """Remove a checkpoint, after pending writes; logs a warning on failure."""
        if self._thread:
            self._removals.append(self._thread.submit(_discard_or_warn, checkpoint))
        else:
            _discard_or_warn(checkpoint)

    def close(self) -> None:
        """Wait for the thread; a pending save stays incomplete."""
        if self._thread:
            self._thread.shutdown()

    @property
    def _device(self) -> torch.device:
        return self.optimizer.buckets[0].values.device

    def _copy(self) -> None:
        for live, copy in self._copies:
            copy.copy_(live, non_blocking=True)
        if self._copies and self._device.type != "cpu":
            torch.accelerator.synchronize()

    def _write(self, writer: Writer | str) -> WrittenFiles | str:
        if isinstance(writer, str):
            return writer
        try:
            writer.begin(self.rank)
            assert self._plan is not None
            return writer.write(self._plan, self._planner)
        except Exception as error:  # of any storage; `finish` reports it on all ranks
            return _reason(error)

    def _make_plan(self) -> None:
        boxes = self._boxes()
        self._planner.set_up_planner(boxes, is_coordinator=self.rank == 0)
        plans = self._gather(self._planner.create_local_plan())
        if self.rank == 0:
            plans, self._metadata = self._planner.create_global_plan(plans)
        local: list[Any] = [plans[0]] if self.rank == 0 else [None]
        if self.world > 1:
            dist.scatter_object_list(local, plans if self.rank == 0 else None, src=0, group=self._group)
        self._plan = self._planner.finish_plan(local[0])

    def _boxes(self) -> dict[str, BoxedTensor]:
        """What this rank writes: views of its shards, or of the host copies that each `begin` refreshes."""
        saved = []
        for bucket in self.optimizer.buckets:
            boxes = [box for box in bucket.boxes() if box.saved]
            shards = bucket.states
            if (self.asynchronous or self._device.type != "cpu") and boxes:
                copies = {state: host_memory_for(live) for state, live in shards.items()}
                self._copies += [(live, copies[state]) for state, live in shards.items()]
                shards = copies
            saved += [(box, {state: box.view(held) for state, held in shards.items()}) for box in boxes]
        tensors = boxed_tensors(saved)
        self._random = random_states(self._device)
        for kind, state in self._random.items():
            name = random_key(kind, self.rank)
            tensors[name] = BoxedTensor(name, tuple(state.shape))
            tensors[name].add((0,), state)
        return tensors

    def _gather(self, value: T) -> list[T]:
        """Every rank's value on rank 0; an empty list elsewhere."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world if self.rank == 0 else []
        dist.gather_object(value, values if self.rank == 0 else None, dst=0, group=self._group)
        return values

    def _on_rank_0(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0; returns its result, or raises its exception, on every rank."""
        outcome: list[Any] = [None]
        if self.rank == 0:
            try:
                outcome = [function()]
            except (SaveFailed, StaleAttempt) as error:
                outcome = [error]
            except Exception as error:
                outcome = [SaveFailed(_reason(error))]
        if self.world > 1:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]


def random_key(kind: str, rank: int) -> str:
    """The name of a rank's random state in a checkpoint."""
    return f"random.{kind}.{rank}"


def _create_writer(checkpoint: Location, save_id: str) -> Writer | str:
    """This rank's writer, or the error: not raised, because other ranks take part in collectives."""
    try:
        return Writer(checkpoint, save_id)
    except Exception as error:  # of any storage
        return _reason(error)


def _discard_or_warn(checkpoint: Location) -> None:
    try:
        discard(checkpoint)
    except Exception as error:
        log.warning(f"{checkpoint} could not be removed: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """An error as one line: the operating system's error behind it, if any (DCP hides why a write failed)."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and (reason := cause.strerror or unexplained(cause)):
            return reason
        cause = cause.__cause__ or cause.__context__
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
