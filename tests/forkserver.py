"""One fork server for all xdist workers: imports torch and the trainer, forks in milliseconds."""

import multiprocessing
import os
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver as servers
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import _forkserver as _server

PRELOADED = [
    "tests.cheap_torch",  # first, so that the rest is imported with few collections
    *("torch.distributed", "modeling.training.train", "modeling.training.evaluate"),
    *("tests.forked_jobs", "torch.utils.tensorboard", "numpy.ma"),  # of each job
    "s3fs",  # of those that read or write S3
    *("torch._inductor.compile_fx", "modeling.tracing.compile"),  # 3 s of CPU in each process that compiles
    "tests.instruction_sets",  # 1 s
    *("torch.distributed.pipelining", "tests.parity.harness"),  # of most ranks of tests/pool.py
    "tests.frozen",  # last
]
# Attributes of multiprocessing's server that another process needs to use it, the second from Python 3.14 on.
_SHARED = ("_forkserver_address", "_forkserver_authkey")

# Once: the server starts with the first process that anything forks.
multiprocessing.set_forkserver_preload(PRELOADED)


def forkserver() -> ForkServerContext:
    """Context whose processes are forked from the server."""
    return multiprocessing.get_context("forkserver")


def ensure_running() -> None:
    """Start the server if it does not run."""
    _server.ensure_running()


def start() -> dict[str, str | bytes]:
    """Start a server for the workers of this process, xdist's controller; returns how to use it.

    One for each worker would take 5 s of CPU each. The output of what it forks is lost, which without xdist pytest captures.
    """
    outputs = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        ensure_running()
    finally:
        for number, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, number)
            os.close(output)
        os.close(nowhere)
    return {name: value for name, value in vars(_server).items() if name in _SHARED}


def use(shared: dict[str, str | bytes]) -> None:
    """Fork processes from a server that another process has started, and that ends with it.

    If it ends before, such as by a kill for memory, this process starts one of its own, and warns.
    """
    connect = servers.connect_to_new_process
    vars(_server).update(shared, _forkserver_alive_fd=os.open(os.devnull, os.O_WRONLY))
    _server.ensure_running = resource_tracker.ensure_running

    def connect_or_start(descriptors: Sequence[int]) -> tuple[int, int]:
        try:
            return connect(descriptors)
        except (ConnectionError, FileNotFoundError):
            warnings.warn("the workers' fork server has ended; this worker starts its own", stacklevel=1)
            servers.connect_to_new_process = connect
            del _server.ensure_running
            start()
            return connect(descriptors)

    servers.connect_to_new_process = connect_or_start
