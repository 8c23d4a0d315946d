"""Exit codes of errors: the input is rejected, or a file could not be read and a retry may succeed."""

import errno

import pytest

from modeling import exit_codes


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
