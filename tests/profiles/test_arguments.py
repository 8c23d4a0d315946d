"""Arguments of all programs: abbreviated options are rejected with the nearest one."""

from pathlib import Path

import pytest

from benchmarks.harness.timing import make_parser
from modeling.training.trainer import job_parser

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("make", "arguments", "option", "nearest"),
    [
        (lambda: make_parser("text", rounds=3), ["--round", "5"], "--round", "--rounds"),
        (
            lambda: job_parser("train"),
            ["--run", "a", "--run-folder", "b", "--dataset", "c"],
            "--run",
            "--run-folder",
        ),
    ],
    ids=["benchmark", "job"],
)
def test_abbreviated_option_is_rejected_with_the_option(
    capsys, monkeypatch, make, arguments, option, nearest
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with pytest.raises(SystemExit) as ended:
        make().parse_args(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("usage: ")
    assert f"there is no option {option}; nearest valid: {nearest}" in printed


def test_every_program_rejects_abbreviated_options():
    """argparse's own parser takes `--st` for `--store`."""
    files = [
        path
        for folder in ("benchmarks", "flows", "tasks", "modeling", "parallel", "profiles")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert not [
        path for path in files if "ArgumentParser(" in path.read_text() and path.name != "arguments.py"
    ]
