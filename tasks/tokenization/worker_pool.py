"""Workers that tokenize shards side by side: processes on this machine, or a Slurm job array.

A worker that dies loses only its shard, which the caller may retry; another worker replaces it. Workers exit when their stdin
closes, so none outlives this process by more than one shard. A job of an array that dies loses only its own shards, which the
next attempt finds missing: the store's locks and manifests ensure that each shard is made once and only seen complete.

Not loky, whose executor is broken once a worker dies, nor pebble, which replaces the worker as here: both call pickled functions
in processes of their own, while a job array starts the same worker as a command. Its log and its last words are read here, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

from pydantic import TypeAdapter

from profiles.arguments import to_arguments
from profiles.errors import ProfileError
from profiles.files.exit_codes import REJECTED
from profiles.schema import Cluster
from tasks import keys
from tasks.launchers import Job, JobFailed, create, execute
from tasks.launchers.base import START, job_environment
from tasks.sources.shard import SourceError
from tasks.store.artifacts import Artifact
from tasks.store.backends.folder import FolderBackend
from tasks.store.store import Store
from tasks.tokenization.dataset_plan import DatasetPlan
from tasks.tokenization.worker import ERROR_PREFIX

log = logging.getLogger(__name__)

EXIT_SECONDS = 5.0  # allowed for a worker to exit by itself
ERROR_LINES = 20
# Changes of a cluster for an array, whose jobs need no accelerator.
CPU_NODES = {"launcher": "slurm", "constraint": None, "exclusive": False, "device": "cpu"}
MAX_JOBS = 1000  # of an array; Slurm's default MaxArraySize is 1001


class PoolClosed(RuntimeError):
    """The pool was closed before a worker was free for this shard."""


class WorkerFailed(RuntimeError):
    """A worker died, or failed on a shard for a reason that may be temporary."""


class WorkerPool:
    """Up to `count` worker processes, started on demand; use as a context manager.

    Args:
        threads: of each worker's engine.
        token: for the hub; passed to the workers in their environment only.
    """

    def __init__(
        self, plan: DatasetPlan, store: Store, count: int, threads: int = 1, token: str | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trainshed-")
        path = Path(self._folder.name) / "plan.json"
        path.write_text(json.dumps(asdict(plan)))
        self._command = [sys.executable, "-P", "-m", START, "tasks.tokenization.worker", "--serve"]
        self._command += to_arguments(plan=path, store=store.uri, work_dir=store.work_dir, threads=threads)
        self._environment = worker_environment(token)
        self._free: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._workers: set[Worker] = set()
        self._logged: set[str] = set()
        self._log_lock = threading.Lock()
        self._closed = False
        for _ in range(count):
            self._free.put(None)  # not started yet

    def run(self, operation: str, k: int) -> Artifact:
        """Apply an operation to shard k on the next free worker; thread-safe.

        Raises:
            ProfileError, SourceError: the worker rejected the shard.
            WorkerFailed: the worker died or failed.
            PoolClosed: the pool was closed first.
        """
        worker = self._free.get()
        try:
            if self._closed:
                raise PoolClosed("the worker pool is closed")
            if worker is None:
                worker = Worker(self._command, self._environment, self._forward_log)
                self._workers.add(worker)
            return TypeAdapter(Artifact).validate_python(worker.ask(f"{operation} {k}", f"shard {k}"))
        except WorkerFailed:
            if worker is not None:
                worker.close()
                self._workers.discard(worker)
                worker = None
            raise
        finally:
            self._free.put(worker)

    def _forward_log(self, level: int, message: str) -> None:
        """Log a worker's message, once for all workers and shards."""
        with self._log_lock:
            if message not in self._logged:
                self._logged.add(message)
                log.log(level, "%s", message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._closed = True
        for worker in list(self._workers):
            worker.close(kill=failure[0] is not None)
        self._folder.cleanup()


def worker_environment(token: str | None) -> dict[str, str]:
    """Environment of a worker: a job's, with the token for the hub."""
    return {**job_environment(), **({"HF_TOKEN": token} if token else {})}


class Worker:
    """A process that reads requests from stdin and answers in lines of JSON, as `worker.py --serve`.

    As a context manager it ends with the block; if the block fails, even by Ctrl-C or a cancellation, at once.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        forward_log: Callable[[int, str], None] = log.log,
    ) -> None:
        self._forward_log = forward_log
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  `close` closes it
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, text=True, env=environment, stdin=pipe, stdout=pipe, stderr=self._errors
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close(kill=failure[0] is not None)

    def ask(self, request: str, what: str) -> Any:
        """The result of a request; `what` is its subject, for messages. Raises as `WorkerPool.run`."""
        try:
            self._requests.write(f"{request}\n")
            self._requests.flush()
            for line in self._answers:
                answer: dict[str, Any] = json.loads(line)
                if "log" in answer:
                    self._forward_log(*answer["log"])
                elif "done" in answer:
                    return answer["done"]
                elif "rejected" in answer:
                    raise ProfileError(*answer["rejected"])
                elif "corrupted" in answer:
                    raise SourceError(answer["corrupted"])
                else:
                    raise WorkerFailed(answer["failed"])
        except BrokenPipeError:
            pass
        code = self._process.wait()
        self._errors.seek(0)
        errors = " | ".join(self._errors.read().splitlines()[-ERROR_LINES:])
        raise WorkerFailed(f"the worker of {what} ended with exit code {code}: {errors}")

    def close(self, kill: bool = False) -> None:
        with contextlib.suppress(OSError):
            self._requests.close()
        if kill:
            self._process.kill()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._errors.close()


def process_shards(
    plan: DatasetPlan,
    store: Store,
    cluster: Cluster,
    operation: str,
    numbers: Sequence[int],
    token: str | None,
) -> None:
    """Apply an operation to shards in a job array on the partition `cluster.shards_partition`, and wait.

    Args:
        token: for the hub; passed in the jobs' environment and written to no file.

    Raises:
        SourceError: a job rejects a shard.
        JobFailed: a job failed for another reason.
    """
    contents = {"plan.json": asdict(plan), "shards.json": list(numbers)}
    # The folder depends on the contents, or flows that share a store would replace each other's arrays.
    folder = store.local_cache / "array" / keys.digest({"order": operation, **contents})
    for name, value in contents.items():
        FolderBackend(folder).write(name, json.dumps(value).encode())
    count = min(MAX_JOBS, len(numbers))
    options: tuple[object, ...] = (
        *("--plan", folder / "plan.json", "--shards", folder / "shards.json", "--of", count),
        *("--store", store.uri, "--work-dir", store.work_dir, "--operation", operation),
    )
    worker, arguments = "tasks.tokenization.worker", tuple(map(str, options))
    secrets = (("HF_TOKEN", token),) if token else ()
    job = Job(operation, worker, arguments, folder, array=count, secrets=secrets)
    launcher = create(cluster.model_copy(update={"partition": cluster.shards_partition, **CPU_NODES}))
    try:
        execute(launcher, job, grace=0)  # finished shards are in the store
    except JobFailed as failure:
        errors = [line for line in failure.detail.splitlines() if line.startswith(ERROR_PREFIX)]
        if failure.exit_code == REJECTED and errors:  # a retry would fail again
            raise SourceError(errors[-1].removeprefix(ERROR_PREFIX)) from failure
        raise
