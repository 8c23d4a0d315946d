"""benchmarks.parallel: a comparison runs end to end, and fails if the losses differ."""

import json
import math
import sys
from types import SimpleNamespace

import pytest

from benchmarks import parallel
from benchmarks.harness import results, timing
from benchmarks.harness.processes import Measurement, largest_difference
from benchmarks.rows import comparisons, report
from benchmarks.rows.comparisons import Result

pytestmark = pytest.mark.slow


def test_quick_comparison_runs_and_losses_agree(tmp_path, monkeypatch, capsys):
    out = tmp_path / "kept" / "rows.jsonl"
    arguments = ["--quick", "--cpu-time", "--only", "tensor", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["parallel", *arguments])
    assert parallel.main() == 0
    printed = capsys.readouterr()
    row = json.loads(out.read_text())
    assert row["row"] == "tensor"
    assert row["difference"] <= row["tolerance"] == 1e-5
    assert row["machine"]["torch"]
    assert row["took"] > 0
    assert row["time"] > "2026"
    assert row["arguments"] == arguments
    assert f"tensor: {row['status']}, ratio " in printed.err
    assert "TP 2" in printed.out
    assert row["ratios"] == [row["peer_seconds"] / row["ours_seconds"]]


@pytest.mark.parametrize("clock", [[], ["--cpu-time"]], ids=["elapsed", "cpu"])
def test_steps_are_timed_by_the_elapsed_clock_with_two_threads_by_default(tmp_path, monkeypatch, clock):
    def measure(scripts, *others):
        given.append(scripts["ours"].arguments)
        return {"ours": [1.0], "peer": [2.0], "difference": 0.0}

    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(comparisons, "alternate_scripts", measure)
    rows = ["--only", "float32", "tensor"]  # one process, and two
    monkeypatch.setattr(sys, "argv", ["parallel", *rows, *clock, "--out", str(tmp_path / "rows.jsonl")])
    assert parallel.main() == 0
    assert ["--cpu-time" in options for options in given] == [bool(clock)] * 2
    threads = [options[options.index("--threads") + 1] for options in given]
    assert threads == (["1", "1"] if clock else ["2", "1"])


def test_rows_are_kept_when_they_exist_and_none_starts_that_would_end_too_late(tmp_path, monkeypatch):
    seen, clock = [], iter([0.0, 0.0, 28.0, 33.0])  # another 28 s would end after 61
    rows = [SimpleNamespace(name=name, turns=lambda _: 1) for name in ("first", "second")]
    for row in rows:
        result = Result(
            row.name, "ours", "theirs", 1.0, tolerance=1.0, ours=[0.1], peer=[0.2], difference=0.0
        )
        row.run = lambda *_, result=result: seen.append(results.read(out)) or result
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert [each.name for each in report.run(rows, None, out, minutes=1)] == ["first"]
    assert [json.loads(line)["row"] for line in out.read_text().splitlines()] == ["first"]
    assert seen == [[]]


def test_unknown_comparison_is_rejected_with_the_nearest_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parallel", "--only", "tensors"])
    with pytest.raises(SystemExit) as ended:
        parallel.main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "--only: tensors is not a valid value; nearest valid: tensor\n" in printed
    monkeypatch.setattr(sys, "argv", ["parallel", "--cpu-time", "--only", "tensor", "ring-8k", "muon-update"])
    with pytest.raises(SystemExit):
        parallel.main()
    assert (
        "--cpu-time: measures whole training steps only, not ring-8k, muon-update" in capsys.readouterr().err
    )


@pytest.mark.parametrize("loss", [8.3, 8.3 * (1 + 2e-5), math.nan])
def test_comparison_with_different_losses_fails_whatever_its_ratio(loss):
    runs = [Measurement([0.1], [8.4, 8.3]), Measurement([0.2], [8.4, loss])]
    result = Result("tensor", "ours", "theirs", target=1.25, tolerance=1e-5, ours=[0.1], peer=[0.2])
    result.difference = largest_difference(runs)
    assert result.status == ("met" if loss == 8.3 else "failed")


def test_interrupted_benchmark_keeps_every_run_of_a_side(tmp_path, capsys):
    out, turns = tmp_path / "kept/rows.jsonl", iter([1.0, 2.0, 3.0])

    def measure():
        if value := next(turns, None):
            return value
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timing.alternate({"ours": measure, "peer": measure}, 2, keep=results.Results(out).turn)
    kept = [{"row": side, "result": value} for side, value in (("ours", 1.0), ("peer", 2.0), ("ours", 3.0))]
    assert [{key: row[key] for key in ("row", "result")} for row in results.read(out)] == kept
    assert capsys.readouterr().out == "ours: result 1\npeer: result 2\nours: result 3\n"
    with pytest.raises(SystemExit):
        results.Results(tmp_path / "kept")
    assert "kept: cannot be written (Is a directory); name another file with --out" in capsys.readouterr().err
