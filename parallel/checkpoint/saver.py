"""Writing checkpoints, beside the training that goes on or at once.

    begin    rank 0 makes room; each rank copies its shards to host memory: on a CPU a thread does, beside the next forward and
             backward, and the next update waits for it; from a device at once. It is all that training waits for
    (write)  a thread of each rank writes that rank's own boxes to a file of its own; no rank speaks to another
    finish   rank 0 gathers where the boxes lie, writes DCP's index, and the marker last; all ranks learn what came of it

`begin` and `finish` are collective; nothing else is. What lies between is under way on each rank for itself, so no collective
runs beside those of training. The plan, who writes which box, is the same for every save of a run and is made once.

Memory: beside training, 12 bytes of host memory a parameter of the shard, page-locked where that makes the copy faster.
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
from torch.distributed.checkpoint.storage import WriteResult

from parallel.checkpoint.boxes import PREFIX, Boxes, SavePlanner, boxes_of
from parallel.checkpoint.files import Location, Writer, discard, write_marker
from parallel.device import host_memory_for, random_states
from parallel.optimizer.zero1 import STATES, ZeRO1

log = logging.getLogger("trainshed")
T = TypeVar("T")


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; what there is of it does not count."""


class StaleAttempt(RuntimeError):
    """Another writer has taken over the run: this one must leave nothing behind that counts."""


@dataclass
class _Save:
    checkpoint: Location
    about: dict[str, Any]
    writer: Writer
    written: Future[list[WriteResult] | str]  # where the boxes lie, or what went wrong


class Saver:
    """Writes an optimizer's checkpoints, one at a time.

    Args:
        optimizer: whose shards are saved.
        beside: whether training goes on while they are written.
        allowed: rank 0 calls it before anything is removed and right before a marker is written; it raises `StaleAttempt`
            where that may not be.
    """

    def __init__(
        self,
        optimizer: ZeRO1,
        *,
        asynchronous: bool = False,
        fencing_check: Callable[[], None] = lambda: None,
    ) -> None:
        self.optimizer, self.asynchronous, self.fencing_check = optimizer, asynchronous, fencing_check
        self.rank, self.world = 0, 1
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._under_way: _Save | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []  # device memory, and host memory for what is in it
        self._random: dict[str, Tensor] = {}
        self._planner = SavePlanner()
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None  # on rank 0
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._removals: list[Future[None]] = []  # that the thread has still to do

    @property
    def pending(self) -> bool:
        """Whether a save waits for its `finish`; alike on all ranks."""
        return self._under_way is not None

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing, so that `finish` would wait."""
        return self._under_way is not None and not self._under_way.written.done()

    def begin(self, checkpoint: Location, about: dict[str, Any]) -> None:
        """Begin to write; what is there already is replaced. All ranks call it.

        Args:
            checkpoint: folder or URI; on a shared file system where there are several nodes.
            about: JSON values to go into the marker: step, samples consumed, the profile.

        Raises:
            SaveFailed: there is no room to begin with, on all ranks alike.
            StaleAttempt: `allowed` said so.
        """
        assert self._under_way is None, "the save before is not finished"

        def make_room() -> str:
            self.fencing_check()  # else what is there may be a successor's
            while self._removals:  # else one of them might be of this very folder
                self._removals.pop().result()
            discard(checkpoint)
            return uuid4().hex[:8]

        writer = Writer(checkpoint, self._agree(make_room))
        if self._plan is None:
            self._make_plan()
        if self._thread and self._device.type == "cpu":
            self.optimizer.reader = self._thread.submit(self._copy)
        else:
            self._copy()
        for kind, state in random_states(self._device).items():
            self._random[kind].copy_(state)
        about = {
            **about,
            "optimizer_steps": self.optimizer.steps,
            "mesh": self.optimizer.mesh.shape,
            "versions": {
                **about.get("versions", {}),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
        }
        written: Future[list[WriteResult] | str]
        if self._thread:
            written = self._thread.submit(self._write, writer)
        else:
            written = Future()
            written.set_result(self._write(writer))
        self._under_way = _Save(checkpoint, about, writer, written)

    def finish(self) -> None:
        """Wait for the writing and complete the checkpoint; all ranks call it.

        Raises:
            SaveFailed: on all ranks alike, where one could not write; the parts are removed as far as that is possible.
            StaleAttempt: `allowed` said so.
        """
        save, self._under_way = self._under_way, None
        assert save is not None, "no save was begun"
        answers = self._gather(save.written.result())

        def complete() -> None:
            self.fencing_check()
            try:
                failures = [
                    f"rank {rank}: {said}" for rank, said in enumerate(answers) if isinstance(said, str)
                ]
                if failures:
                    raise SaveFailed(failures[0])
                save.writer.finish(self._metadata, answers)
                self.fencing_check()
                write_marker(save.checkpoint, save.about)
            except StaleAttempt:
                raise
            except Exception:
                try_to(discard, save.checkpoint)
                raise

        self._agree(complete)

    def discard(self, checkpoint: Location) -> None:
        """Remove a checkpoint, after what is being written; where it fails, that is said."""
        if self._thread:
            self._removals.append(self._thread.submit(try_to, discard, checkpoint))
        else:
            try_to(discard, checkpoint)

    def close(self) -> None:
        """Wait for the thread; a save under way stays without its marker."""
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

    def _write(self, writer: Writer) -> list[WriteResult] | str:
        try:
            writer.begin(self.rank)
            return writer.write_data(self._plan, self._planner).value()
        except Exception as error:  # whatever storage raises; all ranks are to hear of it
            return in_words(error)

    def _make_plan(self) -> None:
        boxes = self._boxes()
        self._planner.set_up_planner(boxes, is_coordinator=self.rank == 0)
        plans = self._gather(self._planner.create_local_plan())
        if self.rank == 0:
            plans, self._metadata = self._planner.create_global_plan(plans)
        own = [plans[0]] if self.rank == 0 else [None]
        if self.world > 1:
            dist.scatter_object_list(own, plans if self.rank == 0 else None, src=0)
        self._plan = self._planner.finish_plan(own[0])

    def _boxes(self) -> dict[str, Boxes]:
        """What this rank writes: of its shards, or of copies of them that are made at each `begin`."""
        pieces = []
        for bucket in self.optimizer.buckets:
            saved = [piece for piece in bucket.boxes() if piece.saved]
            flat = {state: getattr(bucket, state) for state in STATES}
            if self.asynchronous and saved:
                copies = {state: host_memory_for(live) for state, live in flat.items()}
                self._copies += [(flat[state], copies[state]) for state in STATES]
                flat = copies
            pieces += [(piece, {state: piece.of(flat[state]) for state in STATES}) for piece in saved]
        boxes = boxes_of(pieces, PREFIX)
        self._random = random_states(self._device)
        for kind, state in self._random.items():
            key = random_key(kind, self.rank)
            boxes[key] = Boxes(key, tuple(state.shape))
            boxes[key].add((0,), state)
        return boxes

    def _gather(self, value: T) -> list[T]:
        """All ranks' values, on rank 0; elsewhere nothing."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world if self.rank == 0 else []
        dist.gather_object(value, values if self.rank == 0 else None, dst=0)
        return values

    def _agree(self, act: Callable[[], T]) -> T:
        """What `act` returns on rank 0, on every rank; where it raises, every rank raises."""
        outcome: list[Any] = [None]
        if self.rank == 0:
            try:
                outcome = [act()]
            except (SaveFailed, StaleAttempt) as error:
                outcome = [error]
            except Exception as error:
                outcome = [SaveFailed(in_words(error))]
        if self.world > 1:
            dist.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]


def random_key(kind: str, rank: int) -> str:
    """The name of a rank's random state in a checkpoint."""
    return f"random.{kind}.{rank}"


def try_to(act: Callable[[Location], None], checkpoint: Location) -> None:
    """Do something that nothing depends on; where it fails, say so."""
    try:
        act(checkpoint)
    except Exception as error:
        log.warning(f"warning: {checkpoint} could not be removed: {in_words(error)}")


def in_words(error: BaseException) -> str:
    """An error in one line; of the system's where one is behind it (torch's container hides why a write failed)."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        return cause.strerror
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
