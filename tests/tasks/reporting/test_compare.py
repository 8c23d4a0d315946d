"""`trainshed compare`: results, profile differences and curves of several runs."""

import json
import subprocess
import sys

import pytest

from flows.cli.main import main
from tests.tasks.reporting.run_folders import WellFormed, write_report, write_run


def test_compare_shows_results_curves_and_profile_differences(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "store/runs/first")
    write_report(tmp_path / "store/runs/first")
    write_run(tmp_path / "store/runs/second", "train.learning_rate=1e-3", losses=50)
    (tmp_path / "store/runs/second").rename(tmp_path / "store/runs/first~1")
    assert main(["compare", "first", "first~1", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["differences"] == {"train.learning_rate": [0.003, 0.001]}
    assert [run["state"] for run in output["runs"]] == ["finished", "at step 50 of 300"]
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
