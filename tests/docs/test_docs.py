"""Documentation: commands run, links resolve, generated pages and pictures are current.

All ```sh blocks of a page run in order in one folder, and print lines of the same shape as the sample below them. A ```sh cluster
block needs a cluster, an account or hours: only its programs, their arguments and the samples of plans are checked. Commands
anywhere else are an error.
"""

import ast
import functools
import importlib.util
import io
import json
import logging
import re
import runpy
import shlex
import subprocess
import textwrap
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from itertools import groupby, takewhile
from pathlib import Path

import pytest
import yaml

from flows.cli.deployments import listed
from flows.cli.main import main, parser
from profiles import resolve
from profiles.documentation import page
from tests.docs import notebook
from tests.docs.columns import rows_of, undocumented_columns
from tests.flows.micro import write_profile
from tests.forked_jobs import forked_jobs
from tests.machines.machines import MACHINES

ROOT = Path(__file__).parents[2]
SOURCES = ("flows", "tasks", "modeling", "parallel", "profiles", "benchmarks", "docs", "tests")
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```sh( cluster)?\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.M | re.S)
FENCED = re.compile(r"^( *)```.*\n((?s:.*?))^\1```$", re.M)
COMMAND = re.compile(r"(?:\$ )?(?:\.venv/bin/)?(?:trainshed|make|prefect|python3?(?: -P)? -m) ")
NAMED_FILE = re.compile(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
# Overrides that make any pretraining run take seconds instead of minutes, on one rank.
SMALL = {
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.num_hidden_layers": 1,
    "train.steps": 4,
    "train.epochs": "null",
    "train.warmup_steps": 1,
    "train.sequence_length": 32,
    "parallel.tensor": 1,
    "cluster.devices_per_node": 1,
    "cluster.threads": 1,
    "compile.enabled": "false",
    "checkpoint.every": 2,
    "evaluate.batches": 1,
}
# The README's run trains on Python's documentation, as `tiny` does; runs of other pages train on these texts.
TEXTS = {
    "tokenizer.vocabulary_size": 300,
    "model.vocab_size": 300,
    "data.sources": "'[{kind: files, path: texts/texts.jsonl}]'",
    "data.validation_fraction": 0.1,
}


# Fine-tuning runs train on records instead.
RECORDS = {
    "tokenizer.vocabulary_size": 300,
    "model.vocab_size": 300,
    "data.sources": "'[{kind: files, path: texts/records.jsonl}]'",
    "data.validation_fraction": 0.3,
}


def named(page: Path) -> str:
    """Path of a page in the repository, without its suffix: the name of its tests."""
    return str(page.relative_to(ROOT).with_suffix(""))


def blocks(page: Path) -> list[tuple[bool, str, str]]:
    """Blocks: whether each needs a cluster, its commands with lines joined, and its sample output or ""."""
    found = BLOCK.findall(page.read_text())
    return [(bool(cluster), commands.replace("\\\n", " "), sample) for cluster, commands, sample in found]


def shape(line: str) -> str:
    """The shape of a line of output: without its numbers, units, bars and spacing."""
    line = re.sub(r"\b[0-9a-f]{32}\b", "key", line)
    line = re.sub(r"\d(?:[\d.,:/]*\d)?(?:e[+-]?\d+)?", "#", re.sub("[░▒▓█]+", "", line))
    line = re.sub(r"# (?:[KMGT]iB|bytes)\b", "# B", line)
    return " ".join(re.sub(r"# (?:s|min|h)\b", "# s", line).split())


def missing(sample: str, output: str) -> list[str]:
    """Lines of a sample whose shape no line of the output has; … stands for anything."""
    lines = {shape(line) for line in output.splitlines()}
    wanted = [(line, re.escape(shape(line)).replace("…", ".*")) for line in sample.splitlines()]
    return [line for line, form in wanted if not any(re.fullmatch(form, each) for each in lines)]


def reduced(page: Path, line: str) -> str:
    """A documented command, with overrides that reduce it to the size of a test."""
    line = line.replace(".venv/bin/", "").split("  #")[0]
    if line.startswith("make "):
        return f"make -C {shlex.quote(str(ROOT))} -n {line.removeprefix('make ')}"
    if line.startswith("trainshed run "):
        own = TEXTS if page != ROOT / "README.md" and line.startswith("trainshed run tiny") else {}
        own = RECORDS if line.startswith("trainshed run tiny-") else own
        return " ".join([line, *settings(SMALL | own)])
    if line.startswith("trainshed fork "):
        return re.sub(r"@\d+", "@2", line)
    if line.startswith("trainshed chain "):
        named = [word for word in line.split() if word.startswith("tiny")]
        own = {name: RECORDS if name.startswith("tiny-") else TEXTS for name in named}
        overrides: dict[str, object] = {**SMALL}
        for name, values in own.items():
            # Runs this short may learn nothing.
            gate = {"evaluate.gate": "'[validation_rise <= 1]'"} if values is RECORDS else {}
            overrides |= {f"{name}:{key}": value for key, value in (values | gate).items()}
        return " ".join([line, *settings(overrides)])
    return line


def settings(overrides: dict[str, object]) -> list[str]:
    return [f"--set {key}={value}" for key, value in overrides.items()]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_documented_commands_succeed(prefect_server, tmp_path, monkeypatch, page):
    """`trainshed` runs in this process, with forked ranks; everything else in a shell."""
    (tmp_path / "texts").mkdir()
    write_profile(tmp_path / "texts")
    records = [
        {"prompt": f"{n}? ", "completion": f"a {n}", "chosen": f"a {n}", "rejected": f"b {n}"}
        for n in range(60)
    ]
    (tmp_path / "texts/records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])  # the command replaces them
    for cluster, text, sample in blocks(page):
        said = io.StringIO()
        lines = [] if cluster else [reduced(page, line) for line in text.splitlines()]
        for ours, group in groupby(lines, lambda line: line.startswith("trainshed ")):
            if not ours:
                shell = ["bash", "-euxo", "pipefail", "-c", "\n".join(group)]
                subprocess.run(shell, stdin=subprocess.DEVNULL, check=True, timeout=500)
            for line in group if ours else ():
                command, _, output = line.partition(" > ")
                root.handlers.clear()  # as in a new process
                printed = io.StringIO() if output else said
                with redirect_stdout(printed), redirect_stderr(said), forked_jobs():
                    assert main(shlex.split(command)[1:]) == 0, line
                if output:
                    Path(output).write_text(printed.getvalue())
        if not cluster and "trainshed" in text:
            assert missing(sample, said.getvalue()) == [], said.getvalue()
    assert undocumented_columns(tmp_path / "store/runs") == set(), "docs/training/metrics.md"


def test_notebook_shows_what_its_cells_print(prefect_server, tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    write_profile(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # the command replaces them

    def run(command: str) -> str:
        root.handlers.clear()
        arguments = shlex.split(reduced(notebook.NOTEBOOK, command))[1:]
        if arguments[0] == "run":
            arguments += ["--set", "evaluate.every=2"]
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()), forked_jobs():
            assert main(arguments) == 0, command
        return printed.getvalue()

    shown = json.loads(notebook.NOTEBOOK.read_text())
    for cell, printed, value in notebook.execute(shown, run):
        now = notebook.outputs(printed, value)
        assert [(each["output_type"], {*each.get("data", ())}) for each in now] == [
            (each["output_type"], {*each.get("data", ())}) for each in cell["outputs"]
        ], cell["source"]
        if cell["source"][0].startswith("!"):  # the summary below the steps of a run, or everything
            (sample,) = (each["text"] for each in cell["outputs"])
            assert missing("".join(sample[-5:] if "run" in cell["source"][0] else sample), printed) == []


@functools.cache
def deployments() -> dict[str, set[str]]:
    """The deployments as flow/deployment, with the parameters of their flow."""
    found = {}
    for entry in listed(ROOT, every=True):
        module, _, name = entry["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), name)
        found[f"{flow.name}/{entry['name']}"] = set(flow.parameters.properties)
    return found


def check_words(words: list[str], line: str) -> None:
    """Assert that the program of a command exists and accepts its arguments."""
    match Path(words[0]).name, words[1:]:
        case "trainshed", arguments:
            options = parser().parse_args(arguments)  # exits with 2 on invalid arguments
            if arguments[0] == "run" and options.profile in resolve.names():
                resolve.check(resolve.load(options.profile, options.overrides))
        case "make", arguments:
            targets = [word for word in arguments if "=" not in word]
            assert set(targets) <= set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M)), (
                line
            )
        case "prefect", ["deployment", "run", name, *options]:
            set_values = re.findall(r"(?:-p|--param) (\w+)=", " ".join(options))
            assert set(set_values) <= deployments()[name], line
        case "python", arguments if "-m" in arguments:
            module = arguments[arguments.index("-m") + 1]
            spec = importlib.util.find_spec(module)
            assert spec, line
            if spec.submodule_search_locations:  # a package, which has the command in __main__.py
                spec = importlib.util.find_spec(f"{module}.__main__")
            # A user's own tasks.py or profiles/ in the working folder must not be imported in place of ours.
            assert "-P" in arguments or not module.startswith(("flows.", "modeling.")), line
            if module != "pytest":
                options = {word for word in arguments if word.startswith("--")}
                source = Path(spec.origin).read_text() + (ROOT / "benchmarks/harness/timing.py").read_text()
                unknown = {each for each in options if not re.search(f'"{each}[" ]', source)}
                assert not unknown, line
        case "python", [script, *_]:
            assert (ROOT / script).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_cluster_commands_have_valid_arguments(page):
    for cluster, text, _ in blocks(page):
        for line in text.splitlines() if cluster else ():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables of its environment
                words.pop(0)
            if words:
                check_words(words, line)


PLANS = [
    (page, line.partition(" #")[0].strip(), sample)
    for page in PAGES
    for cluster, text, sample in blocks(page)
    for line in text.replace(".venv/bin/", "").splitlines()
    if cluster and sample and re.match(r"trainshed (ladder )?plan ", line)
]


PLAN_SAMPLE = re.compile(
    r"^```\n((?:\S+(?:  [^\n]*)?\n\nparameters |\S+ on [^\n]* topolog).*?)^```$", re.M | re.S
)


def local_plans(page: Path) -> list[tuple[str, str, str]]:
    """Commands that write a plan's files, the command, and its sample, of plans that run on this machine."""
    text, found = page.read_text(), []
    for sample in PLAN_SAMPLE.finditer(text):
        *_, block = BLOCK.finditer(text, 0, sample.start())
        if block[1]:
            continue
        lines = block[2].splitlines(keepends=True)
        searches = " topolog" in sample[1].partition("\n")[0]
        plans = [line.strip() for line in lines if line.startswith("trainshed plan ") and ">" not in line]
        (command,) = [line for line in plans if ("--search" in line) == searches]
        found.append(
            ("".join(takewhile(lambda line: not line.startswith("trainshed"), lines)), command, sample[1])
        )
    return found


LOCAL_PLANS = [(page, *plan) for page in PAGES for plan in local_plans(page)]


@functools.cache
def printed_words(command: str) -> str:
    """What a command prints, wherever its lines are wrapped."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        main(shlex.split(command)[1:])
    return " ".join(output.getvalue().split())


@pytest.mark.parametrize(
    ("page", "command", "sample"), PLANS, ids=[f"{named(page)}: {line}" for page, line, _ in PLANS]
)
def test_sample_of_a_plan_is_what_the_planner_prints(tmp_path, monkeypatch, page, command, sample):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name, contents in NAMED_FILE.findall(page.read_text()):
        Path(name).write_text(contents)
    check_plan_sample(command, sample)
    _, kind, name, *_ = shlex.split(command)
    if kind == "plan" and name in resolve.names():  # why it is not the fastest is in its file
        said = " ".join(resolve.shipped_files()[name].read_text().split())
        faster = re.findall(r"tensor \d+: (\d+% faster)", sample)
        assert [each for each in faster if each not in said] == []


@pytest.mark.parametrize(
    ("page", "files", "command", "sample"),
    LOCAL_PLANS,
    ids=[f"{named(page)}: {line}" for page, _, line, _ in LOCAL_PLANS],
)
def test_sample_of_a_plan_for_cpus_is_what_the_planner_prints(
    tmp_path, monkeypatch, page, files, command, sample
):
    """On a machine with the sample's memory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("modeling.planning.planner.usable_memory", lambda: round(2 * 11.8 * 2**30))
    subprocess.run(["bash", "-euo", "pipefail", "-c", files], check=True, timeout=100)
    check_plan_sample(command, sample)


def check_plan_sample(command: str, sample: str) -> None:
    """Assert that the command prints the parts of the sample, word for word."""
    parts = re.split(r"\n\n|^…$", sample, flags=re.M)  # … stands for lines that are left out
    assert [part for part in parts if " ".join(part.split()) not in printed_words(command)] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_is_in_a_checked_block(page):
    text = BLOCK.sub("", page.read_text())
    fenced = [textwrap.dedent(block) for _, block in FENCED.findall(text)]
    # Output may suggest some, further indented than its other lines.
    unchecked = [line for block in fenced for line in block.splitlines() if COMMAND.match(line)]
    indented = [line.strip() for line in FENCED.sub("", text).splitlines() if line.startswith("    ")]
    assert unchecked + [line for line in indented if COMMAND.match(line)] == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_resolve(page):
    for target, anchor in LINK.findall(page.read_text()):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert linked.exists(), f"{named(page)} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{named(page)} links to {target}#{anchor}"


def test_every_command_has_a_sample_of_its_output():
    commands = re.findall(r"^    ([a-z-]+) ", parser().format_help().partition("commands:")[2], re.M)
    sampled = "\n".join(text for page in PAGES for _, text, sample in blocks(page) if sample)
    without = {name for name in commands if not re.search(rf"^\S*trainshed {name}\b", sampled, re.M)}
    assert without == {"chain"}  # its sample in docs/training/finetuning.md is of runs of minutes


def test_lines_of_pages_have_at_most_130_characters():
    """Except those of tables, samples and long addresses."""
    lines = (line for page in PAGES for line in FENCED.sub("", page.read_text()).splitlines())
    assert [line for line in lines if len(line) > 130 and not re.match(r"\s*\||.*(://|!\[)", line)] == []


def test_first_line_of_every_docstring_is_a_summary_of_at_most_100_characters():
    long = []
    for path in (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            summary, *_ = ((documented and ast.get_docstring(node)) or "").partition("\n")
            long += [f"{path.relative_to(ROOT)}: {summary}"] if len(summary) > 100 else []
    assert long == []


def test_profile_reference_is_current():
    assert (ROOT / "docs" / "profiles.md").read_text() == page(), (
        "python -m profiles.documentation > docs/profiles.md"
    )


def test_list_of_files_is_current():
    files = runpy.run_path(str(ROOT / "docs/site/files.py"))
    assert files["PAGE"].read_text() == files["page"](), "python docs/site/files.py"


def test_architecture_lists_every_folder_and_where_to_start_reading_it():
    roots = ("flows", "tasks", "modeling", "parallel", "profiles", "benchmarks")
    found = {
        f"{path.parent.relative_to(ROOT)}/" for root in roots for path in ROOT.glob(f"{root}/**/__init__.py")
    }
    rows = [
        [re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows_of(ARCHITECTURE, "## The folders")
    ]
    assert {folder for (folder,), *_ in rows} == found | {"tests/"}
    starts = [ROOT / folder / file for (folder,), _, files in rows for file in files]
    assert [path for path in starts if not path.is_file()] == []
    assert [folder for (folder,), _, files in rows if not files] == ["tests/"]


def test_contributing_has_the_outcome_of_every_machine():
    rows = rows_of(ROOT / "CONTRIBUTING.md", "### Machines")
    assert sorted(name for name, *_ in rows) == sorted(machine.name for machine in MACHINES)
    assert all(outcome for _, _, _, outcome, *_ in rows)


def test_architecture_lists_the_layers_of_the_import_contracts():
    listed = {}
    for section in ARCHITECTURE.read_text().split("\n### Layers of `")[1:]:
        inside, _, text = section.partition("`\n")
        items = re.findall(r"^\d+\. ((?:.+\n?)(?: +.+\n?)*)", text, re.M)
        listed[inside] = [set(re.findall(r"`([^`]+)`", item)) for item in items]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    expected = {}
    for contract in contracts:
        if contract["name"].startswith("inside "):
            inside = contract["name"].removeprefix("inside ")
            layers = [layer.replace(f"{inside}.", "") for layer in contract["layers"]]
            expected[inside] = [set(re.findall(r"\w+", layer)) for layer in layers]
    assert listed == expected


def test_citation_and_changelog_have_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_pictures_are_current():
    path = ROOT / "docs/pictures/drawings/draw.py"
    spec = importlib.util.spec_from_file_location("draw", path)
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    for picture in draw.PICTURES:
        current = (path.parent / f"{picture.__name__}.svg").read_text()
        assert current == picture().svg(), f"python {path.relative_to(ROOT)}"
