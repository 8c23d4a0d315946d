"""The pool of workers: worlds of every size from the same processes, and failures that name their rank and hurt nobody else."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError, mesh


def total(start):
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
        time.sleep(60)


def places():
    with mesh(context=2, tensor=2) as made:
        return made.coordinates()


def test_worlds_of_every_size_sum_over_their_ranks(pool):
    for ranks in (2, 1, 8, 4, 2):
        assert pool.run(total, ranks, start=1) == [ranks * (ranks + 1) / 2] * ranks


def test_results_come_in_the_order_of_the_ranks(pool):
    assert [place["context"] for place in pool.run(places, 4)] == [0, 0, 1, 1]
    assert [place["tensor"] for place in pool.run(places, 4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("case", "timeout", "words"),
    [
        (raise_on_one, 30, ["rank 1", "no such weight", "raise_on_one"]),
        (die_on_one, 30, ["rank 1", "died"]),
        (hang_on_one, 1, ["rank 1", "no answer in 1 s"]),
    ],
)
def test_a_failing_rank_is_named_within_seconds_and_the_next_case_runs(pool, case, timeout, words):
    begun = time.monotonic()
    with pytest.raises(RankError) as failure:
        pool.run(case, 2, timeout=timeout)
    assert time.monotonic() - begun < 15
    assert all(word in str(failure.value) for word in words)
    assert pool.run(total, 2, start=0) == [1.0, 1.0]
