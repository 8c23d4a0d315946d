"""The documentation: commands that work as they stand, links that lead somewhere, pages and pictures that are current.

A block that begins with ```sh is run, all of a page's blocks in order in one folder; ```sh cluster needs what a test has not (a
cluster, an account, an hour), so of it only the arguments of `trainshed` and names of modules are checked. There are no others.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.main import parser
from profiles.reference import page

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```sh( cluster)?\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"(?:\$ )?(?:\.venv/bin/)?(?:trainshed|make|python3? -m) ")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# Overrides with which any pretraining run takes seconds instead of minutes, on one rank.
SMALL = {
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.num_hidden_layers": 1,
    "train.steps": 4,
    "train.warmup_steps": 1,
    "train.sequence_length": 32,
    "parallel.tensor": 1,
    "cluster.devices_per_node": 1,
    "compile.enabled": "false",
    "checkpoint.every": 2,
    "evaluate.batches": 1,
}


def blocks(page: Path) -> list[tuple[bool, str]]:
    """Whether each block of commands needs a cluster, and its text with continued lines joined."""
    found = BLOCK.findall(page.read_text())
    return [(bool(cluster), commands.replace("\\\n", " ")) for cluster, commands in found]


def as_tested(line: str) -> str:
    """A documented command, small enough for a test."""
    line = line.replace(".venv/bin/", "").split("  #")[0]
    if line.startswith("make "):
        return f"make -C {shlex.quote(str(ROOT))} -n {line.removeprefix('make ')}"
    if line.startswith("trainshed run "):
        return " ".join([line, *(f"--set {key}={value}" for key, value in SMALL.items())])
    return line


# A group for each page, because together these are the longest file of the suite.
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=pytest.mark.xdist_group(page.stem)) for page in PAGES]
)
def test_commands_work_as_they_stand(prefect_server, tmp_path, page):
    script = "\n".join(
        as_tested(line) for cluster, text in blocks(page) if not cluster for line in text.splitlines()
    )
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("A ring of ranks, each with a part of the sequence. " * 400)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PREFECT_API_URL": prefect_server,
    }
    ran = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_for_a_cluster_have_arguments_that_exist(page):
    for cluster, text in blocks(page):
        for line in text.splitlines() if cluster else ():
            words = shlex.split(line, comments=True)
            if words and Path(words[0]).name == "trainshed":
                parser().parse_args(words[1:])  # exits with 2 where it does not understand
            if words and Path(words[0]).name == "python" and words[1] == "-m":
                assert importlib.util.find_spec(words[2]), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_in_a_block_that_is_checked(page):
    fenced, unchecked = False, []
    for line in BLOCK.sub("", page.read_text()).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif (fenced or line.startswith("    ")) and COMMAND.match(line.strip()):
            unchecked.append(line)
    assert not unchecked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_profile_reference_is_current():
    assert (ROOT / "docs" / "profiles.md").read_text() == page(), (
        "python -m profiles.reference > docs/profiles.md"
    )


def test_the_pictures_are_current():
    path = ROOT / "docs" / "pictures" / "draw.py"
    spec = importlib.util.spec_from_file_location("draw", path)
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    for picture in draw.PICTURES:
        kept = (path.parent / f"{picture.__name__}.svg").read_text()
        assert kept == picture().text(), f"python docs/pictures/{path.name}"
