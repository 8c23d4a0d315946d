"""Processes that stay: one pool of up to 8 workers in which distributed tests run their cases, over gloo on loopback.

    def case(size): ...                          # a module-level function; torch.distributed is initialized around it
    def test_it(pool): results = pool.run(case, ranks=4, size=3)     # what each rank returned, in order

Workers are forked from a server that has imported torch already, so a new one takes milliseconds. Where a rank raises, hangs or
dies, its whole world is killed and the next case gets new workers.
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

import pytest
import torch
import torch.distributed as dist

from parallel.mesh import Mesh
from tests.forkserver import forkserver

WORKERS = 8
RUNS = 20
"""Cases after which workers are replaced: gloo keeps the threads of groups that are gone, and each wakes 100 times a second."""
GRACE = 2.0
"""Seconds that the other ranks have to say what went wrong with them, once one has failed."""


class RankError(AssertionError):
    """A rank failed. The message has the traceback of each rank that said something."""


@contextmanager
def mesh(**degrees: int) -> Iterator[Mesh]:
    """A mesh inside a case, whose groups are given back at its end."""
    made = Mesh(**degrees)
    try:
        yield made
    finally:
        made.close()


@dataclass
class Worker:
    process: BaseProcess
    connection: Connection

    def end(self) -> None:
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
            function: of a module; it, its arguments and results can be pickled.
            ranks: size of the world, 1 to 8.
            timeout: seconds, for all ranks together.

        Returns:
            Each rank's result, in order.

        Raises:
            RankError: a rank raised, died or did not end in time.
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
        answers = self._answers(ranks, timeout)
        if not all(well for well, _ in answers):
            self.close()
            failures = (f"rank {rank}: {what}" for rank, (well, what) in enumerate(answers) if not well)
            raise RankError("\n".join(failures))
        return [result for _, result in answers]

    def _answers(self, ranks: int, timeout: float) -> list[tuple[bool, Any]]:
        """Of each rank whether it went well, and its result or what went wrong."""
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers[:ranks])}
        answers = [(False, f"no answer in {timeout:g} s, or after another rank failed")] * ranks
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = (False, "its process died")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + GRACE)
        return answers

    def _start(self) -> Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._store.port), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def close(self) -> None:
        """Kill all workers; the next `run` starts new ones."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _work(connection: Connection, port: int) -> None:
    """A worker's life: join the world that the next call belongs to, run it, answer."""
    torch.set_num_threads(1)
    current = 0
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            world, rank, ranks, timeout, (module, name, arguments) = pickle.loads(connection.recv_bytes())
        except EOFError:
            return  # the pool is gone
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
            answer = (True, getattr(importlib.import_module(module), name)(**arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The session's pool of workers."""
    with Pool() as made:
        yield made
