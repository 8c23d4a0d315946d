"""Plans as the command prints them: figures, searches and their commands, JSON."""

import json
import re
import shlex
from pathlib import Path

import pytest

from flows.cli.main import main
from tests.flows.micro import settings
from tests.profiles.pair import PAIR
from tests.profiles.published import published

pytestmark = pytest.mark.slow


def test_the_plan_as_json_is_one_document_with_the_keys_that_tools_rely_on(capsys):
    assert main(["plan", PAIR, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 2_000_000 < plan["parameters"] < 3_000_000
    assert plan["mesh"] == {"pipeline": 1, "data": 1, "context": 1, "tensor": 2}
    assert plan["fits"] is True
    assert set(plan["stages"][0]["bytes"]) == {"parameters", "gradients", "optimizer", "activations"}
    assert {"device_bytes", "step_seconds", "tokens_per_second"} <= plan.keys()


def test_plan_prints_parameters_and_mesh(capsys):
    assert main(["plan", PAIR]) == 0
    out = capsys.readouterr().out
    assert "2,735,424" in out
    assert "tensor 2" in out
    assert "fits in" in out
    assert max(map(len, out.splitlines())) <= 80


def test_plan_of_a_small_run_has_no_speed_and_warns_of_repeated_data(capsys, monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text("word " * 4000)
    few = f"data={{sources: [{{kind: files, path: {tmp_path / 'text.txt'}}}], validation_fraction: 0.2}}"
    monkeypatch.setenv("COLUMNS", "200")
    few = ("cluster.device=cuda", "cluster.accelerator=h200", "model.num_hidden_layers=1", few)
    assert main(["plan", PAIR, *settings(*few)]) == 0
    out = capsys.readouterr().out
    assert "too small to estimate" in out
    assert "1 layer of 19" in out
    assert "1 node of 2" in out
    assert "tokens/s" not in out
    assert "about 154 passes over the data" in out
    assert "train at most 7 steps" in out


def test_cpu_plan_includes_process_memory(capsys):
    assert main(["plan", "tiny"]) == 0
    columns, row, verdict = capsys.readouterr().out.partition("\nstage")[2].splitlines()[:3]
    assert "process" in columns
    *parts, total = map(float, re.findall(r"\d+\.\d\d", row))
    assert total == pytest.approx(sum(parts), abs=0.05)
    assert parts[-1] > 300
    whole, left = re.search(r"fits in ([\d.]+) GiB per device, ([\d.]+) GiB to spare", verdict).groups()
    assert float(whole) - float(left) == pytest.approx(total / 1024, abs=0.1)


@pytest.mark.parametrize("cuts", ["null", "[10,20,30,33,36,38,46,55,60,68,74]"])
def test_plan_figures_are_complete_on_a_narrow_terminal(capsys, monkeypatch, cuts):
    monkeypatch.setenv("COLUMNS", "80")
    interleaved = ("parallel.schedule=interleaved", f"parallel.pipeline_cuts={cuts}")
    assert main(["plan", published("llama3-70b-trn1"), *settings("parallel.pipeline=4", *interleaved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if "░" in line]
    assert len(rows) == 4
    for row in rows:
        assert len(re.findall(r"\d+\.\d\d", row)) == 5
        assert re.search(r" \d+%$", row)
    assert [line for line in lines if line.endswith(" ")] == []


def test_search_without_speeds_ranks_by_communication_volume(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["plan", PAIR, "--search"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "…" not in out  # cells are whole on a narrow screen
    assert "least communication first" in out
    assert "communication per step" in out
    assert "tokens/s" not in out
    assert "rejected" not in out  # two devices leave no family out


MINE = """
extends: llama3-8b-h200
model: {num_hidden_layers: 4}
parallel: {tensor: 4, pipeline: 2, pipeline_cuts: [3]}
train: {recompute: full 1}
"""


@pytest.mark.parametrize(
    "typed",
    [
        [
            "my profiles/mine.yaml",
            *settings("description=two words", "cluster.devices_per_node=16", "parallel.tensor=8"),
        ],
        [PAIR, *settings("cluster.devices_per_node=4", "train.micro_batch_size=2")],
    ],
    ids=lambda typed: Path(typed[0]).stem,
)
def test_printed_search_command_plans_the_first_topology(capsys, monkeypatch, tmp_path, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my profiles").mkdir()
    (tmp_path / "my profiles" / "mine.yaml").write_text(MINE)
    assert main(["plan", *typed, "--search"]) == 0
    out = capsys.readouterr().out
    tensor, pipeline, context, data = map(
        int, re.search(r"^1 +(\d+) +(\d+) +(\d+) +(\d+) ", out, re.M).groups()
    )
    name, *arguments = shlex.split(out.partition("to plan the first: ")[2])
    assert name == "trainshed"
    assert {*typed} - {*arguments} <= {"--set", "parallel.tensor=8"}  # the topology has its own
    columns, first = (re.search(rf"^{start} +(\S.*)$", out, re.M)[1].split() for start in (" ", "1"))
    assert ("MBS" in columns) == any(word.startswith("train.micro_batch_size=4") for word in arguments)
    assert "MBS" not in columns or first[columns.index("MBS")] == "4"
    assert main([*arguments, "--json"]) == 0
    mesh = {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}
    assert json.loads(capsys.readouterr().out)["mesh"] == mesh


def test_search_prints_each_reason_once_and_device_memory(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    small = ("model.num_hidden_layers=8", "train.global_batch_size=8", "cluster.nodes=1")
    assert main(["plan", published("gpt3-175b-trn1"), "--search", *settings(*small)]) == 0
    out = capsys.readouterr().out
    text = " ".join(out.split())
    for reason in ("does not divide it", "ranks does not support", "is more than the model's"):
        assert text.count(reason) == 1
    assert "GiB per device" in out
    assert len(out.splitlines()) <= 28
    assert [line for line in out.splitlines() if line.endswith(" ")] == []


def test_search_without_result_prints_available_and_needed_memory(capsys):
    large = ("cluster.nodes=1", "cluster.devices_per_node=2", "parallel.tensor=1", "parallel.pipeline=1")
    assert main(["plan", "llama3-70b-h200", "--search", *settings(*large)]) == 2
    out, err = capsys.readouterr()
    assert "no topology fits" in out
    assert "140 GiB per device" in out
    assert re.search(r"tensor 1,\s+pipeline 1 to 2\s+\(\d+\s+GiB or more\)", out)
    assert "140 GiB" in err
