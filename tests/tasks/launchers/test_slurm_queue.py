"""How often the Slurm launcher queries the controller, with a fake squeue and a fake clock."""

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
    (program.parent / "scontrol").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return rows, lambda: len(calls.read_text().splitlines())


def test_jobs_share_few_queries_and_their_records_are_noticed_at_once(clock, queue, tmp_path):
    rows, calls = queue
    rows.write_text("8|RUNNING|1:00|b|c|None\nx|y\n7|RUNNING|1:00|a|c|None\n")
    cluster = resolve.load("tiny", ("cluster.launcher=slurm",)).cluster
    jobs = [Handle(Job(name, "program", (), tmp_path), number) for name, number in (("a", "7"), ("b", "8"))]
    launchers = [create("slurm", cluster) for _ in jobs]
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
