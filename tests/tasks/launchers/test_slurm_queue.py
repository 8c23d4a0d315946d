"""How the Slurm launcher queries the controller, and how often, with a fake squeue and a fake clock."""

import json
import os
from types import SimpleNamespace

import pytest

from profiles import resolve
from tasks.launchers import Handle, Job, create, slurm, slurm_queue


@pytest.fixture
def clock(monkeypatch):
    """A fake clock, which tests advance through `now`."""
    clock = SimpleNamespace(now=1000.0)
    for module in (slurm, slurm_queue):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(slurm, "_queue", slurm_queue.Queue())
    return clock


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """A file with what squeue prints, and a function that returns how often squeue was called."""
    rows, calls, program = tmp_path / "rows", tmp_path / "calls", tmp_path / "bin/squeue"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho >> {calls}\ncat {rows}\n")
    program.chmod(0o755)
    (program.parent / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/scontrol\n")
    (program.parent / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return rows, lambda: len(calls.read_text().splitlines())


def test_jobs_share_few_queries_and_their_records_are_noticed_at_once(clock, queue, tmp_path):
    rows, calls = queue
    rows.write_text("8|RUNNING|1:00|b|c|None\nx|y\n7|RUNNING|1:00|a|c|None\n")
    cluster = resolve.load("tiny", ("cluster.launcher=slurm",)).cluster
    jobs = [Handle(Job(name, "program", (), tmp_path), number) for name, number in (("a", "7"), ("b", "8"))]
    launchers = [create(cluster) for _ in jobs]
    for _ in range(600 * 5):
        clock.now += 0.2
        for launcher, handle in zip(launchers, jobs, strict=True):
            assert launcher.poll(handle).running
    assert calls() < 600 / slurm.POLL_SECONDS + 20

    # Slurm has killed job 8, whose record has no exit code; job 7 ended by itself.
    rows.write_text("8|COMPLETING|11:00|b|c|None\n")
    for name, code in (("a", 3), ("b", None)):
        record = {"job": {"a": "7", "b": "8"}[name], "exit_code": code, "nodes": "n1"}
        (tmp_path / f"{name}.exit.json").write_text(json.dumps(record))
    ended, killed = (launcher.poll(handle) for launcher, handle in zip(launchers, jobs, strict=True))
    assert (ended.running, ended.exit_code) == (False, 3)
    assert (killed.running, killed.exit_code) == (False, None)
    assert "Slurm ended job 8" in killed.note


def test_job_counts_as_lost_only_after_nfs_must_show_its_record(clock, queue, tmp_path, monkeypatch):
    """NFS caches that a file is absent, until the folder is listed or, on some mounts, for a minute."""
    rows, _ = queue
    rows.write_text("")
    launcher = create(resolve.load("tiny", ("cluster.launcher=slurm",)).cluster)
    written, shown = tmp_path / "record", tmp_path / "a.exit.json"
    written.write_text(json.dumps({"job": "7", "exit_code": 2, "nodes": "n1"}))
    begun = clock.now
    monkeypatch.setattr(slurm.os, "listdir", lambda folder: clock.now > begun + 60 and written.replace(shown))

    def poll(identifier):
        return launcher.poll(Handle(Job("a", "program", (), tmp_path), identifier))

    while (ended := poll("7")).running:
        clock.now += 0.2
    assert ended.exit_code == 2
    assert clock.now < begun + 60 + 2 * slurm.POLL_SECONDS
    monkeypatch.setattr(slurm.os, "listdir", lambda folder: [])
    begun = clock.now
    while (lost := poll("8")).running:
        clock.now += 0.2
    assert "Slurm ended job 8" in lost.note
    assert clock.now > begun + 60


def test_held_job_is_released_with_backoff_a_few_times_per_start(clock, queue, tmp_path):
    rows, _ = queue
    rows.write_text("7|PENDING|0:00|a|c|launch failed requeued held\n")
    launcher = create(resolve.load("tiny", ("cluster.launcher=slurm",)).cluster)
    events = []

    def poll(seconds: float) -> None:
        until = clock.now + seconds
        while clock.now < until:
            clock.now += 2
            status = launcher.poll(Handle(Job("a", "program", (), tmp_path), "7"))
            assert (status.running, status.pending) == (True, True)
            events.extend([status.event] if status.event else [])

    poll(3600)
    assert [name for name, _ in events] == ["released"] * len(slurm.RELEASE_PAUSES) + ["held"]
    assert events[-1][1].endswith("see sinfo --list-reasons, then run scontrol release 7")
    (tmp_path / "a.start").write_text("7.1\n")  # it has run in the meantime
    poll(60)
    assert [name for name, _ in events[-2:]] == ["released"] * 2
    assert set((tmp_path / "scontrol").read_text().splitlines()) == {"release 7"}


@pytest.mark.parametrize("inside", [True, False])
def test_submitted_job_inherits_no_variables_of_the_job_that_submits_it(monkeypatch, inside):
    of_the_job = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURMD_NODENAME": "n1",
        "SRUN_CPUS_PER_TASK": "1",
        "SBATCH_MEM_BIND": "local",
    }
    others = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "c1", "SBATCH_ACCOUNT": "research"}
    for name, value in (of_the_job | others).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SQUEUE_USERS", "hidden")
    monkeypatch.setenv("COMMENT", "na\udcefve")  # latin-1, in a process whose strings are UTF-8
    if inside:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    else:  # where the user has set them, as defaults
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    found = dict(line.partition("=")[::2] for line in slurm_queue.run_command(["env"]).splitlines())
    assert found["COMMENT"] == "na\N{REPLACEMENT CHARACTER}ve"
    names = (*of_the_job, *others, "SLURM_JOB_ID", "SQUEUE_USERS")
    assert {name: found[name] for name in names if name in found} == others | ({} if inside else of_the_job)
