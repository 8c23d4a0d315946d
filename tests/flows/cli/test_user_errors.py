"""What a user types wrong: exit code 2 and one line, which names what was probably meant."""

import pytest

from flows.cli.main import main
from profiles import resolve
from tests.profiles.published import published
from tests.tasks.reporting.run_folders import write_run

pytestmark = pytest.mark.slow

TINY = str(resolve.SHIPPED / "tiny.yaml")
LADDER = str(resolve.SHIPPED / "ladders/tiny.yml")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["frobnicate"],
            "not a valid command; valid: run, chain, fork, ladder, mixture; trainshed --help lists all\n",
        ),
        (
            ["export"],
            "not a valid command; to export a run's latest checkpoint: trainshed convert store/runs/RUN DIR",
        ),
        (["rnu", "tiny"], "nearest valid: run"),
        (
            ["run", "tiny", "--dry-run", "--until", "grpahs"],
            "until = grpahs: is not a step of this run; nearest",
        ),
        (["deploy"], "deploy is not a valid command; to register deployments: trainshed up --register\n"),
        (["run", "tiny", "--overide", "a.b=c"], "usage: trainshed run [OPTIONS] PROFILE\n"),
        (["run", "tiny", "--overide", "a.b=c"], "no option --overide; nearest valid: --set\n"),
        (
            ["run", "tiny", "--xyz"],
            "no option --xyz; valid: --help, --set, --store, --name, --update; trainshed run --help lists all\n",
        ),
        (["run", "tiny", "--stroe", "s"], "no option --stroe; nearest valid: --store\n"),
        (["run", "tiny", "--st", "train.steps=5"], "no option --st; nearest valid: --store, --set\n"),
        (["gc", "--y"], "no option --y; nearest valid: --yes\n"),
        (["run", "tiny", "train.steps=5"], "to override a key: --set train.steps=5"),
        (["convert", "a", "b", "--to", "hff"], "hff is not a valid value; nearest valid: hf\n"),
        (["plan"], "required: PROFILE"),
        (["plan", "tiny", "extra"], "unexpected argument extra"),
        (["plan", "./nope.yaml"], "profile = ./nope.yaml: there is no such file"),
        (
            ["plan", "."],
            "profile = .: is a folder; a profile is a name (see `trainshed profiles`) or the path of",
        ),
        (["plan", "/"], "profile = /: is a folder"),
        (["plan", "tiny", "--set", "train.steps=["], "is not YAML"),
        (["plan", "tiny", "--set", "cluster.device=gpu"], "nearest valid: cuda, "),
        (["plan", "tiny", "--set", "data.sources.0.kind=file"], "nearest valid: files, "),
        (["plan", "tiny", "--set", "train.steps", "100"], "--set train.steps=100"),
        (["plan", "tinny", "--search"], "nearest valid: tiny"),
        (["plan", "tiny", "--search", "--changes", "x"], "--changes = x: cannot be combined with --search"),
        (["run", "tiny", "--store", "ftpp://somewhere"], "store = ftpp://somewhere"),
        (["run", "tiny", "--store", ""], "store = : is empty"),
        (
            ["run", "tiny", "--store", "filecache::s3://bucket/store"],
            "store = filecache::s3://bucket/store: ",
        ),
        (["run", "tiny", "--store", "/dev/null"], "store = /dev/null: cannot be written"),
        (
            ["run", published("llama2-7b-trn1")],
            "cluster.accelerator = trn1: native PyTorch does not train on it",
        ),
        (["plan", "tiny", "--set", "model.vocab_size=99999999999999999999999"], "is above 16777216"),
        (["plan", "tiny", "--set", "train.steps=99999999999999999999999"], "is above 2147483647"),
        (
            ["convert", "s3://nobodys/model", "out", "--to", "hf"],
            "SOURCE = s3://nobodys/model: no S3 credentials",
        ),
        (["profiles", "lamma3"], "WORD = lamma3: no profile has it in its name"),
        (["profiles", "lamma3"], "nearest valid: llama3"),
        (["compare", "nope"], "store = ./store: there is no such folder: "),
        (["compare", "./nope"], "no such run in"),
        (["tensorboard", "--port", "99999"], "99999 is not an integer from 1 to 65535"),
        (["up", "--port", "no"], "no is not an integer from 1 to 65535"),
        (["import-config", "nope.yaml"], "config = nope.yaml: there is no such file"),
        (["import-config", "."], "config = .: Is a directory"),
        (
            ["branches", "plan", TINY],
            "is a profile, which a file as in docs/training/branches.md names as its",
        ),
        (["run", LADDER], "is no profile but names one as its target; `trainshed ladder --help` shows"),
        (["import-config", TINY], "is a profile of Trainshed already; plan it: trainshed plan /"),
        (["convert", "nope", "out"], "--to: is missing"),
        (
            ["ladder", "plan", "tny"],
            "tny: is neither a shipped file nor a path that ends in .yaml; nearest valid: tiny\n",
        ),
        (["run", "tiny", "--until", "report"], "until = report: is the last step of every run; leave"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_user_error_exits_with_code_2_and_its_reason(capsys, monkeypatch, tmp_path, arguments, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    try:
        code = main(arguments)
    except SystemExit as ended:  # argparse
        code = ended.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert expected in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["runs"],
        ["gc", "--yes"],
        ["fleet"],
        ["compare", "tiny"],
        ["tensorboard"],
        ["evaluate", "tiny"],
        ["fork", "tiny", "new"],
        ["fork", "tiny", "new", "--work-dir", "elsewhere"],
    ],
    ids=" ".join,
)
def test_store_that_does_not_exist_is_not_an_empty_store(capsys, monkeypatch, tmp_path, arguments):
    write_run(tmp_path / "project/store/runs/tiny")
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--store", "project/stroe"]) == 2
    out, err = capsys.readouterr()
    assert f"there is no such folder: {tmp_path}/project/stroe; " in err
    assert "nearest valid: project/store\n" in err
    assert main([*arguments, "--store", "project"]) == 2
    assert (
        f"{tmp_path}/project has neither runs nor artifacts; nearest valid: project/store\n"
        in capsys.readouterr().err
    )
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["project"]
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["store"]
