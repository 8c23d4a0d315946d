"""The memory table of a plan on a narrow terminal, and what dropout costs."""

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from flows.cli import plan_table
from flows.cli.plan_table import GIB, print_plan
from flows.ui.console import TrimmedConsole
from modeling.planning.planner import plan
from profiles import resolve
from tests.profiles.pair import PAIR


@pytest.fixture(scope="module")
def planned():
    return plan(resolve.load(PAIR))


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
    print_plan(TrimmedConsole(), resolve.load(PAIR), replace(planned, stages=[large], **device))
    lines = capsys.readouterr().out.splitlines()
    header, row = next(pair for pair in pairwise(lines) if pair[0].startswith("stage"))
    assert header.endswith("iB of 11.8 GiB")
    assert set(cells) <= set(row.split()), row
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith(" ")] == []


def test_plan_says_what_dropout_of_attention_costs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    small = ("hidden_size=64", "num_attention_heads=4", "num_hidden_layers=2", "vocab_size=512")
    gpt = ["model.architecture=gpt", "model.max_position_embeddings=512", *(f"model.{key}" for key in small)]
    gpt += ["model.intermediate_size=256", "model.num_key_value_heads=4", "tokenizer.vocabulary_size=512"]
    shown = {}
    for rate in (0.0, 0.1):
        profile = resolve.load(PAIR, [*gpt, f"model.dropout={rate}"])
        print_plan(TrimmedConsole(), profile, plan(profile))
        shown[rate] = capsys.readouterr().out
    said = "warning: model.dropout = 0.1: attention has no flash kernel with dropout, and keeps its probabilities"
    assert said in shown[0.1]
    assert "flash kernel" not in shown[0.0]
    assert re.search(r"would need \d\S* MiB less", shown[0.1])


def test_nearby_degrees_say_what_a_faster_one_may_cost(monkeypatch):
    def topology(degree: int, seconds: float, **levels: str) -> SimpleNamespace:
        return SimpleNamespace(step_seconds=seconds, mesh={"tensor": degree}, levels=levels, needs=21.4 * GIB)

    recomputed, as_much = {"train.recompute": "selective 19"}, {"train.recompute": "none"}
    others = [
        (topology(1, 0.95), recomputed),
        (topology(4, 0.9, tensor="node"), as_much),
        (topology(8, 12.47), recomputed),
    ]
    found = [SimpleNamespace(plan=each, overrides=keys) for each, keys in others]
    monkeypatch.setattr(plan_table, "neighbours", lambda _: found)
    profile = SimpleNamespace(train=SimpleNamespace(recompute="none"))
    assert plan_table._nearby(profile, topology(2, 1.0, tensor="chip")) == (
        "tensor 1: 5% faster with selective recomputation in 21.4 GiB, "
        "tensor 4: 10% faster if its groups, then across chips, do not slow the gathers of the shards, "
        "tensor 8: 12 times as slow; --search ranks all topologies"
    )
