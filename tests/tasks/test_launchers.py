"""The local launcher with real processes: small programs under torchrun, killed, cancelled and found again."""

import errno
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tasks.launchers import Job, JobFailed, base, create, execute
from tasks.launchers.local import MARKER, LocalLauncher
from tasks.launchers.log_follower import LogFollower

RANKS = """
import os, pathlib, signal, sys, time
rank, folder = os.environ.get("RANK", "alone"), pathlib.Path(sys.argv[1])
def save(*_):
    (folder / f"saved-{rank}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else save)
print("rank", rank, "here with secret", os.environ.get("PREFECT_API_KEY"))
(folder / f"pid-{rank}").write_text(str(os.getpid()))
while not (folder / "go-on").exists():
    time.sleep(0.05)
if "fail" in sys.argv and rank == "1":
    raise ValueError("what went wrong")
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    (tmp_path / "ranks.py").write_text(RANKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_KEY", "planted")

    def make(*arguments: str, processes: int = 2) -> Job:
        return Job(
            "work", "ranks", (str(tmp_path), *arguments), tmp_path / "logs", processes=processes, threads=1
        )

    return make


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        time.sleep(0.05)


def pids(folder: Path) -> list[int]:
    wait_for(folder / "pid-0", folder / "pid-1")
    return [int((folder / f"pid-{rank}").read_text()) for rank in (0, 1)]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def leftovers(folder: Path) -> list[psutil.Process]:
    """Every process that carries the marker of a job of this test."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            ours = MARKER in environment and environment.get("PYTHONPATH") == str(folder)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_every_rank_runs_and_logs_into_the_folder(job, tmp_path, capfd):
    (tmp_path / "go-on").touch()
    execute(create("local"), job())
    text = (tmp_path / "logs" / "work.log").read_text()
    assert "[rank 0] rank 0 here with secret None" in text
    assert "[rank 1] rank 1 here with secret None" in text
    assert "rank" not in capfd.readouterr().out


def test_a_plain_process_needs_no_torchrun(job, tmp_path):
    (tmp_path / "go-on").touch()
    execute(create("local"), job(processes=0))
    assert (tmp_path / "logs" / "work.log").read_text() == "rank alone here with secret None\n"


def test_a_killed_rank_fails_the_job_and_takes_the_others_along(job, tmp_path):
    def kill_rank_1():
        if (tmp_path / "pid-1").exists() and not gone(pids(tmp_path)[1]):
            os.kill(pids(tmp_path)[1], signal.SIGKILL)

    with pytest.raises(JobFailed, match="rank 1 was killed by SIGKILL"):
        execute(create("local"), job(), kill_rank_1)
    assert all(gone(pid) for pid in pids(tmp_path))


def test_a_failure_brings_the_last_lines_of_the_rank_that_failed_first(job, tmp_path):
    (tmp_path / "go-on").touch()
    with pytest.raises(JobFailed, match="rank 1 ended with exit code 1") as failure:
        execute(create("local"), job("fail"))
    assert "ValueError: what went wrong" in failure.value.detail
    assert "rank 0" not in failure.value.detail


def test_an_interrupt_lets_the_ranks_save_and_leaves_nothing_running(job, tmp_path):
    def interrupt():
        if (tmp_path / "pid-0").exists() and (tmp_path / "pid-1").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(create("local"), job(), interrupt)
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()
    assert all(gone(pid) for pid in pids(tmp_path))


def test_ranks_that_do_not_listen_are_ended_by_force(job, tmp_path):
    launcher = LocalLauncher()
    handle = launcher.submit(job("stubborn"))
    running = pids(tmp_path)
    launcher.cancel(handle, grace=0.5)
    assert all(gone(pid) for pid in running)


def test_ranks_do_not_outlive_a_torchrun_that_was_killed(job, tmp_path):
    launcher = LocalLauncher()
    handle = launcher.submit(job("stubborn"))
    running = pids(tmp_path)
    os.kill(psutil.Process(running[0]).ppid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while launcher.poll(handle).running:
        assert time.monotonic() < deadline
    assert launcher.poll(handle).exit_code == -signal.SIGKILL
    while not all(gone(pid) for pid in running):
        assert time.monotonic() < deadline


def test_another_orchestrator_joins_the_running_job(job, tmp_path):
    first = LocalLauncher()
    handle = first.submit(job())
    running = pids(tmp_path)
    (tmp_path / "go-on").touch()
    execute(create("local"), job())  # would overwrite the pid files, had it started the job once more
    assert pids(tmp_path) == running
    assert (tmp_path / "logs" / "work.log").read_text().count("rank 0 here") == 1
    while (status := first.poll(handle)).running:
        time.sleep(0.05)
    assert status.exit_code == 0
    assert create("local").find(job()) is None


def test_another_job_of_the_same_name_takes_the_place_of_the_running_one(job, tmp_path):
    first = LocalLauncher()
    handle = first.submit(job())
    running = pids(tmp_path)
    (tmp_path / "pid-alone").write_text("")
    second = create("local")
    other = second.submit(job(processes=0))
    assert all(gone(pid) for pid in running)
    assert (tmp_path / "saved-0").exists()
    deadline = time.monotonic() + 30  # its torchrun has ended, but takes a moment to be gone
    while first.poll(handle).running:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second.cancel(other, grace=5)


class Forgetful(LocalLauncher):
    """Cannot say how a job is doing while there is a file `stale`, as on a file server that is started again."""

    def poll(self, handle):
        if (handle.job.folder.parent / "stale").exists():
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().poll(handle)


def test_what_cannot_be_read_for_a_while_ends_no_job(job, tmp_path, caplog):
    """Neither how the job is doing, nor what is shown of it."""
    log, tail, asked = tmp_path / "logs/work.log", LogFollower(tmp_path / "logs/work.log"), []

    def watch():
        asked.append(len(asked))
        if asked[-1] == 5:
            (tmp_path / "stale").touch()
            log.rename(log.with_suffix(".kept"))  # in which the job writes on
            log.mkdir()
        if asked[-1] == 10:
            (tmp_path / "stale").unlink()
            log.rmdir()
            log.with_suffix(".kept").rename(log)
            (tmp_path / "go-on").touch()
        if asked[-1] == 11:
            raise ZeroDivisionError("a bug in what is shown")
        tail.lines()

    execute(Forgetful(), job(), watch)
    assert log.read_text().count("rank 0 here") == 1
    assert not (tmp_path / "saved-0").exists()
    said = [record.getMessage() for record in caplog.records]
    assert sum("Stale file handle" in line and "is asked again" in line for line in said) == 1
    assert sum("IsADirectoryError" in line and "runs on" in line for line in said) == 1
    assert sum("a bug in what is shown" in line for line in said) == 1


def test_a_job_that_nobody_can_tell_of_is_left_running_and_joined_later(job, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "PATIENCE", 0.5)
    (tmp_path / "stale").touch()
    with pytest.raises(JobFailed, match="the same run again joins it"):
        execute(Forgetful(), job())
    running = pids(tmp_path)
    assert not any(gone(pid) for pid in running)
    (tmp_path / "go-on").touch()
    execute(create("local"), job())
    assert pids(tmp_path) == running


def test_a_job_that_takes_too_long_is_ended(job, tmp_path):
    with pytest.raises(TimeoutError, match="longer than 1 s"):
        execute(create("local"), job("stubborn", processes=0), timeout=1, grace=0.5)
    assert gone(int((tmp_path / "pid-alone").read_text()))


@pytest.fixture(autouse=True)
def _no_process_is_left(tmp_path):
    yield
    assert leftovers(tmp_path) == []
