"""The Slurm launcher against a real cluster: what runs where, under which names, how it is found again and ended."""

import json
import shlex
import time
from pathlib import Path

import pytest

from profiles import resolve
from profiles.errors import ProfileError
from tasks.launchers import Job, JobFailed, create, execute, slurm
from tests.slurm.conftest import until

RANKS = """
import os, pathlib, signal, sys, time
rank, folder = os.environ.get("RANK", "alone"), pathlib.Path(sys.argv[1])
code = int(sys.argv[sys.argv.index("ends-with") + 1]) if "ends-with" in sys.argv else 143
def save(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # which comes again and again
    (folder / f"saved-{rank}").touch()
    while code not in (0, 143) and rank != "3":
        time.sleep(1)  # for the one that failed
    sys.exit(code)
signal.signal(signal.SIGUSR1, save)
print("rank", rank, "of", os.environ.get("WORLD_SIZE"), "on", os.environ["SLURMD_NODENAME"], "in", os.getcwd())
print("secret", os.environ.get("PREFECT_API_KEY"), "arguments", sys.argv[2:])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
while not (folder / "go-on").exists():
    time.sleep(0.05)
if "fail" in sys.argv and rank == "3":
    raise ValueError("what went wrong")
"""
HOSTILE = """it's "a" $(touch hit) `touch hit` ; touch hit # $HOME & é"""


@pytest.fixture
def place(tmp_path, monkeypatch, cluster):
    """A folder with a hostile name, in which the launcher is called."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "ranks.py").write_text(RANKS)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("PREFECT_API_KEY", "planted")
    return folder


@pytest.fixture
def launcher():
    return launcher_of()


def launcher_of(*overrides: str):
    overrides = ("cluster.launcher=slurm", "cluster.nodes=2", "cluster.exclusive=false", *overrides)
    profile = resolve.load("tiny", overrides)
    return create("slurm", profile.cluster)


def job(folder: Path, *arguments: str, nodes: int = 2, processes: int = 2, saves: bool = False) -> Job:
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


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        time.sleep(0.05)


def test_every_rank_runs_and_nothing_in_a_name_is_taken_for_shell(place, launcher, cluster):
    (place / "go-on").touch()
    argument = HOSTILE + " %j \\"
    execute(launcher, job(place, argument))
    log = (place / "logs/work.log").read_text()
    for rank in range(4):
        assert f"[rank {rank}] rank {rank} of 4 on n{1 + rank // 2} in {place}\n" in log
        assert f"[rank {rank}] secret None arguments {[argument]!r}\n" in log
    assert not list(place.rglob("hit"))
    assert cluster.jobs() == []


@pytest.mark.parametrize("character", ["%", "\\", "\n"])
def test_a_folder_that_slurm_would_misread_is_refused(place, launcher, character):
    with pytest.raises(ProfileError, match="Slurm cannot write a log"):
        launcher.submit(job(place / f"a{character}j"))


def test_options_reach_slurm_as_they_are(place, cluster):
    comment = """a 'b' "c" \\ # $(touch hit)"""
    launcher = launcher_of(
        "cluster.partition=spot",
        "cluster.time=1:30:00",
        f"cluster.slurm=[{json.dumps('--mcs-label=' + comment)}, --nice=7]",
    )
    handle = launcher.submit(job(place))
    shown = cluster.command("scontrol", "show", "job", handle.identifier)
    assert "Partition=spot" in shown
    assert "TimeLimit=01:30:00" in shown
    assert "Nice=7" in shown
    assert f"MCS_label={comment}" in shown
    launcher.cancel(handle, grace=0)


def test_the_script_that_is_kept_can_be_submitted_by_hand(place, launcher, cluster):
    handle = launcher.submit(job(place))
    launcher.cancel(handle, grace=0)
    script = (place / "logs/work.sbatch").read_text()
    by_hand = next(line for line in script.splitlines() if "by hand" in line).partition(": ")[2]
    (place / "go-on").touch()
    cluster.command("bash", "-c", by_hand)
    wait_for(place / "logs/work.exit.json")
    assert json.loads((place / "logs/work.exit.json").read_text())["exit_code"] == 0
    assert shlex.quote(str(place)) in script


def test_a_failure_names_the_rank_its_node_and_its_last_lines(place, launcher):
    (place / "go-on").touch()
    with pytest.raises(JobFailed, match="rank 3 on n2 ended with exit code 1") as failure:
        execute(launcher, job(place, "fail"))
    assert "ValueError: what went wrong" in failure.value.detail
    assert failure.value.exit_code == 1


def test_whoever_comes_later_joins_the_job_that_runs(place, launcher, cluster):
    first = launcher.submit(job(place))
    wait_for(place / "pid-0")
    later = launcher_of()
    assert later.find(job(place)).identifier == first.identifier
    assert later.submit(job(place)).identifier == first.identifier
    assert len(cluster.jobs()) == 1
    (place / "go-on").touch()
    execute(later, job(place))
    assert (place / "logs/work.log").read_text().count("rank 0 of 4") == 1


def test_another_job_of_the_same_name_takes_its_place_after_it_has_saved(place, launcher, cluster):
    first = launcher.submit(job(place, saves=True))
    wait_for(*(place / f"pid-{rank}" for rank in range(4)))
    second = launcher_of()
    other = second.submit(job(place, nodes=1))
    assert (place / "saved-0").exists()
    assert not launcher.poll(first).running
    assert [number for number, *_ in cluster.jobs()] == [other.identifier]
    second.cancel(other, grace=0)
    assert cluster.jobs() == []


@pytest.mark.parametrize("code", [0, 71, 143])
def test_only_what_was_interrupted_before_the_time_limit_is_queued_again(place, launcher, cluster, code):
    """Where the ranks end by themselves while the time is nearly over, that is how the job ended."""
    handle = launcher.submit(job(place, "ends-with", str(code), saves=True))
    wait_for(*(place / f"pid-{rank}" for rank in range(4)))
    cluster.command("scancel", "--batch", "--signal=USR1", handle.identifier)
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


def test_a_job_that_is_to_begin_later_is_not_started_before(place, cluster):
    """Slurm gives the same reason for it as for one that it holds after it was queued again, which is started."""
    launcher = launcher_of("cluster.slurm=['--begin=now+600']")
    handle = launcher.submit(job(place))
    deadline = time.monotonic() + slurm.HELD_SECONDS + 3 * slurm.POLL_SECONDS
    while time.monotonic() < deadline:
        assert launcher.poll(handle).running
        time.sleep(0.2)
    assert [number for number, *_ in cluster.jobs("PENDING")] == [handle.identifier]
    assert not (place / "logs/work.start").exists()
    launcher.cancel(handle, grace=0)


def test_what_does_not_save_is_stopped_at_once(place, launcher, cluster):
    handle = launcher.submit(job(place))
    wait_for(*(place / f"pid-{rank}" for rank in range(4)))
    begun = time.monotonic()
    cluster.command("scancel", "--batch", "--signal=USR2", handle.identifier)
    until(lambda: not cluster.tasks())
    assert time.monotonic() - begun < 15
    assert "stop requested" in (place / "logs/work.log").read_text()
    assert not (place / "saved-0").exists()
    assert launcher.poll(handle).exit_code not in (0, None)


def test_what_does_not_save_ends_at_its_time_limit_which_is_said(place, cluster):
    launcher = launcher_of("cluster.time=1", "cluster.time_left=59")
    number = launcher.submit(job(place)).identifier
    wait_for(place / "pid-0")
    cluster.command(
        "scontrol", "update", f"JobId={number}", "EndTime=now+2"
    )  # a minute is the shortest limit
    with pytest.raises(JobFailed, match=r"at its time limit \(1\); increase cluster\.time"):
        execute(launcher, job(place))
    log = (place / "logs/work.log").read_text()
    assert log.count("rendezvous at") == 1
    assert cluster.jobs() == []


def test_an_array_runs_each_of_its_jobs_and_fails_where_one_does(place, launcher):
    def array(*arguments: str) -> Job:
        return Job("parts", "part", arguments, place / "logs", array=5, key="k")

    # argparse is not what is tried here: the number comes last, as --index NUMBER.
    (place / "part.py").write_text(
        "import sys\nnumber = sys.argv[sys.argv.index('--index') + 1]\nprint('part', number)\nsys.exit(number in sys.argv[1:2])"
    )
    execute(launcher, array("none"))
    log = (place / "logs/parts.log").read_text()
    assert sorted(line for line in log.splitlines() if line.startswith("part ")) == [
        f"part {n}" for n in range(5)
    ]
    with pytest.raises(JobFailed, match="exit code 1"):
        execute(launcher, array("3"))


def test_a_controller_that_is_gone_for_a_while_changes_nothing(place, launcher, cluster):
    handle = launcher.submit(job(place))
    wait_for(place / "pid-0")
    cluster.stop_controller()
    try:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            assert launcher.poll(handle).running
            time.sleep(0.2)
    finally:
        cluster.start_controller()
    (place / "go-on").touch()
    execute(launcher, job(place))


def test_a_record_that_cannot_be_read_for_a_while_ends_no_job(place, launcher, cluster):
    """The record's place is taken by a folder, which cannot be read as a file either."""
    record, asked = place / "logs/work.exit.json", []

    def watch():
        asked.append(len(asked))
        if (place / "pid-3").exists() and not (place / "go-on").exists():
            if asked[-1] % 10 == 5:
                record.mkdir(exist_ok=True)
            elif asked[-1] % 10 == 0 and record.exists():
                record.rmdir()
                (place / "go-on").touch()

    execute(launcher, job(place), watch)
    assert json.loads(record.read_text())["exit_code"] == 0
    assert not (place / "saved-0").exists()
    assert (place / "logs/work.log").read_text().count("rendezvous at") == 1


def test_what_slurm_ends_without_a_record_is_said_to_be_so(place, launcher, cluster, monkeypatch):
    monkeypatch.setattr(slurm, "GONE_SECONDS", 1.0)
    handle = launcher.submit(job(place, nodes=1))
    wait_for(place / "pid-0")
    cluster.command("scancel", "--full", "--signal=KILL", handle.identifier)
    while (status := launcher.poll(handle)).running:
        time.sleep(0.2)
    assert f"Slurm ended job {handle.identifier}" in str(launcher.failure(handle, status))
