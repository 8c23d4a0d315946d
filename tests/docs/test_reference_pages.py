"""Reference pages: metrics, events, benchmarks, deployments and the tables of caching are complete."""

import ast
import itertools
import re
import shlex
from pathlib import Path

from modeling.supervision import profiling
from modeling.supervision.telemetry import neuron_readings
from modeling.training import multi_token
from modeling.training.metrics import GROUPS, tag
from modeling.training.step import ExpertLoad
from parallel.checkpoint import locations
from profiles import resolve
from profiles.files import retry_policies, run_files
from profiles.role_tables import with_tables
from profiles.sections.objective import PAIR_METRICS
from tasks.keys import NOT_MATHEMATICS, SCHEDULE
from tests.docs.columns import documented_columns, rows_of
from tests.docs.test_docs import LINK, PAGES, check_words, deployments

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXPERTS = ExpertLoad(loads=[[1.0]], dropped=[0.0], balance_losses=[0.0], z_losses=[0.0]).metrics()
MODULES = multi_token.metrics([0.0])
NEURON = {"neuroncores_in_use": {"0": {"neuroncore_utilization": 50.0}}}
READINGS = neuron_readings({"neuron_runtime_data": [{"report": {"neuroncore_counters": NEURON}}]})


def test_metrics_page_lists_every_column_that_the_code_names():
    columns = {*itertools.chain.from_iterable(GROUPS.values()), *EXPERTS, *MODULES, *PAIR_METRICS, *READINGS}
    assert columns - documented_columns().keys() == set()


def test_tensorboard_names_on_the_metrics_page_are_those_of_the_code():
    lists = {f"{name}_by_layer": f"{tag(name)}/layer_0" for name in EXPERTS}
    lists |= {f"{name}_by_depth": f"{tag(name)}/depth_1" for name in MODULES}
    for column, shown in documented_columns().items():
        expected = lists.get(column, tag(column))
        assert shown == ("" if column in ("step", "time", "rank_seconds") else expected)


def recorded_events() -> set[str]:
    """Names of the events that ranks record: literals in calls of `record_event` and `Reporter.event`."""
    found = set()
    for path in (ROOT / "modeling").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            number = {"record_event": 1, "event": 0}.get(name)
            argument = node.args[number] if number is not None and len(node.args) > number else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.add(argument.value)
    return found


def test_metrics_page_lists_every_event():
    listed = {row[0] for row in rows_of(DOCS / "training/metrics.md", "## Events")}
    assert {name.strip("`") for name in listed} == recorded_events() | {
        "<step> retried",
        "<step> failed",
        "released",
        "held",
    }


def programs() -> set[str]:
    """The runnable modules of `benchmarks`."""
    paths = (
        path for path in (ROOT / "benchmarks").rglob("*.py") if '__name__ == "__main__"' in path.read_text()
    )
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return {name.removesuffix(".__main__") for name in names}  # `python -m` runs a package's __main__


def test_benchmarks_page_lists_every_program_with_a_valid_command():
    commands = re.findall(r"^\| `(python -m benchmarks\.[^`]+)`", (DOCS / "benchmarks.md").read_text(), re.M)
    assert {command.split()[2] for command in commands} == programs()
    for command in commands:
        check_words(shlex.split(command), command)


def test_deployments_page_lists_every_deployment_with_its_parameters():
    listed = {}
    for names, _, parameters in rows_of(DOCS / "operating/prefect.md", "## Deployments"):
        found = set(re.findall(r"`(\w+)`", parameters))
        listed |= dict.fromkeys(re.findall(r"`([^`]+)`", names), found)
    profiles = set(resolve.names())
    for name, parameters in deployments().items():
        flow, _, deployment = name.partition("/")
        key = f"{flow}/<profile>" if flow in ("pretrain", "finetune") and deployment in profiles else name
        assert listed[key] == parameters, name
    flows_of_profiles = {f"{flow}/<profile>" for flow in ("pretrain", "finetune")}
    assert listed.keys() - flows_of_profiles <= deployments().keys()


def test_caching_page_has_the_steps_that_each_key_runs_again():
    text = (DOCS / "caching.md").read_text()
    assert text == with_tables(text), "python -m profiles.role_tables docs/caching.md"
    identity = text.partition("## Run identity\n")[2].partition("\n## ")[0]
    lists = re.findall(r"^ +- (?:keys|the learning rate)[^:]*: ((?:.|\n)*?)(?=\n +- |\n\n)", identity, re.M)
    assert [set(re.findall(r"`(\w+)`", names)) for names in lists] == [NOT_MATHEMATICS, SCHEDULE]


def test_caching_page_lists_every_file_of_a_run_folder():
    rows = rows_of(DOCS / "caching.md", "## The run folder")
    listed = {name.split("/")[0] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    assert listed == {name for key, name in vars(run_files).items() if key.isupper()} | {profiling.FOLDER}


def test_outages_page_has_the_table_of_all_retry_policies():
    assert retry_policies.table() in (DOCS / "operating/outages.md").read_text()
    assert retry_policies.CHECKPOINT_READ.delays == locations.READ_PAUSES
    assert retry_policies.RESTART.delays[: len(retry_policies.STEP.delays)] == retry_policies.STEP.delays


def test_delays_before_retries_are_in_one_module():
    found = set()
    for folder in ("flows", "tasks", "modeling", "parallel", "profiles"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, value in re.findall(
                r"^([A-Z_]*(?:DELAYS|PAUSES|RETRIES)) = (.*)", path.read_text(), re.MULTILINE
            ):
                if re.search(r"\d", value.partition("#")[0].replace('jitter_factor": 0.3', "")):
                    found.add(f"{path.relative_to(ROOT)} {name}")
    assert found == {"parallel/checkpoint/locations.py READ_PAUSES"}  # which imports no policies


def test_index_links_to_every_page():
    index = DOCS / "README.md"
    linked = {DOCS / target for target, _ in LINK.findall(index.read_text())}
    assert {page for page in PAGES if DOCS in page.parents} - {index} - linked == set()
