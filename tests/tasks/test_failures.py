"""What the end of a job means to whoever waits for it."""

import pytest

from modeling import exits
from profiles import resolve
from tasks.failures import Hopeless, classified
from tasks.launchers import JobFailed


def failure(code: int, detail: str = "") -> JobFailed:
    return classified(resolve.load("tiny"), JobFailed("train: rank 1 ended; its log: x", detail, code))


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        (exits.OUT_OF_MEMORY, ""),
        (1, "[rank 1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (
            -9,
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
        ),
    ],
)
def test_want_of_memory_is_not_retried_and_names_what_takes_less(code, detail):
    found = failure(code, detail)
    assert isinstance(found, Hopeless)
    for change in ("train.micro_batch_size=2", "train.recompute=selective"):
        assert f"{change} (planned " in str(found)
    assert "rank 1 ended" in str(found)


def test_what_is_refused_is_said_in_its_own_words_and_not_retried():
    found = failure(
        exits.REFUSED, "[rank 0] refused\n[rank 0] ValueError: checkpoint.resume = 7: complete are 4, 8"
    )
    assert isinstance(found, Hopeless)
    assert str(found).startswith("checkpoint.resume = 7: complete are 4, 8 (")


@pytest.mark.parametrize("code", [-9, 1, None, exits.HUNG, exits.INTERRUPTED])
def test_everything_else_is_retried(code):
    assert not isinstance(failure(code), Hopeless)
