"""Fault tolerance of local runs: killed ranks and commands, and signals, do not change the losses."""

import html
import json
import os
import shutil
import signal
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.harness.processes import training_ranks
from flows.cli.main import main
from flows.hooks import cancel_jobs
from tests.flows.micro import LONGER, final_state, logged, losses, settings, wait_for_step
from tests.forked_jobs import forked_jobs
from tests.waiting import until

TRAIN = "modeling.training.train"
INTERRUPTED_AT = 50  # of 240 steps, with a checkpoint every 40


# Kills the rank that computes it.
FATAL = """
import os, signal

def loss(logits, targets):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def folder_of_undisturbed(tmp_path_factory):
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def undisturbed(pretrain, folder_of_undisturbed):
    """Losses of a run without faults."""
    return losses_of(pretrain(folder_of_undisturbed / "store", *LONGER))


def losses_of(result: dict) -> dict[int, float]:
    return losses(Path(result["folder"]))


def incidents(folder: Path) -> tuple[list[str], list[str]]:
    """Names and reasons of a run's events, without stragglers: on a busy machine a rank may be one."""
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["event"] != "straggler"]
    return [row["event"] for row in rows], [row["reason"] for row in rows]


def test_flow_with_one_retry_completes_a_run_whose_ranks_are_killed_twice(
    pretrain, undisturbed, tmp_path, caplog
):
    """A new checkpoint resets the count."""
    folder = tmp_path / "store/runs/micro"

    def kill_twice():
        for rank in 0, 1:
            wait_for_step(folder, (rank + 1) * INTERRUPTED_AT)
            os.kill(training_ranks(folder)[rank].pid, signal.SIGKILL)
            until(lambda: not training_ranks(folder))

    caplog.set_level("INFO")
    killer = threading.Thread(target=kill_twice)
    killer.start()
    with forked_jobs(real=TRAIN):
        result = pretrain(tmp_path / "store", *LONGER, "cluster.retries=1", torchrun=True)
    killer.join()
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "was killed by SIGKILL" in said
    assert "restarting from step 40, attempt 2 of 2" in said
    assert "restarting from step 80, attempt 2 of 2" in said
    assert "resumed from step 80" in said
    assert losses_of(result) == undisturbed
    kinds, reasons = incidents(folder)
    assert kinds == ["train retried", "resumed"] * 2
    for rank in 0, 1:
        assert f"rank {rank} was killed by SIGKILL" in reasons[2 * rank]
    assert reasons[1::2] == [
        f"start {start}, from the checkpoint of step {40 * (start - 1)}" for start in (2, 3)
    ]
    report = (folder / "report.html").read_text()
    assert all(part in report for part in (*kinds, *map(html.escape, reasons), "3 attempts"))


@pytest.mark.usefixtures("undisturbed")  # whose data it uses
def test_command_without_retries_fails_in_one_line_with_its_traceback_in_the_log(
    folder_of_undisturbed, profile, capsys, monkeypatch
):
    """As its rank is killed; torchrun naming it and ending others is tested above and in test_local.py."""
    monkeypatch.chdir(folder_of_undisturbed)
    monkeypatch.syspath_prepend(folder_of_undisturbed)
    monkeypatch.setenv("PYTHONPATH", str(folder_of_undisturbed), prepend=os.pathsep)
    Path("fatal.py").write_text(FATAL)
    overrides = settings("cluster.retries=0", "train.loss=fatal:loss")
    with forked_jobs():
        assert main(["run", str(profile), *overrides, "--name", "killed"]) == 1
    err = capsys.readouterr().err
    assert "trainshed: train: was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert "Traceback" in Path("store/logs/killed.log").read_text()
    assert incidents(Path("store/runs/killed"))[0] == ["train failed"]


def test_failures_before_the_run_folder_exists_are_recorded(pretrain, tmp_path, monkeypatch):
    from tasks.steps.tokenizer import TokenizerStep

    make, failures = TokenizerStep.make, [OSError("the disk was full for a while")]

    def fail_once(*arguments):
        if failures:
            raise failures.pop()
        return make(*arguments)

    monkeypatch.setattr(TokenizerStep, "make", fail_once)
    result = pretrain(tmp_path / "store")
    assert result["how"]["tokenizer"] == "done"
    assert incidents(Path(result["folder"])) == (["tokenizer retried"], ["the disk was full for a while"])
    assert "the disk was full for a while" in Path(result["report"]).read_text()
    lines = logged("micro")
    assert "restarting tokenizer, attempt 2 of 3" in lines
    assert any("Beginning flow run 'micro'" in line for line in lines)
    assert not any("Retry" in line or "hook" in line for line in lines)
    assert sum(line.startswith("step ") and "tokens/s" in line for line in lines) <= 2


def test_command_stopped_by_sigterm_during_its_start_leaves_no_process(command, profile, tmp_path):
    started = command("run", str(profile), PREFECT_HOME="")
    while not (tmp_path / "store/prefect-home/server.json").exists():
        assert started.process.poll() is None
        time.sleep(0.05)
    started.process.terminate()
    code, _, err = started.result(timeout=60)
    assert code == 1
    assert err.splitlines()[-1].startswith("stopped; run the same command again")
    assert started.left_behind() == []


def test_interrupted_command_leaves_no_process_and_a_resumable_run(
    command, pretrain, profile, undisturbed, prefect_database, tmp_path
):
    """With a local Prefect server, which has to stop, too, and touches nothing outside of the store."""
    folder = tmp_path / "store/runs/micro"
    home = tmp_path / "store/prefect-home"
    home.mkdir(parents=True)
    shutil.copy(prefect_database, home)
    started = command("run", str(profile), *settings(*LONGER), PREFECT_HOME="", HOME=str(tmp_path / "home"))
    wait_for_step(folder, INTERRUPTED_AT)
    os.killpg(started.process.pid, signal.SIGINT)  # like a terminal
    code, _, err = started.result(timeout=60)
    assert code == 1
    assert "run the same command again to resume" in err
    assert "Traceback" not in err
    assert started.left_behind() == []
    assert not (tmp_path / "home/.prefect").exists()
    done = len(losses(folder))
    assert INTERRUPTED_AT <= done < 240
    assert (folder / f"checkpoints/step_{done}/complete.json").exists()
    assert f"stopped, saved at step {done}" in err
    assert final_state(home, "micro") == ("Stopped", f"saved at step {done}")
    assert losses_of(pretrain(tmp_path / "store", *LONGER)) == undisturbed
    assert incidents(folder) == (
        ["interrupted", "resumed"],
        [f"saved step {done}, to be resumed from there", f"start 2, from the checkpoint of step {done}"],
    )


def test_command_started_again_reattaches_to_running_training(
    command, profile, undisturbed, tmp_path, prefect_server, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "store/runs/micro"
    patient = "cluster.hang_seconds=600"  # the ranks are suspended for as long as a loaded machine takes
    arguments = ("run", str(profile), *settings(*LONGER, patient))
    first = command(*arguments, PREFECT_API_URL=prefect_server)
    wait_for_step(folder, INTERRUPTED_AT)
    training = training_ranks(folder)
    before = {process.pid for process in training}
    os.kill(first.process.pid, signal.SIGKILL)
    for process in training:  # so that training outlasts the start of the second command
        process.suspend()
    # Neither another run of that name nor the cancellation of another flow run stops it.
    assert main([*arguments, "--set", "train.seed=2", "--replace"]) == 2
    assert "its train job is still active as process" in capsys.readouterr().err
    assert not (tmp_path / "store/runs/micro~1").exists()
    given = {"profile": str(profile), "overrides": LONGER, "store": str(tmp_path / "store")}
    cancel_jobs(None, SimpleNamespace(id=uuid.uuid4(), parameters=given), None)
    assert {process.pid for process in training_ranks(folder)} == before

    def resume():
        log, deadline = tmp_path / "store/logs/micro.log", time.monotonic() + 300
        while "re-attached to it" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in training:
            process.resume()

    resuming = threading.Thread(target=resume)
    resuming.start()
    with forked_jobs(real=TRAIN):  # which evaluate the trained model
        code = main([*arguments])
    resuming.join()
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "is already running: re-attached to it" in out
    assert len(before) == 2
    assert losses(folder) == undisturbed
    assert (folder / "logs/train.log").read_text().count("from scratch") == 1
