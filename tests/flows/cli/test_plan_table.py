"""The memory table of a plan on a narrow terminal, whatever the sizes are."""

from dataclasses import replace
from itertools import pairwise

import pytest

from flows.cli.plan_table import GIB, print_plan
from flows.ui.console import TrimmedConsole
from modeling.planning.planner import plan
from profiles import resolve


@pytest.fixture(scope="module")
def planned():
    return plan(resolve.load("tiny"))


@pytest.mark.parametrize(
    ("factor", "cells"),
    [
        (1, ("5.22", "29.10", "450.00", "499.98", "░░░░░", "4%")),
        (400, ("2.04", "11.37", "0.44", "19.96", "█████", "169%")),
        (40_000, ("203.91", "1,137", "0.44", "1,953", "█████", "16550%")),
    ],
)
def test_memory_table_is_complete_and_has_no_trailing_blanks(capsys, monkeypatch, planned, factor, cells):
    monkeypatch.setenv("COLUMNS", "80")
    (stage,) = planned.stages
    large = replace(stage, bytes={kind: size * factor for kind, size in stage.bytes.items()})
    device = {"device_bytes": round(11.8 * GIB), "host_bytes": 450 << 20}
    print_plan(TrimmedConsole(), resolve.load("tiny"), replace(planned, stages=[large], **device))
    lines = capsys.readouterr().out.splitlines()
    header, row = next(pair for pair in pairwise(lines) if pair[0].startswith("stage"))
    assert header.endswith("iB of 11.8 GiB")
    assert set(cells) <= set(row.split()), row
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith(" ")] == []
