"""Attempt numbers, as the local launcher and Slurm's batch script count them."""

import subprocess
import time

import pytest

from profiles import resolve
from profiles.files import state_files
from tasks.launchers import base, slurm_batch


def count_locally(path):
    return base.next_attempt(path)


def count_in_batch_script(path):
    slurm_batch.create_attempt_file(path)  # by the submission
    job = base.Job("train", "work", (), path.parent, attempt_file=path)
    text = slurm_batch.script(job, resolve.load("tiny").cluster, "submission")
    script = text[text.index("attempt_file=") : text.index('echo "job ')] + 'echo "$attempt"'
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


@pytest.mark.parametrize("count", [count_locally, count_in_batch_script])
def test_unreadable_attempt_file_does_not_restart_the_count(tmp_path, count, monkeypatch):
    """A link to itself exists but cannot be opened, like a file of a server that does not answer."""
    monkeypatch.setattr(state_files, "DELAYS", ())
    path = tmp_path / "attempt"
    path.symlink_to(path)
    with pytest.raises((OSError, subprocess.CalledProcessError)):
        count(path)
    assert path.is_symlink()
