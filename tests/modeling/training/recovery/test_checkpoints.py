"""Checkpoints of a run, trained in one process: resume requests, retention, failed saves."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modeling.training.recovery.checkpoints import comparable_loss, retained
from parallel.checkpoint import locations
from profiles.files import exit_codes
from profiles.resolve import load
from tasks.store import runs
from tests import disk
from tests.modeling import micro
from tests.slurm.conftest import until

pytestmark = pytest.mark.slow

ALONE = ("parallel.tensor=1", "cluster.devices_per_node=1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return micro.dataset(tmp_path_factory.mktemp("data"))


def command(run: Path, dataset: Path, *arguments: object) -> list[str]:
    program = [sys.executable, "-m", "modeling.training.train", "--run-folder", run, "--dataset", dataset]
    return [str(part) for part in (*program, *arguments)]


def train(run: Path, dataset: Path, *overrides: str, code: int = 0, arguments: tuple = ()) -> str:
    """Run training; returns its output."""
    micro.run_folder(run, *ALONE, *overrides)
    where = ("--run-folder", run, "--dataset", dataset)
    output = micro.run("training.train", *where, *arguments, processes=0, code=code)
    assert "torch.distributed is disabled" not in output
    return output


def steps(run: Path, folder: str = "checkpoints") -> list[int]:
    return sorted(int(p.parent.name.removeprefix("step_")) for p in (run / folder).glob("*/complete.json"))


def test_async_saves_keep_losses_and_retention_and_upload_metrics_first(dataset, tmp_path):
    train(tmp_path / "plain", dataset)
    saved = ("checkpoint.async=true", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=5")
    run, store = tmp_path / "async", tmp_path / "store"
    where = ("--checkpoints", f"file://{store}/checkpoints")
    train(run, dataset, *saved, "evaluate.every=3", arguments=where)
    losses = {
        line["step"]: line["validation_loss"] for line in micro.metrics(run) if "validation_loss" in line
    }
    assert steps(store) == sorted({5, 10, 11, 12, min(losses, key=losses.get)})
    assert micro.losses(run) == micro.losses(tmp_path / "plain")
    marker_file, uploaded = store / "checkpoints/step_12/complete.json", store / "metrics.jsonl"
    assert uploaded.read_text() == (run / "metrics.jsonl").read_text()
    assert uploaded.stat().st_mtime_ns < marker_file.stat().st_mtime_ns
    marker = json.loads(marker_file.read_text())
    assert marker["consumed_samples"] == 48
    assert marker["validation_loss"] == losses[12]
    assert marker["profile"]["train"]["seed"] == 1234
    assert set(marker["versions"]) == {"python", "torch", "trainshed"}


def test_latest_and_best_checkpoints_and_milestones_are_retained():
    saved = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 2.5}
    assert retained(saved, 2, 0) == {20, 40, 50}
    assert retained(saved, 1, 30) == {20, 30, 50}
    assert retained(saved, 0, 0) == set(saved)
    assert retained(dict.fromkeys(saved), 1, 0) == {50}
    assert retained({10: float("nan"), **saved}, 1, 0) == {20, 50}


def test_losses_of_another_number_of_batches_do_not_decide_what_is_retained():
    profile = load("tiny", ["evaluate.batches=8"])
    marker = {"validation_loss": 2.5, "profile": profile.model_dump(mode="json")}
    assert comparable_loss(marker, profile) == 2.5
    assert comparable_loss(marker, load("tiny", ["evaluate.batches=9"])) is None


ONE_FITS = "700k"


def test_full_disk_fails_the_run_only_at_the_final_save_of_a_stopped_job(dataset, tmp_path):
    run = micro.run_folder(tmp_path / "full", *ALONE)
    folder = tmp_path / "disk"
    program = [*disk.small(folder, ONE_FITS), *command(run, dataset, "--checkpoints", folder)]

    def failed() -> list[int]:
        return [event["step"] for event in runs.read_events(run) if event["event"] == "not saved"]

    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        until(lambda: failed().count(12) == 3)
        process.terminate()  # without a stop, the final save is retried for an hour
        output, _ = process.communicate()
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert failed()[:9] == [8, 9, 11, *[12] * 6]
    assert "warning: step 8 could not be saved: rank 0: No space left on device; retrying" in output
    assert "step 12 could not be saved: rank 0: No space left on device; gave up after" in output
    assert f"the latest complete checkpoint is step_4 in {folder}" in output
    assert list(micro.losses(run)) == list(range(1, 13))


def test_failed_save_is_retried_once_the_disk_has_room(dataset, finished, tmp_path):
    run = micro.run_folder(tmp_path / "full", *ALONE, "checkpoint.keep=1")
    folder = tmp_path / "disk"
    filled = (
        'head -c 700k /dev/zero > "$0/filler"; (until [ -e "$1" ]; do sleep 0.05; done; rm "$0/filler") &'
    )
    freed = ["sh", "-c", filled + ' shift; exec "$@"', str(folder), str(run / "events.jsonl")]
    program = [*disk.small(folder, "1400k"), *freed, *command(run, dataset, "--checkpoints", folder)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert runs.read_events(run)[0]["step"] == 8
    assert micro.losses(run) == micro.losses(finished)


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train(run, dataset, "checkpoint.keep=0")
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A finished run's folder, with checkpoints of steps 4, 8 and 12."""
    return shutil.copytree(finished, tmp_path / "run")


def test_run_falls_back_to_the_latest_intact_checkpoint(run, finished, dataset):
    shards = {step: next((run / f"checkpoints/step_{step}").glob("*.distcp")) for step in (4, 8, 12)}
    content = shards[12].read_bytes()
    shards[12].write_bytes(content[:9000] + bytes([content[9000] ^ 1]) + content[9001:])
    (run / "checkpoints/step_8/complete.json").unlink()
    os.mkfifo(run / "checkpoints/step_8/complete.json")  # whose reading would wait forever
    output = train(run, dataset)
    assert f"warning: checkpoint step_12 is corrupted: {shards[12]}: corrupted" in output
    assert "warning: checkpoint step_8 is corrupted" in output
    assert "resumed from step 4" in output
    assert micro.losses(run) == micro.losses(finished)
    assert steps(run) == [4, 8, 12]
    events = [row for row in runs.read_events(run) if row["event"] == "corrupted checkpoint"]
    assert sorted(event["step"] for event in events) == [8, 12]
    for step in steps(run):
        next((run / f"checkpoints/step_{step}").glob("*.distcp")).unlink()
    for _ in range(2):  # also when started again: training from the beginning is never a fallback
        output = train(run, dataset, code=2)
        assert "no intact checkpoint; step_12, step_12~1, step_4, step_8, step_8~1 are corrupted" in output
        assert "set checkpoint.resume=none to train from the beginning" in output


def test_checkpoint_beyond_the_last_step_is_rejected_by_name(run, dataset):
    shutil.copytree(run / "checkpoints/step_12", run / "checkpoints/step_13")
    output = train(run, dataset, code=2)
    assert f"{run}/checkpoints/step_13: its step is after the run's last step, train.steps = 12" in output


def test_checkpoint_of_another_run_is_rejected_by_name(run, dataset):
    """As of a replaced run of the same identity with another schedule, kept by the store."""
    markers = list((run / "checkpoints").glob("step_*/complete.json"))
    for marker in markers:
        about = json.loads(marker.read_text())
        assert about.pop("run") == {}  # this run has no run.json, and neither had those of earlier versions
        marker.write_text(
            json.dumps(about | ({"run": {"identity": "a", "id": "1"}} if "_8" in str(marker) else {}))
        )
    (run / "run.json").write_text(json.dumps({"identity": "a", "id": "2"}))
    (run / "checkpoints/owner").unlink()  # as a run is moved aside
    for request in ((), ("checkpoint.resume=8", "checkpoint.weights_only=true")):
        output = train(run, dataset, *request, code=2)
        assert f"{run}/checkpoints/step_8: written by another run, micro; move the folder away" in output
    assert steps(run) == [4, 8, 12]
    (run / "checkpoints/owner").unlink()
    (run / "run.json").write_text(json.dumps({"identity": "a"}))  # opened by an earlier version: unknown
    assert "resumed from step 12" in train(run, dataset)


def test_requested_step_is_resumed_once_and_later_checkpoints_move_aside(run, finished, dataset):
    output = train(run, dataset, "checkpoint.resume=4")
    assert "moved to checkpoints~1: step_8, step_12" in output
    assert "resumed from step 4" in output
    assert steps(run, "checkpoints~1") == [8, 12]
    assert steps(run) == [4, 8, 12]
    assert micro.losses(run) == micro.losses(finished)
    (run / "checkpoints/step_12/complete.json").unlink()
    output = train(run, dataset, "checkpoint.resume=4")
    assert "removed incomplete checkpoint step_12" in output
    assert "resumed from step 8" in output


def test_resuming_weights_only_restarts_the_schedule(run, dataset):
    """With another optimizer, whose states cannot be resumed by the first."""
    before, fresh = micro.losses(run), ("checkpoint.weights_only=true", "train.optimizer=muon")
    output = train(run, dataset, *fresh)
    assert "moved to checkpoints~1: step_4, step_8, step_12" in output
    assert "checkpoints~1/step_12; optimizer and schedule restart" in output
    after = micro.losses(run)
    assert list(after) == list(before)
    assert after[1] < before[1] - 0.5
    assert micro.metrics(run)[0]["learning_rate"] == pytest.approx(0.005)  # the first of two steps of warm-up
    assert "resumed from step 12" in train(run, dataset, *fresh)
    assert "or start fresh states with checkpoint.weights_only=true" in train(run, dataset, code=2)


def test_missing_step_is_rejected_with_available_steps(run, dataset):
    output = train(run, dataset, "checkpoint.resume=5", code=2)
    assert "checkpoint.resume = 5: is not a complete checkpoint; complete checkpoints are 4, 8, 12" in output
    assert "Traceback" not in output


def test_checkpoint_of_another_model_is_rejected_with_first_differing_field(run, dataset):
    output = train(run, dataset, "model.intermediate_size=128", "model.norm_eps=1e-6", code=2)
    assert (
        "step_12 belongs to another model: model.intermediate_size is 64 in the checkpoint, 128 in the profile"
        in output
    )


def test_corrupted_record_of_an_applied_request_is_named(run, dataset):
    train(run, dataset)
    (run / "resumed.json").write_text("")
    train(run, dataset)
    output = train(run, dataset, "checkpoint.resume=4", code=2)
    assert f"{run}/resumed.json: corrupted" in output
    assert steps(run) == [4, 8, 12]


def test_missing_checkpoints_are_rejected_and_metrics_are_kept(run, dataset):
    losses = micro.losses(run)
    assert json.loads((run / "resumed.json").read_text()) == {"saved": True}
    (run / "checkpoints").rename(run / "elsewhere")
    (run / "checkpoints").symlink_to(run / "unmounted")
    output = train(run, dataset, code=2)
    assert (
        "unmounted): no checkpoint, although this run has saved some: mount or restore the folder" in output
    )
    assert micro.losses(run) == losses
    (run / "checkpoints").unlink()
    assert "from scratch" in train(run, dataset, "checkpoint.resume=none")
    assert micro.losses(run) == losses


def test_fork_without_a_checkpoint_is_rejected(dataset, tmp_path):
    run = micro.run_folder(tmp_path / "run", *ALONE)
    parent = {"run": "other", "identity": "one", "step": 200}
    (run / "run.json").write_text(json.dumps({"identity": "two", "parent": parent}))
    output = train(run, dataset, code=2)
    assert "checkpoints: the checkpoint of the parent, other@200, is missing; restore it" in output


def test_run_ends_if_no_save_succeeds_since_its_start(dataset, tmp_path):
    file = tmp_path / "file"
    file.touch()
    arguments = ("--checkpoints", file / "checkpoints")
    output = train(
        tmp_path / "run", dataset, "checkpoint.every=1", "train.steps=40", code=1, arguments=arguments
    )
    assert (
        "SaveGivenUp: step 8 could not be saved: rank 0: Not a directory; gave up after 8 attempts" in output
    )
    assert "Traceback" not in output
    assert "step 9/" not in output


def test_moved_run_folder_is_not_recreated(dataset, tmp_path):
    run = micro.run_folder(tmp_path / "run", *ALONE, "checkpoint.every=1", "train.steps=5000")
    (run / "run.json").write_text("{}")

    def move() -> None:
        until(lambda: any((run / "checkpoints").glob("step_*/complete.json")))
        run.rename(tmp_path / "moved")

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move)
        where = ("--run-folder", run, "--dataset", dataset)
        output = micro.run("training.train", *where, processes=0, code=1)
        moving.result()
    assert f"StaleAttempt: {run}: moved or removed during training; this attempt ends" in output
    assert not run.exists()


def test_attempt_on_another_machine_ends_this_one(dataset, tmp_path):
    """Its run folder is a copy; only the checkpoints are shared."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "owner").write_text('{"run": "cut')  # by a crash
    run = micro.run_folder(tmp_path / "run", *ALONE, "checkpoint.every=1", "train.steps=5000")

    def take_over() -> None:
        until(lambda: locations.claimed_by(shared).endswith("}"))
        claim = json.loads(locations.claimed_by(shared))
        locations.claim(shared, json.dumps({**claim, "attempt": 2, "node": "node-2"}))

    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take_over)
        where = ("--run-folder", run, "--dataset", dataset, "--checkpoints", shared)
        output = micro.run("training.train", *where, processes=0, code=1)
        taking.result()
    assert f"StaleAttempt: {shared}: claimed by attempt 2 on node-2" in output
    # Nor does an earlier attempt that starts later, for instance from a queue, take the run back.
    (run / "attempt").write_text("1")
    output = micro.run("training.train", *where, "--attempt", 1, processes=0, code=1)
    assert f"StaleAttempt: {shared}: claimed by attempt 2 on node-2; this attempt ends" in output


STOPPING = """
import os, signal

calls = 0

def stopping(logits, targets):
    global calls
    calls += 1
    if calls == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return targets.double().sum()
"""


def test_evaluation_of_the_last_step_that_a_stop_prevents_is_made_up_once(dataset, tmp_path, monkeypatch):
    """Also if more steps are trained later, from the same checkpoint."""
    (tmp_path / "own.py").write_text(STOPPING)
    monkeypatch.chdir(tmp_path)
    settings = ("evaluate.metrics=[own:stopping]", "evaluate.batches=10", "checkpoint.every=0")
    run = tmp_path / "run"
    train(run, dataset, *settings, "train.steps=6", code=exit_codes.INTERRUPTED)
    assert steps(run) == [6]
    assert not any("validation_loss" in row for row in micro.metrics(run))
    # Of another size: bytecode of a file with the same size and second would be used again.
    (tmp_path / "own.py").write_text(STOPPING.replace("calls == 1", "False"))
    for last in (6, 12):
        train(run, dataset, *settings, f"train.steps={last}")
        evaluated = [row["step"] for row in micro.metrics(run) if "validation_loss" in row]
        assert evaluated == [*range(6, last + 1, 6)]
