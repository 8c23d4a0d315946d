"""Processes on this machine that tokenize shards side by side: `tasks.tokenization --serve`, one a core.

A worker that dies takes only its shard with it, which is tried again by whoever asked; another takes its place. Workers end with
their standard input, so none outlives the process that started it by more than a shard.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from profiles.errors import ProfileError
from tasks.sources.shard import SourceError
from tasks.store.artifacts import Artifact
from tasks.store.store import Store
from tasks.tokenization.dataset_plan import DatasetPlan

log = logging.getLogger(__name__)

GRACE = 5.0  # seconds that a worker has to end by itself
ERROR_LINES = 20


class Ended(RuntimeError):
    """The block of the workers was left before this shard's turn came."""


class WorkerFailed(RuntimeError):
    """A worker that died or could not do a shard for reasons that may pass."""


class WorkerPool:
    """Up to `count` processes, started as they are needed, for the block.

    Args:
        plan: whose shards they work on.
        threads: that each may use.
        token: for the hub; it is handed on through the environment of the processes alone.
    """

    def __init__(
        self, plan: DatasetPlan, store: Store, count: int, threads: int = 1, token: str | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trainshed-")
        path = Path(self._folder.name) / "plan.json"
        path.write_text(json.dumps(plan.to_json()))
        self._command = [
            sys.executable,
            "-P",
            "-m",
            "tasks.tokenization.tokenize_shard",
            "--serve",
            "--plan",
            str(path),
        ]
        self._command += ["--store", store.uri, "--work-dir", str(store.work_dir), "--threads", str(threads)]
        self._environment = {**os.environ, **({"HF_TOKEN": token} if token else {})}
        self._free: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._workers: set[_Worker] = set()
        self._said: set[str] = set()
        self._telling = threading.Lock()
        self._closed = False
        for _ in range(count):
            self._free.put(None)  # not started yet

    def run(self, order: str, k: int, report: Callable[[int], None] | None = None) -> Artifact:
        """Have a shard done by a worker that is free, or will be; may be called from many threads.

        Raises:
            ProfileError, SourceError: what the worker refused. WorkerFailed: it died. Ended: nobody waits for it.
        """
        worker = self._free.get()
        try:
            if self._closed:
                raise Ended("the workers were ended")
            if worker is None:
                worker = _Worker(self._command, self._environment, self._pass_on)
                self._workers.add(worker)
            return worker.run(order, k, report or (lambda tokens: None))
        except WorkerFailed:
            if worker is not None:
                worker.end()
                self._workers.discard(worker)
                worker = None
            raise
        finally:
            self._free.put(worker)

    def _pass_on(self, level: int, message: str) -> None:
        """Log what a worker has logged, once, though each of them says it of each shard."""
        with self._telling:
            if message not in self._said:
                self._said.add(message)
                log.log(level, "%s", message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._closed = True
        for worker in list(self._workers):
            worker.end(at_once=failure[0] is not None)
        self._folder.cleanup()


class _Worker:
    def __init__(
        self, command: list[str], environment: dict[str, str], pass_on: Callable[[int, str], None]
    ) -> None:
        self._pass_on = pass_on
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  `end` closes it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def run(self, order: str, k: int, report: Callable[[int], None]) -> Artifact:
        try:
            self._process.stdin.write(f"{order} {k}\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                answer: dict[str, Any] = json.loads(line)
                if "tokens" in answer:
                    report(answer["tokens"])
                elif "log" in answer:
                    self._pass_on(*answer["log"])
                elif "done" in answer:
                    return Artifact.from_json(answer["done"])
                elif "refused" in answer:
                    raise ProfileError(*answer["refused"])
                elif "damaged" in answer:
                    raise SourceError(answer["damaged"])
                else:
                    raise WorkerFailed(answer["failed"])
        except BrokenPipeError:
            pass
        code = self._process.wait()
        raise WorkerFailed(
            f"a process that tokenized shard {k} ended with exit code {code}: {self._last_words()}"
        )

    def end(self, at_once: bool = False) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if at_once:
            self._process.kill()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return " | ".join(self._errors.read().splitlines()[-ERROR_LINES:])
