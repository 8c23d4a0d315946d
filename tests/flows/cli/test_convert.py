"""`trainshed convert` as a user meets it: exit codes, one line for a mistake, JSON for scripts."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.cli.main import main

CASE = Path(__file__).parents[2] / "fixtures" / "nxd" / "gqa-tp4-pp2-kv2"
SOURCE, CONFIG = str(CASE / "nxd"), ("--config", str(CASE / "hf"), "--nxd-layout", "trn1")


def test_converted_checkpoint_equals_its_source(capsys, caplog, tmp_path):
    target = str(tmp_path / "model")
    assert main(["convert", SOURCE, target, "--to", "hf", *CONFIG, "--verify", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["equal"] == output["tensors"] == 39
    assert list(output["files"]) == ["model.safetensors"]
    assert main(["convert", target, str(CASE / "hf"), "--verify"]) == 0
    assert "all 39 tensors are equal" in capsys.readouterr().out
    assert main(["convert", SOURCE, target, "--to", "hf", *CONFIG]) == 0  # done before
    capsys.readouterr()
    assert main(["convert", target, "/dev/null/model", "--to", "hf"]) == 2
    assert capsys.readouterr().err == ("trainshed: DESTINATION = /dev/null: is no folder; name another one\n")
    degrees = ("--tensor", "4", "--pipeline", "2")
    assert main(["convert", target, str(tmp_path / "shards"), "--to", "nxd", *degrees]) == 0
    expected = "NxD shards for 4 tensor ranks × 2 pipeline stages, KV multiplier 2, layout trn1, "
    assert expected in caplog.text


def test_a_difference_is_found_and_named(capsys, tmp_path):
    shards = shutil.copytree(SOURCE, tmp_path / "nxd")
    path = shards / "model" / "dp_rank_00_tp_rank_02_pp_rank_01.pt"
    state = torch.load(path, weights_only=True)
    state["model.layers.3.mlp.down_proj.weight"][5, 7] += 1
    torch.save(state, path)
    assert main(["convert", str(shards), str(CASE / "hf"), "--verify", *CONFIG]) == 1
    name = "model.layers.3.mlp.down_proj.weight"
    expected = f"{name}: maximum difference 1, relative 0.944; 1 of 6,144 elements differ\n"
    assert capsys.readouterr().err.endswith(f"1 of 39 tensors differ\n{expected}")
    assert main(["convert", str(shards), str(CASE / "hf"), "--verify", *CONFIG, "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert output["equal"] == 38
    assert [line.partition(":")[0] for line in output["differ"]] == [name]


def test_differences_are_listed_largest_first_and_the_rest_is_counted(capsys, tmp_path):
    other = shutil.copytree(CASE / "hf", tmp_path / "hf")
    state = load_file(other / "model.safetensors")
    for number, tensor in enumerate(state.values()):
        tensor += 0.01 * (number + 1)
    save_file(state, other / "model.safetensors")
    assert main(["convert", str(CASE / "hf"), str(other), "--verify"]) == 1
    head, *lines, rest = capsys.readouterr().err.splitlines()
    assert (head, rest) == ("trainshed: 39 of 39 tensors differ", "and 19 more")
    assert {line.partition(":")[0] for line in lines} < state.keys()
    sizes = [float(re.search(r"maximum difference ([\d.]+), relative", line)[1]) for line in lines]
    assert len(sizes) == 20
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(0.39, rel=0.05)


def test_a_single_file_is_a_source(capsys, tmp_path):
    model = shutil.copy(CASE / "hf" / "model.safetensors", tmp_path)
    config = ("--config", str(CASE / "hf"))
    assert main(["convert", str(model), str(tmp_path / "again"), "--to", "hf", *config, "--verify"]) == 0
    assert "all 39 tensors are equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SOURCE, "--to", "hf"], "--config: is missing"),
        ([SOURCE, "--to", "hf", "--config", str(CASE / "hf")], "--nxd-layout: is missing"),
        ([f"{CASE}/nxdt", "--to", "hf"], f"it is not a repository's name; nearest valid: {SOURCE}\n"),
        ([str(CASE), "--to", "hf"], "is not a checkpoint"),
        ([str(CASE / "hf"), "--to", "nxd", "--tensor", "3"], "--tensor = 3"),
        ([str(CASE / "hf"), "--to", "hf", "--pipeline", "2"], "--pipeline = 2: is used only with --to nxd"),
        ([str(CASE / "hf"), "--verify"], "out: does not exist"),
        (
            [str(CASE / "hf"), "--to", "hf", "--average", "0"],
            "--average = 0: is fewer than two checkpoints; nearest valid: 2\n",
        ),
        (
            [str(CASE / "hf"), "--to", "hf", "--average", "-1"],
            "--average = -1: is fewer than two checkpoints",
        ),
        (
            [str(CASE / "hf"), "--to", "hf", "--verify", "--adapters", "/no/where"],
            "--verify: compares with SOURCE, without the adapters; it cannot be combined with --adapters",
        ),
        ([str(CASE / "hf"), "--to", "peft"], f"SOURCE = {CASE / 'hf'}: has no adapters"),
        (
            ["run:tiny", "--to", "hf"],
            "SOURCE = run:tiny: is a run; name its folder; nearest valid: store/runs/tiny\n",
        ),
        (
            ["tiny", "--to", "hf"],
            "it is not a repository's name; nearest valid: store/runs/tiny\n",
        ),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line_and_write_nothing(
    arguments, message, capsys, tmp_path, monkeypatch
):
    (tmp_path / "store/runs/tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["convert", arguments[0], str(tmp_path / "out"), *arguments[1:]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
