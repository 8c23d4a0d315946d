"""SlurmLauncher on a real cluster: quoting, re-attaching, requeueing, cancelling, jobs Slurm ends."""

import contextlib
import json
import os
import platform
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from profiles import resolve
from profiles.errors import ProfileError
from tasks.launchers import Job, JobFailed, create, execute, slurm
from tasks.launchers.conformance import LauncherConformance
from tests.waiting import until, until_written

RANKS = """
import os, pathlib, signal, sys, time
rank, folder = os.environ.get("RANK", "alone"), pathlib.Path(sys.argv[1])
code = int(sys.argv[sys.argv.index("ends-with") + 1]) if "ends-with" in sys.argv else 143
def save(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the script repeats it
    (folder / f"saved-{rank}").touch()
    while code not in (0, 143) and rank != "3":
        time.sleep(1)  # until rank 3 fails
    sys.exit(code)
signal.signal(signal.SIGUSR1, save)
place = f"on {os.environ['SLURMD_NODENAME']} in {os.getcwd()}"
secret = os.environ.get("PREFECT_API_KEY")
# One write each: torchrun prefixes what it has read, whether or not it is a complete line.
print(f"rank {rank} of {os.environ.get('WORLD_SIZE')} {place}\\n", end="")
print(f"secret {secret} arguments {sys.argv[2:]}\\n", end="")
(folder / f"pid-{rank}").write_text(str(os.getpid()))
while not (folder / "finish").exists():
    time.sleep(0.05)
if "fail" in sys.argv and rank == "3":
    raise ValueError("what went wrong")
"""
HOSTILE = """it's "a" $(touch hit) `touch hit` ; touch hit # $HOME & é"""


@pytest.fixture
def place(tmp_path, monkeypatch, cluster):
    """A working folder whose name is full of shell syntax."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "ranks.py").write_text(RANKS)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("PREFECT_API_KEY", "planted")
    return folder


@pytest.fixture
def launcher():
    return launcher_of()


def launcher_of(*overrides: str):
    overrides = ("cluster.launcher=slurm", "cluster.nodes=2", "cluster.exclusive=false", *overrides)
    profile = resolve.load("tiny", overrides)
    return create(profile.cluster)


def job(folder: Path, *arguments: str, nodes: int = 1, processes: int = 2, saves: bool = False) -> Job:
    return Job(
        "work",
        "ranks",
        (str(folder), *arguments),
        folder / "logs",
        nodes=nodes,
        processes=processes,
        threads=1,
        key="k",
        attempt_file=folder / "attempt" if saves else None,
    )


def test_ranks_run_on_their_nodes_and_names_are_quoted(place, launcher, cluster, monkeypatch):
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")  # a site's default, with which jobs would lack PYTHONPATH
    (place / "finish").touch()
    argument = HOSTILE + " %j \\"
    execute(launcher, job(place, argument, nodes=2))
    log = (place / "logs/work.log").read_text()
    for rank in range(4):
        assert f"[rank {rank}] rank {rank} of 4 on n{1 + rank // 2} in {place}\n" in log
        assert f"[rank {rank}] secret None arguments {[argument]!r}\n" in log
    assert not list(place.rglob("hit"))
    until(lambda: not cluster.jobs())


@pytest.mark.parametrize("character", ["%", "\\", "\n"])
def test_folder_with_characters_special_to_slurm_is_rejected(place, launcher, character):
    with pytest.raises(ProfileError, match="Slurm cannot write a log"):
        launcher.submit(job(place / f"a{character}j"))


def test_options_reach_slurm_unchanged(place, cluster):
    comment = """a 'b' "c" \\ # $(touch hit)"""
    launcher = launcher_of(
        "cluster.partition=spot",
        "cluster.time=1:30:00",
        f"cluster.slurm=[{json.dumps('--mcs-label=' + comment)}, --nice=7]",
    )
    handle = launcher.submit(job(place, processes=0))
    shown = cluster.command("scontrol", "show", "job", handle.identifier)
    assert "Partition=spot" in shown
    assert "TimeLimit=01:30:00" in shown
    assert "Nice=7" in shown
    assert f"MCS_label={comment}" in shown
    launcher.cancel(handle, grace=0)


def test_saved_script_can_be_submitted_by_hand(place, launcher, cluster, monkeypatch):
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")  # a site's default: only the script's own variables
    handle = launcher.submit(replace(job(place), program="platform", arguments=("--terse",)))
    launcher.cancel(handle, grace=0)
    until(lambda: not cluster.jobs())
    (place / "logs/work.exit.json").unlink(missing_ok=True)  # of the cancelled job, if it had begun
    script = (place / "logs/work.sbatch").read_text()
    by_hand = next(line for line in script.splitlines() if "by hand" in line).partition(": ")[2]
    (place / "logs/work.log").unlink(missing_ok=True)
    cluster.command("bash", "-c", by_hand)
    until_written(place / "logs/work.exit.json")
    assert json.loads((place / "logs/work.exit.json").read_text())["exit_code"] == 0
    log = (place / "logs/work.log").read_text()
    assert [f"[rank {rank}] {platform.platform(terse=True)}\n" in log for rank in range(2)] == [True, True]
    assert shlex.quote(str(place)) in script
    assert "  --shutdown-timeout 120\n" in script


def test_failure_has_rank_node_and_last_lines(place, launcher):
    (place / "finish").touch()
    with pytest.raises(JobFailed, match="rank 3 on n2 ended with exit code 1") as failure:
        execute(launcher, job(place, "fail", nodes=2))
    assert "ValueError: what went wrong" in failure.value.detail
    assert failure.value.exit_code == 1


def test_another_process_re_attaches_to_the_running_job(place, launcher, cluster):
    alone = job(place, processes=0)
    first = launcher.submit(alone)
    until_written(place / "pid-alone")
    later = launcher_of()
    assert later.find(alone).identifier == first.identifier
    assert later.submit(alone).identifier == first.identifier
    assert len(cluster.jobs()) == 1
    # It ends once it is followed: `execute` would start one that had ended again.
    execute(later, alone, on_status=lambda status: (place / "finish").touch())
    assert (place / "logs/work.log").read_text().count("rank alone") == 1


def test_new_job_is_followed_while_an_older_one_is_in_its_epilog(place, launcher, cluster, monkeypatch):
    """Even if the response of sbatch is lost."""
    (place / "finish").touch()
    with cluster.slow_epilogs():
        with pytest.raises(JobFailed, match="rank 3 on n2"):
            execute(launcher, job(place, "fail", nodes=2))
        until(lambda: cluster.jobs("COMPLETING"))
        (place / "finish").unlink()
        replace_program(
            "sbatch", f'{shutil.which("sbatch")} "$@" > /dev/null; exit 1', place.parent, monkeypatch
        )
        handle = launcher.submit(job(place, "fail", nodes=2))
        ((older, *_),) = cluster.jobs("COMPLETING")
        assert [number for number, *_ in cluster.jobs("PENDING,RUNNING")] == [handle.identifier] != [older]
        assert json.loads((place / "logs/work.job.json").read_text())["identifier"] == handle.identifier
        assert launcher_of().find(job(place, "fail", nodes=2)).identifier == handle.identifier
    (place / "finish").touch()
    while (status := launcher.poll(handle)).running:
        time.sleep(0.2)
    assert "rank 3 on" in str(launcher.failure(handle, status))
    assert (place / "logs/work.log").read_text().count("rendezvous at") == 2


def replace_program(name: str, body: str, folder: Path, monkeypatch) -> None:
    """Replace a program by a shell script."""
    path = folder / "bin" / name
    path.parent.mkdir()
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def test_another_job_of_the_same_name_replaces_the_running_one_after_it_saved(place, launcher, cluster):
    first = launcher.submit(job(place, saves=True))
    until_written(*(place / f"pid-{rank}" for rank in range(2)))
    second = launcher_of()
    other = second.submit(job(place, nodes=2))
    assert (place / "saved-0").exists()
    until(lambda: not launcher.poll(first).running)
    until(lambda: [number for number, *_ in cluster.jobs()] == [other.identifier])
    second.cancel(other, grace=0)
    until(lambda: not cluster.jobs())


@pytest.mark.parametrize("code", [0, 71, 143])
def test_only_interrupted_jobs_are_requeued_at_the_time_limit(place, launcher, cluster, code, monkeypatch):
    """Ranks that finish or fail by themselves near the time limit determine the job's exit code."""
    if code == 143:  # the requeue begins to end the job's processes before scontrol says that it succeeded
        slow = place.parent / "scontrol"
        slow.write_text(
            f'#!/bin/sh\n{shutil.which("scontrol")} "$@" && {{ test "$1" != requeue || sleep 2; }}\n'
        )
        slow.chmod(0o755)
        monkeypatch.setenv("PATH", str(place.parent), prepend=os.pathsep)
    handle = launcher.submit(job(place, "ends-with", str(code), nodes=2, saves=True))
    until_written(*(place / f"pid-{rank}" for rank in range(4)))
    with cluster.slow_epilogs() if code == 143 else contextlib.nullcontext():
        cluster.command("scancel", "--batch", "--signal=USR1", handle.identifier)
        if code == 143:  # a requeued job shows as COMPLETING until its epilogs have ended
            until(lambda: cluster.jobs("COMPLETING") and (place / "logs/work.exit.json").exists())
            assert launcher.poll(handle).running
            assert (
                launcher.find(job(place, "ends-with", "143", nodes=2, saves=True)).identifier
                == handle.identifier
            )
    until(lambda: not launcher.poll(handle).running or cluster.jobs("PENDING"))
    log = (place / "logs/work.log").read_text()
    assert "time limit near" in log
    assert (place / "saved-3").exists()
    if code == 143:
        assert "saved; requeued" in log
        assert [number for number, *_ in cluster.jobs("PENDING")] == [handle.identifier]
        return
    assert "requeued" not in log
    status = launcher.poll(handle)
    if code == 0:
        assert status.exit_code == 0
    else:
        assert "rank 3 on n2 ended with exit code 71" in str(launcher.failure(handle, status))


def test_job_with_begin_option_is_not_released_early(place, cluster):
    """Slurm gives the same pending reason as for a requeued job, which the launcher releases."""
    launcher = launcher_of("cluster.slurm=['--begin=now+600']")
    handle = launcher.submit(job(place))
    deadline = time.monotonic() + slurm.HELD_SECONDS + 3 * slurm.CHANGED_SECONDS
    while time.monotonic() < deadline:
        assert launcher.poll(handle).running
        time.sleep(0.2)
    assert [number for number, *_ in cluster.jobs("PENDING")] == [handle.identifier]
    assert not (place / "logs/work.start").exists()
    launcher.cancel(handle, grace=0)


def test_job_that_a_node_failed_to_launch_is_released(place, launcher, cluster, monkeypatch):
    monkeypatch.setattr(slurm, "RELEASE_PAUSES", (0.0,))
    monkeypatch.setattr(slurm, "HELD_SECONDS", 0.0)
    (place / "finish").touch()
    statuses = []
    cluster.fail_next_prolog()
    execute(launcher, job(place, processes=0), on_status=statuses.append)
    assert [status.event[0] for status in statuses if status.event] == ["released"]
    assert any(status.pending for status in statuses)


def test_job_without_attempt_file_stops_at_once(place, launcher, cluster):
    handle = launcher.submit(job(place, nodes=2, processes=1))
    until_written(*(place / f"pid-{rank}" for rank in range(2)))
    begun = time.monotonic()
    cluster.command("scancel", "--batch", "--signal=USR2", handle.identifier)
    until(lambda: not cluster.tasks())
    assert time.monotonic() - begun < 15
    assert "stop requested" in (place / "logs/work.log").read_text()
    assert not (place / "saved-0").exists()
    assert launcher.poll(handle).exit_code not in (0, None)


def test_job_without_attempt_file_fails_at_its_time_limit(place, cluster):
    launcher = launcher_of("cluster.time=1", "cluster.time_left=59")
    alone = job(place, processes=0)
    number = launcher.submit(alone).identifier
    until_written(place / "pid-alone")
    cluster.command(
        "scontrol", "update", f"JobId={number}", "EndTime=now+2"
    )  # the shortest limit is a minute
    with pytest.raises(JobFailed, match=r"at its time limit \(1\); increase cluster\.time"):
        execute(launcher, alone)
    log = (place / "logs/work.log").read_text()
    assert log.count("rank alone") == 1
    until(lambda: not cluster.jobs())


def test_job_survives_an_unavailable_controller(place, launcher, cluster):
    handle = launcher.submit(job(place, processes=0))
    until_written(place / "pid-alone")
    cluster.stop_controller()
    try:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            assert launcher.poll(handle).running
            time.sleep(0.2)
    finally:
        cluster.start_controller()
    (place / "finish").touch()
    execute(launcher, job(place, processes=0))


def test_unreadable_record_does_not_stop_the_job(place, launcher, cluster):
    """The record's path is temporarily a folder, which cannot be read as a file."""
    record, asked = place / "logs/work.exit.json", []

    def watch():
        asked.append(len(asked))
        if (place / "pid-alone").exists() and not (place / "finish").exists():
            if asked[-1] % 10 == 5:
                record.mkdir(exist_ok=True)
            elif asked[-1] % 10 == 0 and record.exists():
                record.rmdir()
                (place / "finish").touch()

    execute(launcher, job(place, processes=0), watch)
    assert json.loads(record.read_text())["exit_code"] == 0
    assert not (place / "saved-alone").exists()
    assert (place / "logs/work.log").read_text().count("rank alone") == 1


def test_job_that_slurm_ends_without_a_record_fails(place, launcher, cluster, monkeypatch):
    monkeypatch.setattr(slurm, "GONE_SECONDS", 1.0)
    handle = launcher.submit(job(place, processes=0))
    until_written(place / "pid-alone")
    cluster.command("scancel", "--full", "--signal=KILL", handle.identifier)
    while (status := launcher.poll(handle)).running:
        time.sleep(0.2)
    assert f"Slurm ended job {handle.identifier}" in str(launcher.failure(handle, status))


@pytest.mark.usefixtures("cluster")
class TestConformance(LauncherConformance):
    """The conformance suite for any launcher."""

    @pytest.fixture(autouse=True)
    def _no_nfs(self, monkeypatch):
        """The file system shows records at once, so a killed job without one is noticed soon."""
        monkeypatch.setattr(slurm, "GONE_SECONDS", 10.0)

    def create(self):
        return launcher_of("cluster.nodes=1")
