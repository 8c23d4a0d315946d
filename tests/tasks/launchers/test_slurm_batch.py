"""Slurm's batch script, with programs that stand in for srun and scontrol."""

import json
import os
import signal
import subprocess

import pytest

from profiles import resolve
from tasks.launchers import Job, slurm_batch
from tasks.launchers.conformance import wait

SRUN = """
trap 'exit 143' USR1
touch "$FOLDER/started"
while :; do sleep 0.02; done
"""
# A requeue ends the job's processes, once it succeeds.
SCONTROL = """
case $* in
  *hostnames*) echo n1 ;;
  *"show node"*) echo "NodeName=n1 NodeAddr=127.0.0.1 NodeHostName=n1" ;;
  requeue*)
    echo attempt >> "$FOLDER/requeues"
    if [ "$(wc -l < "$FOLDER/requeues")" -lt "$SUCCEEDS_AT" ]; then exit 1; fi
    kill -TERM "$PPID"
    ;;
esac
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the script of a job that saves; its requeue succeeds at the given attempt."""
    for name, body in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(slurm_batch, "REQUEUE_PAUSE", 0.05)
    started = []

    def call(succeeds_at: int) -> subprocess.Popen:
        job = Job("train", "work", (), tmp_path / "logs", processes=1, attempt_file=tmp_path / "attempt")
        job.folder.mkdir()
        slurm_batch.create_attempt_file(job.attempt_file)
        text = slurm_batch.script(job, resolve.load("tiny", ["cluster.launcher=slurm"]).cluster, "submission")
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "FOLDER": str(tmp_path),
            "SUCCEEDS_AT": str(succeeds_at),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1",
        }
        started.append(subprocess.Popen(["bash", "-c", text], env=environment, start_new_session=True))
        wait(lambda: (tmp_path / "started").exists(), 120)
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def recorded(folder):
    return json.loads((folder / "logs/train.exit.json").read_text())["exit_code"]


def requeues(folder):
    path = folder / "requeues"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_requeue_is_retried_while_the_controller_does_not_answer(start, tmp_path):
    script = start(succeeds_at=3)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(120) == 1
    assert requeues(tmp_path) == 3
    assert recorded(tmp_path) is None  # the launcher keeps waiting for the job


def test_requeue_that_keeps_failing_ends_the_job_with_its_exit_code(start, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_batch, "REQUEUE_SECONDS", 4)  # bash counts full seconds
    script = start(succeeds_at=1000)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(120) == 143
    assert requeues(tmp_path) > 1
    assert recorded(tmp_path) == 143


@pytest.mark.parametrize(("end", "exit_code"), [(signal.SIGTERM, None), (signal.SIGUSR2, 143)])
def test_requeue_is_not_retried_once_the_job_is_to_end(start, tmp_path, end, exit_code):
    """By Slurm, at the time limit or because it has been requeued; or by a stop request."""
    script = start(succeeds_at=1000)
    script.send_signal(signal.SIGUSR1)
    wait(lambda: requeues(tmp_path) > 0, 120)
    script.send_signal(end)
    assert script.wait(120) == 143
    assert recorded(tmp_path) == exit_code
