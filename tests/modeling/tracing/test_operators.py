"""What a run asks of its device: the operators of every graph, by name, the same on all ranks, with nothing left open."""

from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from modeling.tracing import graph_stats, operators
from modeling.tracing.trace import trace
from profiles.resolve import load
from tests.modeling import micro
from tests.modeling.tracing.test_trace import SPREAD, profile


def test_every_program_names_its_operators(tmp_path):
    found = operators.of(trace(profile(tmp_path)))
    assert {name.partition(".")[0] for name in found} == {"aten", "_c10d_functional", "trainshed"}
    assert set(found["aten.mm"]) == {
        f"{region}, {mode}" for region in ("block", "loss") for mode in ("training", "evaluation")
    }
    assert set(found["aten.silu_backward"]) == {"block, training"}
    assert found["trainshed.attention"] == {"block, training": 1, "block, evaluation": 1}


def test_they_are_the_same_on_every_rank(tmp_path):
    spread = profile(tmp_path, *SPREAD)
    first, *others = (operators.of(trace(spread, place)) for place in (0, 3, 7))
    assert all(other == first for other in others)


def test_a_shape_that_is_not_known_before_it_runs_is_refused():
    graph = make_fx(lambda x: x * 2, tracing_mode="symbolic")(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"a shape that is not known before it runs: .*s\d+"):
        graph_stats.of(graph)


def test_a_branch_that_depends_on_data_is_refused(tmp_path, monkeypatch):
    import modeling.models.llama

    forward = modeling.models.llama.MLP.forward
    monkeypatch.setattr(
        modeling.models.llama.MLP, "forward", lambda self, x: forward(self, x if x.sum() > 0 else x + 1)
    )
    with pytest.raises(Exception, match="Data-dependent branching"):
        trace(profile(tmp_path))


def test_the_command_lists_them_and_says_what_a_table_lacks(tmp_path, capsys):
    path = str(micro.run_folder(tmp_path / "run") / "profile.yaml")
    table = tmp_path / "table.rst"
    table.write_text("| aten::mm | aten::\\_to\\_copy | and others")
    assert operators.main([path, "--table", str(table)]) == 1
    listed, lacks = capsys.readouterr().out.split(f"not in {table}: ")
    names = [line.split()[0] for line in listed.splitlines()[2:] if line]
    assert set(lacks.strip().split(", ")) == {name for name in names if name.startswith("aten.")} - {
        "aten.mm",
        "aten._to_copy",
    }
    table.write_text(" ".join(names).replace("aten.", "aten::"))
    assert operators.main([path, "--table", str(table)]) == 0
    table.write_text("nothing")
    with pytest.raises(SystemExit, match="2"):
        operators.main([path, "--table", str(table)])
    assert f"{table}: names no operator" in capsys.readouterr().err


def test_the_page_on_trainium_lists_what_the_largest_profiles_ask_of_it():
    text = (Path(__file__).parents[2] / "docs/trainium.md").read_text()
    listed = text.partition("<!-- operators -->")[2].partition("<!-- /operators -->")[0]
    found = {name for each in ("llama3-70b", "gpt3-175b") for name in operators.of(trace(load(each)))}
    assert set(listed.replace("`", "").replace(",", " ").split()) == found
