"""Fault tolerance on a real Slurm cluster: each fault leaves the losses of an undisturbed run."""

import os
import re
import signal
import time

import psutil
import pytest

from tasks.launchers import JobFailed
from tests.slurm.conftest import INTERRUPTED_AT, alive
from tests.waiting import until


def test_stale_attempt_without_its_slurmd_completes_no_checkpoint(cluster, lab, undisturbed):
    """Network partition: Slurm restarts the job elsewhere, while ranks on the lost nodes keep computing."""
    run = lab.run("fenced", "cluster.hang_seconds=600")
    old: list[psutil.Process] = []

    def partition():
        old.extend(run.ranks())
        for process in old:
            process.suspend()
        for node in ("n1", "n2"):
            cluster.kill_slurmd(node)
            cluster.down(node)

    run.at_step(INTERRUPTED_AT, partition)

    def watch():
        if old and "start 2" in run.log and "resumed from" in run.log and len(run.losses) >= 100:
            for process in alive(old):
                process.resume()

    run.train(watch=watch)
    until(lambda: not alive(old))
    assert all((path / "complete.json").exists() for path in (run.folder / "checkpoints").glob("step_*"))
    words = "".join(path.read_text() for path in run.folder.glob("logs/ranks/*/attempt_0/*/stdout.log"))
    assert "attempt 1 ends: attempt 2 has taken over the run" in words  # which no longer reach the job's log
    assert run.losses == undisturbed
    assert (run.folder / "attempt").read_text() == "2"


def test_job_saves_and_requeues_before_its_time_limit_and_when_preempted(cluster, lab, undisturbed):
    limit = ("cluster.time=10", "cluster.time_left=240", "cluster.hang_seconds=600")
    one = ("cluster.nodes=1", "cluster.devices_per_node=2", "cluster.slurm=['--nodelist=n1']")
    run = lab.run("requeued", *limit, *one, "cluster.partition=spot")

    def shorten():
        # So that three to four minutes are left. Slurm checks every 30 s, so the ranks are suspended until then.
        ranks = run.ranks()
        for process in ranks:
            process.suspend()
        ((job, *_),) = cluster.jobs()
        ran = re.search(r"RunTime=(\d+):(\d+):", cluster.command("scontrol", "show", "job", job))
        limit = 60 * int(ran[1]) + int(ran[2]) + 4
        cluster.command("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
        until(lambda: "time limit near" in run.log)
        for process in ranks:
            process.resume()
        until(lambda: "saved; requeued" in run.log)

        def extended() -> bool:
            """Restore the time limit for the second start; Slurm refuses while the first one completes."""
            cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=10", check=False)
            return "TimeLimit=00:10:00" in cluster.command("scontrol", "show", "job", job)

        until(extended)

    def preempt():
        whole = ("-N4", "--exclusive", "-p", "train", "-o", "/dev/null")
        cluster.command("sbatch", *whole, "--wrap", "sleep 3")

    run.at_step(INTERRUPTED_AT, shorten)
    run.at_step(2 * INTERRUPTED_AT, preempt)  # the second start
    run.train()
    limited, _, preempted = run.log.partition("start 2, ")
    assert "interrupted: saved step" in limited
    assert "saved; requeued" in limited
    assert "interrupted: saved step" in preempted
    assert "start 3, " in preempted
    assert run.losses == undisturbed


def test_hanging_rank_fails_the_attempt_and_leaves_the_stacks_of_all_ranks(cluster, lab):
    run = lab.run("hung", "cluster.hang_seconds=3")
    run.at_step(INTERRUPTED_AT, lambda: run.ranks()[1].suspend())
    begun = time.monotonic()
    with pytest.raises(JobFailed, match="a rank hung"):
        run.train()
    assert time.monotonic() - begun < 120
    for rank in 0, 1:  # also the suspended one, which cannot dump its own
        stacks = (run.folder / f"logs/stacks/rank_{rank}.txt").read_text()
        assert f"rank {rank} on n{rank + 1}: no step for" in stacks
        assert "train.py" in stacks


def test_killed_rank_fails_the_attempt_by_name_and_the_next_one_resumes_on_fewer_nodes(
    cluster, lab, undisturbed
):
    """Two nodes with two ranks each train like two ranks on one, and go on as one."""
    overrides = ("parallel.tensor=1", "train.micro_batch_size=1")
    run = lab.run("elastic", *overrides, "cluster.nodes=2", "cluster.devices_per_node=2")
    run.at_step(INTERRUPTED_AT, lambda: os.kill(run.ranks()[2].pid, signal.SIGKILL))
    with pytest.raises(JobFailed, match="rank 2 on n2 was killed by SIGKILL"):
        run.train()
    assert "on n1 n2" in run.log
    fewer = lab.run("elastic", *overrides, "cluster.nodes=1")
    fewer.train()
    assert "resumed from step 40" in fewer.log
    for step, loss in undisturbed.items():
        assert fewer.losses[step] == pytest.approx(loss, rel=1e-5 if step <= 20 else 1e-3)
