"""Process pool for distributed tests: up to 8 persistent ranks over gloo on loopback.

    def case(size): ...                                              # module-level; runs with torch.distributed initialized
    def test_it(pool): results = pool.run(case, ranks=4, size=3)     # results in rank order

Workers are forked from a server that has already imported torch, so starting one takes milliseconds. If a rank raises, hangs or
dies, all workers are killed and the next case gets new ones.
"""

from __future__ import annotations

import importlib
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch
import torch.distributed as dist

from parallel.mesh import Mesh
from tests.forkserver import forkserver

WORKERS = 8
RUNS = 3
"""Number of cases after which workers are replaced: gloo keeps threads of destroyed groups, which wake 100 times a second."""
GRACE = 2.0
"""Seconds to wait for the errors of the other ranks once one has failed."""


class RankError(AssertionError):
    """A rank failed; the message contains the tracebacks of all ranks that reported one."""


@contextmanager
def mesh(**degrees: int) -> Iterator[Mesh]:
    """A mesh whose process groups are destroyed at the end of the block."""
    created = Mesh(**degrees)
    try:
        yield created
    finally:
        created.close()


@dataclass
class Worker:
    process: BaseProcess
    connection: Connection

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


class Pool:
    """Runs functions on worlds of 1 to 8 ranks. Use as a context manager."""

    def __init__(self) -> None:
        self._context = forkserver()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[Worker] = []
        self._world, self._size, self._runs = 0, 0, 0

    def run(
        self, function: Callable[..., Any], ranks: int, timeout: float = 120, **arguments: Any
    ) -> list[Any]:
        """Call `function(**arguments)` on each rank of a world.

        Args:
            function: module-level function; its arguments and results must be picklable.
            ranks: size of the world, 1 to 8.
            timeout: seconds until all ranks must have returned.

        Returns:
            Results in rank order.

        Raises:
            RankError: a rank raised, died or timed out.
        """
        if not 1 <= ranks <= WORKERS:
            raise ValueError(f"ranks = {ranks}: a world has 1 to {WORKERS}")
        self._runs += 1
        if self._runs % RUNS == 0:
            self.close()
        while len(self._workers) < ranks:
            self._workers.append(self._start())
        if self._size != ranks:
            self._world, self._size = self._world + 1, ranks
        call = (function.__module__, function.__qualname__, arguments)
        for rank, worker in enumerate(self._workers[:ranks]):
            worker.connection.send_bytes(pickle.dumps((self._world, rank, ranks, timeout, call)))
        outcomes = self._collect(ranks, timeout)
        if not all(succeeded for succeeded, _ in outcomes):
            self.close()
            failures = (
                f"rank {rank}: {error}" for rank, (succeeded, error) in enumerate(outcomes) if not succeeded
            )
            raise RankError("\n".join(failures))
        return [result for _, result in outcomes]

    def _collect(self, ranks: int, timeout: float) -> list[tuple[bool, Any]]:
        """(succeeded, result or error) of each rank."""
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers[:ranks])}
        outcomes = [(False, f"no result within {timeout:g} s, or after another rank failed")] * ranks
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    outcomes[rank] = (False, "its process died")
                if not outcomes[rank][0]:
                    end = min(end, time.monotonic() + GRACE)
        return outcomes

    def _start(self) -> Worker:
        parent, child = self._context.Pipe()
        process = self._context.Process(target=_work, args=(child, self._store.port), daemon=True)
        process.start()
        child.close()
        return Worker(process, parent)

    def close(self) -> None:
        """Kill all workers; the next `run` starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _work(connection: Connection, port: int) -> None:
    """Worker loop: join the world of the next call, run the call, send its outcome."""
    torch.set_num_threads(1)
    current = 0
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            world, rank, ranks, timeout, (module, name, arguments) = pickle.loads(connection.recv_bytes())
        except EOFError:
            return  # the pool was closed
        try:
            if world != current:
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"world-{world}", store),
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=timeout),
                )
                current = world
            torch.manual_seed(0)
            outcome = (True, getattr(importlib.import_module(module), name)(**arguments))
        except BaseException:
            outcome = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(outcome))
