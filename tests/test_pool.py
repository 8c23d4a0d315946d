"""Process pool: worlds of any size on the same workers; failures name their rank and are isolated."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError, mesh


def sum_over_ranks(start):
    number = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(number)
    return number.item()


def raise_on_one():
    if dist.get_rank() == 1:
        raise KeyError("no such weight")
    dist.barrier()


def die_on_one():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def hang_on_one():
    if dist.get_rank() == 1:
        time.sleep(600)


def coordinates():
    with mesh(context=2, tensor=2) as ranks:
        return ranks.context.rank, ranks.tensor.rank


def test_worlds_of_any_size_reduce_over_all_ranks(pool):
    for ranks in (2, 1, 8, 4, 2):
        assert pool.run(sum_over_ranks, ranks, start=1) == [ranks * (ranks + 1) / 2] * ranks


def test_results_are_in_rank_order(pool):
    assert pool.run(coordinates, 4) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("case", "timeout", "expected"),
    [
        (raise_on_one, 300, ["rank 1", "no such weight", "raise_on_one"]),
        (die_on_one, 300, ["rank 1", "died"]),
        (hang_on_one, 1, ["rank 1", "no result within 1 s"]),
    ],
)
def test_failed_rank_is_named_without_waiting_for_the_timeout(pool, case, timeout, expected):
    begun = time.monotonic()
    with pytest.raises(RankError) as failure:
        pool.run(case, 2, timeout=timeout)
    assert time.monotonic() - begun < 100  # generous: machines are loaded
    assert all(part in str(failure.value) for part in expected)
    assert pool.run(sum_over_ranks, 2, start=0) == [1.0, 1.0]


WITHOUT_SERVER = """
import multiprocessing, os, signal
from tests import forkserver
multiprocessing.set_forkserver_preload([])
shared, server = forkserver.start(), forkserver._server._forkserver_pid
forkserver._server._forkserver_pid = None  # as in another process
forkserver.use(shared)
for when in "before", "after":
    process = forkserver.forkserver().Process(target=os.getpid)
    process.start()
    process.join()
    assert process.exitcode == 0
    if when == "before":
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
"""


def test_worker_starts_a_fork_server_if_that_of_all_workers_has_ended():
    ended = subprocess.run([sys.executable, "-c", WITHOUT_SERVER], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("UserWarning: the workers' fork server has ended; this worker starts") == 1
