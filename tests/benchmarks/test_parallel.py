"""The benchmarks' table: a row runs from end to end, and one whose losses differ has failed."""

import json
import math
import subprocess
import sys

import pytest

from benchmarks.rows import Result, difference
from benchmarks.sitting import Measured


def benchmark(*arguments):
    command = [sys.executable, "-m", "benchmarks.parallel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def test_a_quick_row_runs_and_ours_and_the_peer_agree():
    ran = benchmark("--quick", "--only", "tensor", "--json")
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(ran.stdout)["rows"]
    assert row["row"] == "tensor"
    assert row["difference"] <= row["tolerance"] == 1e-5
    assert row["ratios"] == [row["peer_seconds"] / row["ours_seconds"]]


def test_unknown_rows_are_refused_by_name():
    ran = benchmark("--only", "tensors")
    assert ran.returncode == 2
    assert "'tensors'" in ran.stderr
    assert "sequence" in ran.stderr


@pytest.mark.parametrize("loss", [8.3, 8.3 * (1 + 2e-5), math.nan])
def test_a_fast_row_whose_losses_differ_has_failed(loss):
    runs = [Measured([0.1], [8.4, 8.3]), Measured([0.2], [8.4, loss])]
    result = Result("tensor", "ours", "theirs", target=1.25, tolerance=1e-5, ours=[0.1], peer=[0.2])
    result.difference = difference(runs)
    assert result.status == ("met" if loss == 8.3 else "failed")
