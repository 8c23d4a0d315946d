"""Commands beside one damaged file of one run: they show the other run and name the damaged one."""

import json
import os
import shutil
from pathlib import Path

import pytest

from flows.cli.main import main
from profiles import resolve
from profiles.files import state_files
from tasks.fleet.fleet import UNREADABLE, read_fleet
from tasks.fleet.page import render
from tasks.store.store import Store
from tests.tasks.fleet.histories import SimulatedRun

JSON = ("plan.json", "run.json", "report.json", "artifacts.json", "inputs.json", "lock.json", "standing.json")
LINES = ("metrics.jsonl", "events.jsonl", "attempts.jsonl", "evaluations.jsonl")
FILES = (*JSON, *LINES, "profile.yaml", "checkpoints/step_5/complete.json")


def text(path: Path) -> None:
    path.write_text("neither JSON nor a profile")


def strings(path: Path) -> None:
    """Values of another type."""
    values = {
        "step": 3,
        "loss": "high",
        "time": "now",
        "event": 5,
        "steps": "many",
        "parent": "p",
        "train": [1],
    }
    path.write_text(json.dumps(values) + "\n")


def infinite(path: Path) -> None:
    values = {
        "step": 3,
        "loss": float("inf"),
        "time": float("nan"),
        "steps": -1,
        "trained_seconds": float("inf"),
    }
    path.write_text(json.dumps(values) + "\n")


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def dangling(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere")


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    """Reading it would wait for a writer forever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(512)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7] if path.exists() else b"{"),
    "text": text,
    "list": lambda path: path.write_text("[1, 2]"),
    "strings": strings,
    "infinite": infinite,
    "folder": folder,
    "dangling": dangling,
    "loop": loop,
    "pipe": pipe,
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A store of two runs."""
    store = tmp_path_factory.mktemp("healthy") / "store"
    for name in ("good", "bad"):
        run = SimulatedRun(store / "runs" / name)
        run.submit(1, 1)
        run.start(8, 2)
        for _ in range(5):
            run.train(1.0, 0.0)
        run.end()
        path = store / "runs" / name
        (path / "profile.yaml").write_text(resolve.dump(resolve.load("tiny", (), name)))
        (path / "artifacts.json").write_text('{"dataset": ["k1"]}')
        (path / "run.json").write_text('{"identity": "i"}')
        (path / "inputs.json").write_text('{"identity": "i", "dataset": "k1"}')
        (path / "evaluations.jsonl").write_text('{"step": 5, "validation_loss": 1.0}\n')
        (path / "checkpoints/step_5").mkdir(parents=True)
        (path / "checkpoints/step_5/complete.json").write_text('{"step": 5}')
    return store


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_hides_no_other_run_and_nothing_is_removed(healthy, tmp_path, damage, capsys):
    for file in FILES:
        store = tmp_path / file
        shutil.copytree(healthy, store)
        DAMAGES[damage](store / "runs/bad" / file)
        views = {view.name: view for view in read_fleet(Store(str(store))).runs}
        assert views["good"].summary.last["step"] == 5, file
        bad = views["bad"]
        assert bad.state != UNREADABLE or f"{store}/runs/bad" in bad.summary.problem
        assert "good" in render(read_fleet(Store(str(store))))
        assert main(["runs", "--store", str(store), "--json"]) == 0, file
        out, err = capsys.readouterr()
        assert {run["name"] for run in json.loads(out)} == {"good", "bad"}
        assert (bad.state == UNREADABLE) == ("runs/bad" in err)
        assert main(["runs", "--store", str(store)]) == 0, file
        code = main(["gc", "--store", str(store), "--yes"])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "traceback" not in err, (file, err)
        assert code in (0, 1), (file, err)
        assert code == 0 or f"{store}/runs/bad" in err, (file, err)
        assert (store / "runs/good/metrics.jsonl").exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_rejected_by_name_before_a_flow_starts(
    healthy, tmp_path, damage, monkeypatch, capsys
):
    """Or not needed: the flow starts, and finds out itself (tests/flows/test_pretrain.py)."""
    monkeypatch.setattr("flows.cli.evaluate.run_flow", lambda *_: 0)
    monkeypatch.setattr("flows.cli.run.run_flow", lambda *_: 0)
    monkeypatch.setattr("flows.start_checks.check_plan", lambda run: run)
    monkeypatch.setattr(state_files, "DELAYS", ())
    store = shutil.copytree(healthy, tmp_path / "store")
    bad, page = store / "runs/bad", tmp_path / "page.html"
    commands = (
        ["compare", "good", "bad", "--output", str(page)],
        ["evaluate", "bad"],
        ["fork", "bad", "child"],
        ["run", "tiny", "--name", "bad"],
    )
    for file in FILES:
        shutil.rmtree(bad)
        shutil.copytree(healthy / "runs/bad", bad)
        DAMAGES[damage](bad / file)
        for command in commands:
            code = main([*command, "--store", str(store)])
            err = capsys.readouterr().err
            assert "traceback" not in err.lower(), (file, command, err)
            named = "runs/bad" in err or "= bad: " in err
            assert code == 0 or (named and file != "plan.json"), (file, command, err)


def test_runs_of_a_store_that_cannot_be_written_are_shown(healthy, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError(30, "Read-only file system", "fleet.json")

    monkeypatch.setattr("profiles.files.state_files.write", fail)
    assert main(["runs", "--store", str(healthy), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
