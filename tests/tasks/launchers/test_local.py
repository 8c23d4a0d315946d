"""LocalLauncher with real torchrun processes: failures, signals, re-attaching, unreadable status."""

import errno
import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from profiles.files.jsonl import LogFollower
from tasks.launchers import Job, JobFailed, base, execute, local
from tasks.launchers.conformance import ModuleJob
from tasks.launchers.local import MARKER, LocalLauncher
from tests.waiting import gone, until, until_written

pytestmark = pytest.mark.slow

RANKS = """
import json, os, pathlib, signal, sys, time

def main():
    rank, folder = os.environ.get("RANK", "alone"), pathlib.Path(sys.argv[1])
    def save(*_):
        (folder / f"saved-{rank}").touch()
        sys.exit(143)
    ignores = "all-ignore-sigterm" in sys.argv or "rank-1-ignores-sigterm" in sys.argv and rank == "1"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignores else save)
    print(f"rank {rank} here with secret {os.environ.get('PREFECT_API_KEY')}\\n", end="")  # one write: lines of ranks may mix
    (folder / f"environment-{rank}").write_text(json.dumps(dict(os.environ)))
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    while not (folder / "finish").exists():
        time.sleep(0.05)
    if "fail" in sys.argv and rank == "1":
        while not (folder / "pid-0").exists():
            time.sleep(0.05)
        raise ValueError("what went wrong")
    return 0

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def kind() -> type[Job]:
    """Of jobs with ranks."""
    return ModuleJob


# Ranks are forked, or programs of their own, as on Neuron.
started_either_way = pytest.mark.parametrize("kind", [ModuleJob, Job], ids=["forked", "own"])


@pytest.fixture
def job(kind, tmp_path, monkeypatch):
    (tmp_path / "ranks.py").write_text(RANKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PREFECT_API_KEY", "planted")

    def make(*arguments: str, processes: int = 2) -> Job:
        given = ("work", "ranks", (str(tmp_path), *arguments), tmp_path / "logs")
        return (kind if processes else Job)(*given, processes=processes, threads=1)

    return make


@pytest.fixture(autouse=True)
def _no_process_left(tmp_path):
    yield
    assert job_processes(tmp_path) == []


def job_processes(folder: Path) -> list[psutil.Process]:
    """Processes that carry the marker of a job of this test."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            ours = MARKER in environment and environment.get("PYTHONPATH", "").startswith(str(folder))
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def pids(folder: Path, *ranks: int | str) -> list[int]:
    files = [folder / f"pid-{rank}" for rank in ranks or (0, 1)]
    until_written(*files)
    return [int(file.read_text()) for file in files]


@started_either_way
def test_failure_has_the_last_lines_of_the_failed_rank_and_the_log_those_of_all(job, kind, tmp_path, capfd):
    (tmp_path / "finish").touch()
    code = 2 if kind is ModuleJob else 1  # of Python
    with pytest.raises(JobFailed, match=f"rank 1 ended with exit code {code}") as failure:
        execute(LocalLauncher(), job("fail"))
    assert "ValueError: what went wrong" in failure.value.detail
    assert "rank 0" not in failure.value.detail
    assert "^^^" not in failure.value.detail
    text = (tmp_path / "logs" / "work.log").read_text()
    assert "[rank 0] rank 0 here with secret None" in text
    assert "[rank 1] rank 1 here with secret None" in text
    assert "rank" not in capfd.readouterr().out


def test_plain_process_runs_without_torchrun(job, tmp_path):
    (tmp_path / "finish").touch()
    execute(LocalLauncher(), job(processes=0))
    assert (tmp_path / "logs" / "work.log").read_text() == "rank alone here with secret None\n"


def test_killed_rank_fails_the_job_and_ends_the_other_ranks(job, tmp_path):
    def kill_rank_1():
        if (tmp_path / "pid-1").exists() and not gone(pids(tmp_path)[1]):
            os.kill(pids(tmp_path)[1], signal.SIGKILL)

    with pytest.raises(JobFailed, match="rank 1 was killed by SIGKILL"):
        execute(LocalLauncher(), job(), kill_rank_1)
    assert all(gone(pid) for pid in pids(tmp_path))


def test_interrupt_lets_ranks_save_and_kills_those_that_ignore_sigterm(job, tmp_path, caplog):
    def interrupt():
        if (tmp_path / "pid-0").exists() and (tmp_path / "pid-1").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(LocalLauncher(), job("rank-1-ignores-sigterm"), interrupt, grace=5)
    assert (tmp_path / "saved-0").exists()
    assert not (tmp_path / "saved-1").exists()
    assert all(gone(pid) for pid in pids(tmp_path))
    # Only a job that counts its attempts has a checkpoint to save.
    assert [record.getMessage() for record in caplog.records] == ["stopping work"]


@started_either_way
def test_torchrun_gives_ranks_the_grace_to_save(job, tmp_path):
    launcher = LocalLauncher(grace=1)
    handle = launcher.submit(job("rank-1-ignores-sigterm"))
    pids(tmp_path)
    launcher.cancel(handle, grace=60)  # torchrun kills the rank before, which by default it does after 30 s
    log = handle.job.log_file.read_text()
    assert "forcefully exiting" in log, log


def test_job_interrupted_while_it_is_submitted_is_stopped(job, tmp_path):
    class Interrupted(LocalLauncher):
        def submit(self, job):
            super().submit(job)
            raise KeyboardInterrupt

    launcher = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        execute(launcher, job(), grace=5)
    assert launcher.find(job()) is None


def test_job_whose_submission_was_interrupted_is_found_by_the_next_process(job, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "_wait_until_marked", interrupt)
    first, later = LocalLauncher(), LocalLauncher()
    with pytest.raises(KeyboardInterrupt):
        first.submit(job(processes=0))
    pids(tmp_path, "alone")
    later.cancel(later.find(job(processes=0)), grace=5)
    assert (tmp_path / "saved-alone").exists()


@started_either_way
def test_ranks_are_killed_when_torchrun_was_killed(job, kind, tmp_path):
    launcher = LocalLauncher()
    handle = launcher.submit(job("all-ignore-sigterm"))
    running = pids(tmp_path)
    rank = psutil.Process(running[0])
    sockets = [each for each in rank.parent().net_connections() if each.status == psutil.CONN_LISTEN]
    assert {each.laddr.ip for each in sockets} == {"127.0.0.1"}  # other machines cannot reach the rendezvous
    environment = json.loads((tmp_path / "environment-0").read_text())
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    named = [psutil.Process(pid).name() for pid in running] == ["rank 0", "rank 1"]
    assert named == (kind is ModuleJob)
    rank.parent().kill()
    until(lambda: not launcher.poll(handle).running)
    assert launcher.poll(handle).exit_code == -signal.SIGKILL
    until(lambda: all(gone(pid) for pid in running))


def test_another_process_re_attaches_to_the_running_job(job, tmp_path):
    first = LocalLauncher()
    handle = first.submit(job())
    running = pids(tmp_path)
    (tmp_path / "finish").touch()
    execute(LocalLauncher(), job())  # a second start would overwrite the pid files
    assert pids(tmp_path) == running
    assert (tmp_path / "logs" / "work.log").read_text().count("rank 0 here") == 1
    while (status := first.poll(handle)).running:
        time.sleep(0.05)
    assert status.exit_code == 0
    assert LocalLauncher().find(job()) is None


def test_another_job_of_the_same_name_replaces_the_running_one_after_it_saved(job, tmp_path):
    first = LocalLauncher()
    handle = first.submit(job())
    running = pids(tmp_path)
    second = LocalLauncher()
    other = second.submit(job(processes=0))
    assert all(gone(pid) for pid in running)
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()
    until(lambda: not first.poll(handle).running)  # torchrun has ended but is not reaped yet
    second.cancel(other, grace=5)


class UnreadableStatus(LocalLauncher):
    """Fails to read the status while the file `stale` exists, as when a file server restarts."""

    def poll(self, handle):
        if (handle.job.folder.parent / "stale").exists():
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().poll(handle)


def test_unreadable_status_or_progress_does_not_stop_the_job(job, tmp_path, caplog):
    log, follower, calls = tmp_path / "logs/work.log", LogFollower(tmp_path / "logs/work.log"), []

    def watch():
        calls.append(len(calls))
        if calls[-1] == 5:
            (tmp_path / "stale").touch()
            log.rename(log.with_suffix(".moved"))  # the job still writes to it
            log.mkdir()
        if calls[-1] == 10:
            (tmp_path / "stale").unlink()
            log.rmdir()
            log.with_suffix(".moved").rename(log)
            (tmp_path / "finish").touch()
        if calls[-1] == 11:
            raise ZeroDivisionError("a bug in the progress display")
        follower.lines()

    execute(UnreadableStatus(), job(processes=0), watch)
    assert log.read_text().count("rank alone here") == 1
    assert not (tmp_path / "saved-alone").exists()
    messages = [record.getMessage() for record in caplog.records]
    assert sum("Stale file handle" in message and "retrying" in message for message in messages) == 1
    assert sum("IsADirectoryError" in message and "keeps running" in message for message in messages) == 1
    assert sum("a bug in the progress display" in message for message in messages) == 1


def test_job_of_unknown_status_is_left_running_and_can_be_re_attached(job, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "STATUS_TIMEOUT", 0.5)
    (tmp_path / "stale").touch()
    with pytest.raises(JobFailed, match="start the same run again to re-attach"):
        execute(UnreadableStatus(), job(processes=0))
    (running,) = pids(tmp_path, "alone")
    assert not gone(running)
    execute(LocalLauncher(), job(processes=0), (tmp_path / "finish").touch)  # ends once it is attached to
    assert pids(tmp_path, "alone") == [running]


def test_job_that_exceeds_its_timeout_is_killed(job, tmp_path):
    started = partial(until_written, tmp_path / "pid-alone")  # before its time is compared
    with pytest.raises(TimeoutError, match="exceeded 2 s"):
        execute(LocalLauncher(), job("all-ignore-sigterm", processes=0), started, timeout=2, grace=0.5)
    assert gone(*pids(tmp_path, "alone"))
