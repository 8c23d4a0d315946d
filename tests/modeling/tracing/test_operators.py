"""Operators that a run needs from its device: listed by name, static."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from modeling.models.families import llama
from modeling.planning.planner import plan
from modeling.tracing import graph_stats, operators
from modeling.tracing.trace import trace
from profiles.resolve import load
from tests.modeling import micro
from tests.modeling.tracing.test_trace import profile, traced

pytestmark = pytest.mark.slow


def test_operators_are_counted_by_program():
    found = operators.count_operators(traced())
    assert {name.partition(".")[0] for name in found} == {"aten", "_c10d_functional", "trainshed"}
    assert set(found["aten.mm"]) == {
        f"{region}, {mode}" for region in ("block", "loss") for mode in ("training", "evaluation")
    }
    assert set(found["aten.silu_backward"]) == {"block, training"}
    assert found["trainshed.attention"] == {"block, training": 1, "block, evaluation": 1}


def test_dynamic_shape_is_rejected():
    graph = make_fx(lambda x: x * 2, tracing_mode="symbolic")(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"dynamic shape .*s\d+"):
        graph_stats.measure(graph, {})


def test_data_dependent_branch_is_rejected_and_later_plans_are_the_same(tmp_path):
    """After a failed capture, calls in this process hold their arguments until they return."""
    planned, forward = plan(load("deepseek-coder-1.3b")), llama.MLP.forward

    def branching(self: llama.MLP, x: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
        return forward(self, x if x.sum() > 0 else x + 1, keys)

    with (
        mock.patch.object(llama.MLP, "forward", branching),
        pytest.raises(Exception, match="Data-dependent branching"),
    ):
        trace(profile(tmp_path))
    assert plan(load("deepseek-coder-1.3b")) == planned


def test_command_lists_operators_and_those_missing_from_a_table(tmp_path, monkeypatch, capsys):
    path = str(micro.run_folder(tmp_path / "run") / "profile.yaml")
    monkeypatch.setattr(operators, "trace", lambda given: traced() if given == load(path) else None)
    table = tmp_path / "table.rst"
    table.write_text("| aten::mm | aten::\\_to\\_copy | and others")
    assert operators.main([path, "--table", str(table)]) == 1
    listed, missing = capsys.readouterr().out.split(f"not in {table}: ")
    names = [line.split()[0] for line in listed.splitlines()[2:] if line]
    assert set(missing.strip().split(", ")) == {name for name in names if name.startswith("aten.")} - {
        "aten.mm",
        "aten._to_copy",
    }
    table.write_text(" ".join(names).replace("aten.", "aten::"))
    assert operators.main([path, "--table", str(table)]) == 0
    table.write_text("nothing")
    with pytest.raises(SystemExit, match="2"):
        operators.main([path, "--table", str(table)])
    assert f"{table}: names no operator" in capsys.readouterr().err


def test_trainium_docs_list_the_operators_of_the_largest_profiles():
    text = (Path(__file__).parents[3] / "docs/devices/trainium.md").read_text()
    listed = text.partition("<!-- operators -->")[2].partition("<!-- /operators -->")[0]
    smallest = {  # with the same operators: a block that is recomputed has those of one that is not
        "llama3-70b": ["model.num_hidden_layers=1", "train.recompute=full"],
        "gpt3-175b": [
            *("model.num_hidden_layers=1", "model.dropout=0.1"),
            *("train.recompute=full", "parallel.pipeline=1", "parallel.pipeline_cuts=null"),
        ],
    }
    found = {
        name
        for each, fewer in smallest.items()
        for name in operators.count_operators(trace(load(each, fewer)))
    }
    assert set(listed.replace("`", "").replace(",", " ").split()) == found
