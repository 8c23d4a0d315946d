"""The command as a user meets it: exit codes, one line for each mistake, JSON for scripts."""

import json

import pytest
import yaml

from flows.cli import main
from tests.flows.micro import settings


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.learning_rat=1", ("train.learning_rat = 1", "learning_rate")),
        ("parallel.tensor=3", ("parallel.tensor = 3", "does not divide 4 query heads", "2, 4")),
        ("train.global_batch_size=6", ("train.global_batch_size = 6", "micro_batch_size 4", "4, 8")),
        (
            "data.sources.0.path=/no/such/file.txt",
            ("data.sources.0.path = /no/such/file.txt", "there is no such file"),
        ),
        (
            "tokenizer.vocabulary_size=999",
            ("tokenizer.vocabulary_size = 999", "larger than model.vocab_size", "300"),
        ),
        ("train.steps=many", ("train.steps = many", "is not a whole number")),
    ],
)
@pytest.mark.parametrize("subcommand", ["plan", "run"])
def test_a_bad_profile_is_refused_in_one_line_before_any_work(
    capsys, monkeypatch, tmp_path, profile, subcommand, override, expected
):
    monkeypatch.chdir(tmp_path)
    assert main([subcommand, str(profile), "--set", override]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert all(part in err for part in expected), err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_profile_is_refused_with_those_there_are(capsys):
    assert main(["plan", "tinny"]) == 2
    assert "nearest valid: tiny" in capsys.readouterr().err


def test_a_profile_that_does_not_fit_is_refused(capsys, profile):
    huge = ("model.hidden_size=65536", "model.intermediate_size=262144", "model.num_hidden_layers=100")
    assert main(["plan", str(profile), *settings(*huge)]) == 2
    assert "GiB" in capsys.readouterr().err


def test_the_plan_as_json_is_one_document_with_the_keys_that_tools_rely_on(capsys):
    assert main(["plan", "tiny", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 2_000_000 < plan["parameters"] < 3_000_000
    assert plan["mesh"] == {"pipeline": 1, "data": 1, "context": 1, "tensor": 2}
    assert plan["fits"] is True
    assert set(plan["stages"][0]["bytes"]) == {"parameters", "gradients", "optimizer", "activations"}
    assert {"device_bytes", "step_seconds", "tokens_per_second"} <= plan.keys()


def test_the_plan_in_words_names_parameters_and_mesh(capsys):
    assert main(["plan", "tiny"]) == 0
    out = capsys.readouterr().out
    assert "2,735,424" in out
    assert "tensor 2" in out
    assert "fits in" in out


def test_profiles_are_listed_with_their_descriptions(capsys):
    assert main(["profiles", "--json"]) == 0
    assert "Python" in json.loads(capsys.readouterr().out)["tiny"]


def test_help_imports_neither_prefect_nor_torch(command):
    code, out, _ = command("--help").result()
    assert code == 0
    assert "trainshed" in out
    code, out, err = command("profiles", PYTHONPROFILEIMPORTTIME="1").result()
    assert code == 0
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines()}
    assert "yaml" in imported
    assert not imported & {"prefect", "torch", "transformers", "numpy"}


def test_a_run_as_json_prints_one_document_and_the_rest_elsewhere(command, profile, prefect_server):
    code, out, err = command("run", str(profile), "--json", PREFECT_API_URL=prefect_server).result()
    assert code == 0, err
    result = json.loads(out)
    assert result["run"] == "micro"
    assert {step["how"] for step in result["steps"]} == {"done", "skipped"}
    assert "tokenizer" in err


def test_a_run_in_words_is_clean_and_says_where_everything_is(command, profile, prefect_server, tmp_path):
    code, out, err = command("run", str(profile), "--name", "first", PREFECT_API_URL=prefect_server).result()
    assert code == 0, err
    assert err == ""
    assert "| INFO" not in out
    folder = tmp_path / "store/runs/first"
    for path in (folder / "export", folder / "metrics.jsonl", folder / "report.html"):
        assert str(path.relative_to(tmp_path)) in out
    assert "validation loss" in out
    assert "perplexity" in out
    assert yaml.safe_load((folder / "profile.yaml").read_text())["name"] == "first"


def test_a_failure_that_is_no_refusal_is_one_line_and_exit_code_1(command, profile, tmp_path):
    (tmp_path / "store").write_text("a file where a folder belongs")
    code, _, err = command("run", str(profile)).result()
    assert code == 1
    assert "Traceback" not in err
    assert "store" in err
