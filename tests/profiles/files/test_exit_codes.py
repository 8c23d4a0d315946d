"""Exit codes of errors: rejected input, a failed read that a retry may mend; the end of a failed rank."""

import errno
from types import SimpleNamespace

import pytest

from modeling.training.trainer import Trainer
from parallel import device as devices
from profiles.files import exit_codes


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (None, exit_codes.REJECTED),
        (FileNotFoundError(errno.ENOENT, "no such file"), exit_codes.REJECTED),
        (OSError(errno.ESTALE, "stale file handle"), 1),
        (PermissionError(errno.EACCES, "denied"), 1),
    ],
)
def test_failed_read_behind_an_error_is_retryable(cause, code):
    def program() -> int:
        try:
            if cause:
                raise cause
        except OSError:
            raise ValueError("corrupted") from None
        raise ValueError("rejected")

    assert exit_codes.code_of(program) == code


@pytest.mark.parametrize("library", ["CUBLAS", "CUDNN"])
def test_failed_allocation_of_a_library_is_out_of_memory(library):
    def program() -> int:
        raise RuntimeError(f"{library} error: {library}_STATUS_ALLOC_FAILED when calling `create(handle)`")

    assert exit_codes.code_of(program) == exit_codes.OUT_OF_MEMORY


def test_any_other_error_is_logged_and_ends_the_program(caplog):
    """Not raised: an interpreter that ends by itself waits for process groups that other ranks still use."""

    def program() -> int:
        raise TypeError("of a user's function")

    assert exit_codes.code_of(program) == 1
    assert "TypeError: of a user's function" in caplog.text


@pytest.mark.parametrize(("device", "error", "closes"), [("h100", OSError(), False), ("h100", None, True)])
def test_failed_rank_does_not_wait_for_the_others_to_close_process_groups(device, error, closes):
    """A mock of the mesh: NCCL's groups, whose destruction waits for all ranks, need GPUs."""
    closed = []
    trainer = object.__new__(Trainer)
    trainer.device, trainer._started = devices.ACCELERATORS[device], False
    trainer.mesh = SimpleNamespace(close=lambda: closed.append(True))
    trainer.__exit__(error and type(error), error, None)
    assert closed == [True] * closes
