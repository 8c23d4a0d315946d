"""Attempt numbers, as the local launcher and Slurm's batch script count them."""

import subprocess
import time

import pytest

from tasks.launchers import base, batch


def count_locally(path):
    return base.next_attempt(path)


def count_in_batch_script(path):
    script = batch.COUNT_ATTEMPT.substitute(file=path) + '\necho "$attempt"'
    return int(
        subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()[-1]
    )


@pytest.mark.parametrize("count", [count_locally, count_in_batch_script])
def test_attempt_numbers_increase_from_any_file(tmp_path, count):
    path = tmp_path / "attempt"
    assert [count(path) for _ in range(3)] == [1, 2, 3]
    for corrupted in ("", "x"):
        path.write_text(corrupted)
        assert count(path) > time.time() - 60  # above every number that an earlier attempt may have
        assert int(path.read_text()) > time.time() - 60
    assert [each.name for each in tmp_path.iterdir()] == ["attempt"]
