"""The command as a user meets it: exit codes, one line for each mistake, JSON for scripts."""

import argparse
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import yaml

import trainshed
from flows.cli.main import main, parser
from profiles import resolve
from profiles.files import state_files
from tests import faults, wheel
from tests.docs.test_extending import EXAMPLES, write_examples
from tests.flows.experiments.test_ladder import write_ladder
from tests.flows.micro import SHADOWING, Command, settings, write_shadowing_modules
from tests.profiles.published import published
from tests.tasks.reporting.run_folders import write_run
from tests.tasks.source_files import write_pair

pytestmark = pytest.mark.slow

(COMMANDS,) = (each.choices for each in parser()._actions if isinstance(each, argparse._SubParsersAction))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.learning_rat=1", ("train.learning_rat = 1", "learning_rate")),
        ("parallel.tensor=3", ("parallel.tensor = 3", "does not divide 4 query heads", "nearest valid: ")),
        ("train.global_batch_size=6", ("train.global_batch_size = 6", "micro_batch_size 4", "4, 8")),
        (
            "tokenizer.vocabulary_size=999",
            ("tokenizer.vocabulary_size = 999", "larger than model.vocab_size", "300"),
        ),
        ("train.steps=many", ("train.steps = many", "is not a whole number")),
    ],
)
@pytest.mark.parametrize("subcommand", ["plan", "run"])
def test_invalid_profile_is_rejected_in_one_line_before_any_work(
    capsys, monkeypatch, tmp_path, profile, subcommand, override, expected
):
    monkeypatch.chdir(tmp_path)
    assert main([subcommand, str(profile), "--set", override]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert all(part in err for part in expected), err
    assert list(tmp_path.iterdir()) == []


def test_missing_or_unreadable_data_rejects_a_run_but_not_its_plan(capsys, monkeypatch, tmp_path, profile):
    monkeypatch.chdir(tmp_path)
    missing = ["--set", "data.sources.0.path=/no/such/file.txt"]
    expected = "data.sources.0.path = /no/such/file.txt: there is no such file or folder"
    assert main(["run", str(profile), *missing]) == 2
    assert expected in capsys.readouterr().err
    assert main(["plan", str(profile), *missing]) == 0
    last = capsys.readouterr().out.split("\n\n")[-1]
    assert " ".join(last.split()) == f"`trainshed run` cannot start it here: {expected}"

    (texts := tmp_path / "texts").mkdir()
    monkeypatch.setattr(state_files, "DELAYS", ())
    faults.inject(monkeypatch, texts, faults.failing("listdir", path="texts", error=errno.EACCES))
    unreadable = ["--set", f"data.sources.0.path={texts}/*.txt"]
    expected = f"data.sources.0.path = {texts}/*.txt: cannot be read: Permission denied: '{texts}'"
    assert main(["run", str(profile), *unreadable]) == 1
    assert expected in capsys.readouterr().err
    assert main(["plan", str(profile), *unreadable]) == 0
    assert expected.replace(" ", "") in "".join(capsys.readouterr().out.split())


def test_unknown_profile_is_rejected_with_valid_names(capsys):
    assert main(["plan", "tinny"]) == 2
    assert "nearest valid: tiny" in capsys.readouterr().err


def test_profile_that_does_not_fit_is_rejected(capsys, profile):
    huge = ("model.hidden_size=65536", "model.intermediate_size=262144", "model.num_hidden_layers=100")
    assert main(["plan", str(profile), *settings(*huge)]) == 2
    assert "GiB" in capsys.readouterr().err


@pytest.fixture
def without_prefect(monkeypatch, tmp_path):
    """An empty working folder, in which a command that starts a flow fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.cli.run.prefect_api", lambda _: pytest.fail("Prefect was started"))


@pytest.mark.parametrize(
    ("device", "card", "says"),
    [
        ("cuda", "h200", "this machine has none"),
        ("cuda", None, "this machine has none"),
        ("neuron", "trn2", "torch-neuronx"),
    ],
)
def test_missing_devices_reject_a_run_but_not_its_plan(without_prefect, capsys, profile, device, card, says):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("an accelerator is here")
    there = settings(f"cluster.device={device}", *([f"cluster.accelerator={card}"] if card else []))
    if card:  # without one, a plan asks which to plan for
        assert main(["plan", str(profile), *there]) == 0
        capsys.readouterr()
    for command in ("run", "chain"):
        assert main([command, str(profile), *there]) == 2
        err = capsys.readouterr().err
        assert f"cluster.device = {device}" in err
        assert says in err


def test_runs_are_rejected_before_prefect_is_imported(without_prefect, capsys, profile, tmp_path):
    """By the store's runs, by memory, and by the runs and budget of a ladder."""
    ladder = write_ladder(tmp_path, profile, maximum_flops=1)
    (tmp_path / "empty.txt").touch()
    sft = settings(
        "objective.kind=sft", "init.from=org/model", "tokenizer.source=org/model", "objective.template=chatlm"
    )
    huge = settings(
        "model.hidden_size=65536", "model.intermediate_size=262144", "model.num_hidden_layers=100"
    )
    for arguments, expected in (
        (["run", "tiny-sft"], "run:tiny: the store ./store has no run tiny with an export; train it first"),
        (
            ["run", "tiny-sft", "--from", "run:mine"],
            f"there is no such folder: {tmp_path}/store; the first run",
        ),
        (["run", str(profile), "-s", "data.sources.0.path=empty.txt"], f"is empty: {tmp_path}/empty.txt\n"),
        (
            ["run", str(profile), "-s", "data.sources.0.path=nope"],
            f"no such file or folder: {tmp_path}/nope\n",
        ),
        (
            ["run", str(profile), *sft],
            f"nor a file: {tmp_path}/chatlm; nearest valid: chatml\n",
        ),
        (["run", str(profile), *huge], "stage 0 needs"),
        (["ladder", "run", str(ladder)], "maximum_flops"),
    ):
        assert main(arguments) == 2
        assert expected in capsys.readouterr().err
    assert {*tmp_path.iterdir()} == {ladder, tmp_path / "empty.txt"}


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("local", "--nproc-per-node 1 .* modeling.training.train --run-folder .*/store/runs/micro "),
        (
            "slurm",
            r" on 1 node, 1 process per node\n#SBATCH --job-name=ts-micro-train-\w{8}\n(.*\n)*#SBATCH --mem=4G\n",
        ),
        ("kubernetes", r"kind: Job\nmetadata:\n  name: ts-micro-train-\w{12}\n(.*\n)*.* image: image\n"),
    ],
)
def test_dry_run_prints_what_training_would_submit(
    without_prefect, capsys, profile, tmp_path, launcher, expected
):
    """On a machine that has neither sbatch nor a cluster."""
    kubernetes = "cluster.kubernetes={image: image, claim: store, mount: /store}"
    cluster = settings(f"cluster.launcher={launcher}", kubernetes, "cluster.slurm=[--mem=4G]")
    assert main(["run", str(profile), "--dry-run", *cluster]) == 0
    out, err = capsys.readouterr()
    assert re.search(expected, out)
    assert "--dataset DATASET" in " ".join(out.split()).replace("' '", " ").replace("- ", "")
    assert "nothing was submitted" in err
    assert list(tmp_path.iterdir()) == []


def test_profiles_are_listed_by_where_they_start_and_fit_the_terminal(capsys, monkeypatch, tmp_path):
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["profiles", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    for name, entry in listed.items():
        assert entry["status"] == ("runs here" if name.startswith("tiny") else "submits to Slurm"), name
        assert entry["reason"] == ""
    for columns in (80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["profiles"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= columns
        assert [line for line in out.splitlines() if line.endswith(" ")] == []
        text = " ".join(out.split())
        assert all(entry["description"] in text for entry in listed.values())
        assert "runs here `trainshed run tiny` trains on this machine" in text
        assert "submits to Slurm `trainshed run llama3-8b` submits a job with sbatch" in text
    assert main(["plan", published("llama2-7b-trn1")]) == 0
    assert "cannot start it here: cluster.accelerator = trn1" in capsys.readouterr().out
    assert main(["plan", "llama3-8b"]) == 0
    planned = capsys.readouterr().out
    assert "cannot start it here" not in planned
    assert "pipeline messages" not in planned  # it has none
    assert re.search(r"nearby +tensor 2: \d+% slower, tensor 8: \d+% slower; --search ranks all", planned)


def test_profiles_are_listed_with_their_descriptions(capsys):
    assert main(["profiles", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert "Python" in listed["tiny"]["description"]
    parameters = resolve.load("tiny").model.parameters
    assert (listed["tiny"]["parameters"], listed["tiny"]["status"]) == (parameters, "runs here")
    assert listed["llama3-70b"]["cluster"]["nodes"] == 8
    assert main(["profiles", "Tiny-S", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tiny-sft": listed["tiny-sft"]}
    assert main(["profiles", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("runs here")  # the legend
    assert "llama" not in lines


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=lambda words: " ".join(words))
def test_help_fits_a_terminal_and_ends_with_an_example_that_works(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    example = re.fullmatch(r"example: trainshed (.*?)(    \(.*\))?", lines[-1])
    options = parser().parse_args(example[1].split())
    resolve.check(resolve.load("tiny", getattr(options, "overrides", ())))  # of `fork`, whose parent is tiny


def test_user_error_is_the_exit_code_of_the_process(command):
    code, out, err = command("plan", "./nope.yaml").result()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "profile = ./nope.yaml: there is no such file" in err


def test_unexpected_error_is_one_line_with_the_path_of_its_traceback(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("flows.cli.profiles.run", lambda _: 1 / 0)
    assert main(["profiles"]) == 1
    failed, kept = capsys.readouterr().err.splitlines()
    assert failed == "trainshed: ZeroDivisionError: division by zero"
    assert "Traceback" in Path(kept.removeprefix("traceback: ")).read_text()


def test_help_imports_neither_prefect_nor_torch(command):
    code, out, _ = command("--help").result()
    assert code == 0
    assert "trainshed" in out
    code, out, err = command("profiles", PYTHONPROFILEIMPORTTIME="1").result()
    assert code == 0
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines()}
    assert "yaml" in imported
    assert not imported & {"prefect", "torch", "transformers", "numpy"}


def test_locale_of_another_encoding_starts_python_in_utf8_mode():
    code = "import sys; from flows.cli import main; main.parser = lambda: sys.exit(sys.flags.utf8_mode + 40); main.main()"
    # ASCII stands for ISO-8859-1, whose locales need not be installed.
    other = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for variables, mode in ((other, 41), ({"LC_ALL": "C.UTF-8"}, 40)):
        environment = {**os.environ, "PYTHONUTF8": "0", **variables}
        assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == mode


def test_characters_that_the_output_cannot_encode_are_replaced():
    for command in (["flows.cli.main", "profiles"], ["modeling.start", "tests.flows.cli.prints_dashes"]):
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        found = subprocess.run([sys.executable, "-m", *command], env=environment, capture_output=True)
        assert (found.returncode, found.stderr) == (0, b"")
        assert b"?" in found.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "tiny"],
        ["profiles", "--json"],
        ["compare", "./store/runs/first"],
    ],
    ids=" ".join,
)
def test_closed_pipe_is_not_a_failure(tmp_path, arguments):
    write_run(tmp_path / "store/runs/first")
    reader, writer = os.pipe()
    os.close(reader)  # as `head` is gone once it has its lines
    command = [sys.executable, "-m", "flows.cli.main", *arguments]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, timeout=120)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_the_working_folder_stays_on_pythonpath(tmp_path, monkeypatch):
    """It is an empty entry."""
    (tmp_path / "tasks.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}/other")
    assert trainshed.put_own_packages_first() == [str(tmp_path / "tasks.py")]
    assert os.environ["PYTHONPATH"] == os.pathsep.join((trainshed.HOME, "", "/other"))


RUN_PROGRAMS = """
import runpy, sys, trainshed
for name in sys.argv[1:]:
    print(name)
    runpy.run_path(f"{name}.py", run_name="__main__")
print(trainshed.HOME)
"""
LOSS = """
from torch.nn.functional import cross_entropy

def smoothed(logits, targets):
    return cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
"""


def test_run_prints_steps_final_loss_and_output_paths(
    command, profile, prefect_server, tmp_path, tmp_path_factory, monkeypatch
):
    """The wheel, beside modules of the same names on PYTHONPATH; then a cached run with closed output.

    In the wheel's environment, the programs of docs/extending print what their pages show, and `plan` plans.
    """
    write_shadowing_modules(tmp_path)
    program = wheel.install(tmp_path_factory.mktemp("wheel"))
    assert {path.parent.name for path in program.parents[1].rglob("py.typed")} == {*trainshed.PACKAGES}
    examples = tmp_path_factory.mktemp("examples")
    write_examples(examples)
    printing = {name: output for name, (_, output) in EXAMPLES.items() if output}
    run_all = [program.with_name("python"), "-c", RUN_PROGRAMS, *printing]
    ended = subprocess.run(
        run_all, cwd=examples, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    (site,) = program.parents[1].glob("lib/python*/site-packages")
    shown = "".join(f"{name}\n{output}" for name, output in printing.items())
    assert ended.stdout == f"{shown}{site.resolve()}\n"

    monkeypatch.setattr(Command, "program", (str(program),))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, out, err = command("plan", str(profile), "--json").result()
    assert code == 0, err
    assert json.loads(out)
    (tmp_path / "my_losses.py").write_text(LOSS)
    arguments = ("run", str(profile), "--name", "first", *settings("train.loss=my_losses:smoothed"))
    code, out, err = command(*arguments, PREFECT_API_URL=prefect_server).result()
    assert code == 0, err
    assert err == (
        "trainshed: imports its own packages instead of these on PYTHONPATH: "
        + ", ".join(f"{tmp_path}/{name}" for name in SHADOWING)
        + "\n"
    )
    assert "| INFO" not in out
    folder = tmp_path / "store/runs/first"
    report = folder / "report.html"
    for path in (folder / "export", folder / "metrics.jsonl", report):
        assert str(path.relative_to(tmp_path)) in out
    assert "validation loss" in out
    assert "perplexity" in out
    assert yaml.safe_load((folder / "profile.yaml").read_text())["name"] == "first"
    report.unlink()
    again = command(*arguments, PREFECT_API_URL=prefect_server)
    again.process.stdout.readline()
    again.process.stdout.close()
    assert again.process.wait(timeout=300) == 0
    assert report.exists()


@pytest.mark.parametrize("kind", ["files", "megatron"])
def test_corrupted_data_is_rejected_with_exit_code_2(
    prefect_server, capsys, monkeypatch, tmp_path, profile, kind
):
    monkeypatch.chdir(tmp_path)
    texts = {"kind": "files", "path": str(profile.with_name("texts.jsonl"))}
    if kind == "files":
        (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
        bad, expected = {"kind": kind, "path": str(tmp_path / "bad.jsonl")}, "bad.jsonl, line 2: invalid JSON"
    else:
        write_pair(tmp_path / "bad", [[1, 2], [3, 999]])
        bad, expected = {"kind": kind, "path": str(tmp_path / "bad")}, "bad.bin, byte 6: token 999 is not in"
    sources = f"data.sources={json.dumps([texts, bad] if kind == 'megatron' else [bad])}"
    code = main(["run", str(profile), *settings(sources)])
    err = capsys.readouterr().err
    assert code == 2, err
    assert expected in err.splitlines()[-1]
    assert "Traceback" not in err
    assert "traceback" not in err


def test_failure_is_one_line_and_exit_code_1(command, profile, tmp_path):
    (tmp_path / "store/logs/server.log").mkdir(parents=True)  # a folder where a file belongs
    code, _, err = command("run", str(profile)).result()
    assert code == 1
    assert "Traceback" not in err
    assert "store" in err
