"""`trainshed compare`: results, profile differences and curves of several runs."""

import json
import os
import subprocess
import sys
import time

import fsspec
import pytest

from flows.cli.main import main
from flows.ui import console
from profiles import resolve
from tests.profiles.pair import PAIR
from tests.tasks.reporting.run_folders import WellFormed, write_report, write_run


def test_compare_shows_results_curves_and_profile_differences(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "store/runs/first", "train.steps=100")
    write_report(tmp_path / "store/runs/first")
    write_run(tmp_path / "store/runs/second", "train.steps=100", "train.learning_rate=1e-3", losses=50)
    (tmp_path / "store/runs/second").rename(tmp_path / "store/runs/first~1")
    assert main(["compare", "first", "first~1", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["differences"] == {"train.learning_rate": [0.003, 0.001]}
    assert [run["state"] for run in output["runs"]] == ["finished", "at step 50 of 100"]
    assert [run["loss"] for run in output["runs"]] == pytest.approx([7.3, 7.8])
    page = (tmp_path / "compare.html").read_text()
    parser = WellFormed()
    parser.feed(page)
    assert parser.open == []
    assert page.count('class="line line-2"') == 2

    assert main(["compare", "first", "first~1"]) == 0
    assert "train.learning_rate  0.003" in capsys.readouterr().out
    assert main(["compare", "first", "first-1"]) == 2
    assert "nearest valid: first~1" in capsys.readouterr().err
    assert main(["compare", "first", "first~1", "first"]) == 0
    assert "<h1>first, first~1 and first</h1>" in (tmp_path / "compare.html").read_text()
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setattr(console, "SHORT_WAIT", 0.0)
    assert main(["compare", *["first", "first~1"] * 3]) == 0
    out, err = capsys.readouterr()
    assert "reading the runs" in err  # which takes seconds for long ones
    assert (out.count("7.3000"), out.count("7.8000")) == (3, 3)  # whole, not folded


def test_compare_shows_an_extended_run_as_unfinished(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "store/runs/first"
    write_run(folder, "train.steps=100")
    write_report(folder)
    (folder / "profile.yaml").write_text(resolve.dump(resolve.load(PAIR, ("train.steps=200",), "first")))
    assert main(["compare", "first", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["state"] == "at step 100 of 200"
    assert "validation_loss" not in run  # of step 100
    report = json.loads((folder / "report.json").read_text())
    del report["evaluation"]["step"]  # as in a report that does not record it
    (folder / "report.json").write_text(json.dumps(report))
    for steps, state in (200, "at step 100 of 200"), (100, "finished"):
        changed = resolve.load(PAIR, (f"train.steps={steps}",), "first")
        (folder / "profile.yaml").write_text(resolve.dump(changed))
        assert main(["compare", "first", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == state


def test_compare_reads_the_latest_copy_of_a_run_in_a_remote_store(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "store/runs/first", losses=10)  # of another store
    write_run(tmp_path / "elsewhere/runs/first", losses=50)
    remote = fsspec.filesystem("memory")
    remote.store.clear()
    # With a slash at the end, the contents are copied, even if an earlier test has left an empty folder there.
    remote.put(f"{tmp_path}/elsewhere/runs/", "/bucket/store/runs/", recursive=True)
    command = ["compare", "--store", "memory://bucket/store", "--json"]

    def compared() -> tuple[int, str]:
        assert main([*command, "first"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        return run["steps"], run["folder"]

    assert compared() == (50, "memory://bucket/store/runs/first")
    (tmp_path / "store/belongs-to").write_text("memory://bucket/store\n")
    metrics = tmp_path / "store/runs/first/metrics.jsonl"
    os.utime(metrics, (later := time.time() + 60, later))  # as it is training here
    assert compared() == (10, f"{tmp_path}/store/runs/first")
    assert main([*command, "frist"]) == 2
    assert "nearest valid: first" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"plan": {}}', '{"plan": {"parameters": 5}, "evaluation": {"perplexity": "x"}}'],
)
def test_compare_rejects_a_corrupted_report_by_name(capsys, tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "store/runs/first")
    (tmp_path / "store/runs/first/report.json").write_text(content)
    assert main(["compare", "first"]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert f"{tmp_path}/store/runs/first/report.json is corrupted" in output


def test_compare_skips_corrupted_metrics_lines(tmp_path):
    write_run(tmp_path / "store/runs/first", losses=20)
    metrics = tmp_path / "store/runs/first/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 7,', '"step": 7'))
    compare = [sys.executable, "-m", "flows.cli.main", "compare", "first", "--json"]
    result = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, check=True)
    (run,) = json.loads(result.stdout)["runs"]
    assert (run["steps"], run["loss"]) == (19, pytest.approx(8.1))
    assert "store/runs/first/metrics.jsonl: line 7: corrupted; skipped" in result.stderr
