"""Graphs compiled ahead of time, and training that finds them: one compile for the whole file, and parts of it anew."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from profiles.resolve import load
from tasks import keys
from tasks.launchers import local
from tasks.step import Context
from tasks.steps import graphs
from tasks.steps.graphs import GraphsStep
from tasks.store.store import Store
from tests.forked_jobs import forked_jobs
from tests.modeling import micro

SETTINGS = ("compile.enabled=true", "train.steps=6", "evaluate.every=3", "checkpoint.every=2")
ALONE = ("parallel.tensor=1", "cluster.devices_per_node=1", "train.steps=1", "evaluate.every=0")
LOSS = "loss, evaluation"  # the program that is quickest to compile


class Place:
    """A store, and runs beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Store(str(folder / "store"))
        self.dataset = micro.dataset(folder / "data")

    def compile(self, run: Path, **context):
        return GraphsStep().run(Context(load(str(run / "profile.yaml")), self.store, **context))

    def forget(self, run: Path, *programs: str) -> None:
        """Remove the run's artifact, and those of programs."""
        profile = load(str(run / "profile.yaml"))
        found = self.store.artifacts.find(GraphsStep.kind, keys.graphs(profile))
        for entry in found.summary["programs"]:
            if entry["name"] in programs:
                self.store.artifacts.remove(graphs.PROGRAM, entry["key"])
        self.store.artifacts.remove(GraphsStep.kind, keys.graphs(profile))

    def train(self, run: Path, artifact=None, processes: int = 2) -> str:
        arguments = ["--run-folder", run, "--dataset", self.dataset]
        if artifact is not None:
            arguments += ["--graphs", self.store.artifacts.path(artifact)]
        return micro.run("training.train", *arguments, processes=processes)


@pytest.fixture(scope="module", autouse=True)
def _forked_jobs():
    with forked_jobs():
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def run(place) -> Path:
    return micro.run_folder(place.folder / "run", *SETTINGS)


@pytest.fixture
def compiled(place, run):
    """The artifact; compiled by the first test that asks, and again as far as a test removed it."""
    return place.compile(run)


def status(summary: dict) -> dict[str, str]:
    return {entry["name"]: entry["status"] for entry in summary["programs"]}


def test_the_summary_counts_graphs_and_says_what_each_took(compiled, run, caplog):
    summary = compiled.summary
    assert set(status(summary)) == {
        f"{region}, {mode}" for region in ("block", "loss") for mode in ("training", "evaluation")
    }
    assert (summary["total"], summary["successful"], summary["failed"]) == (5, 5, 0)
    for entry in summary["programs"]:
        assert entry["seconds"] > 0
        assert entry["peak_bytes"] > 100 << 20
    slowest = max(summary["programs"], key=lambda entry: entry["seconds"])["name"]
    assert f"slowest: {slowest}" in graphs.format_summary(summary)


def test_training_compiles_nothing_and_equals_eager_losses(place, compiled, run):
    place.train(run, compiled)
    lines = micro.metrics(run)
    assert {line["cold_compiles"] for line in lines} == {0}
    assert [line["warm_graphs"] for line in lines if "loss" in line][-1] == compiled.summary["total"]
    assert (run / "checkpoints" / "step_2").exists()

    eager = micro.run_folder(place.folder / "eager", *SETTINGS, "compile.enabled=false")
    place.train(eager)
    assert {line["warm_graphs"] for line in micro.metrics(eager)} == {0}
    expected = micro.losses(eager)
    for step, loss in micro.losses(run).items():
        assert loss == pytest.approx(expected[step], rel=1e-5)


def test_graphs_of_other_shapes_are_misses_and_are_named(place, compiled, tmp_path):
    other = micro.run_folder(tmp_path, *SETTINGS, *ALONE)
    words = place.train(other, compiled, processes=1)
    first = micro.metrics(other)[0]
    assert first["cold_compiles"] > 0
    assert first["warm_graphs"] == 0
    assert "warning: compile cache misses despite a precompiled graphs artifact" in words
    assert "block, training; loss, training" in words


def test_after_a_kill_and_a_failure_only_what_is_missing_is_compiled(place, run, compiled, tmp_path, caplog):
    place.forget(run, LOSS)
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True);"
        "from profiles.resolve import load; from tasks.steps.graphs import GraphsStep;"
        "from tasks.step import Context; from tasks.store.store import Store;"
        f"profile = load({str(run / 'profile.yaml')!r});"
        f"GraphsStep().run(Context(profile, Store({str(place.folder / 'store')!r})))"
    )
    process = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if f"compiling {LOSS}" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    caplog.set_level(logging.INFO)

    tight = micro.run_folder(tmp_path, *SETTINGS, "compile.memory_gib=0.3")
    profile, tables = load(str(tight / "profile.yaml")), []
    with pytest.raises(graphs.GraphsFailed, match=LOSS):
        place.compile(tight, table=lambda *table: tables.append(table))
    ((_, title, rows),) = tables
    assert "5 graphs: 4 successful, 1 failed" in title
    assert [row["program"] for row in rows if row["error"]] == [LOSS]
    assert place.store.artifacts.find(GraphsStep.kind, keys.graphs(profile)) is None

    retried = place.compile(run)
    assert {name for name, how in status(retried.summary).items() if how == "compiled"} == {LOSS}
    assert retried.summary["failed"] == 0
    assert "waiting for" not in caplog.text  # neither process left a lock


def test_three_tasks_compile_a_graph_once_after_a_cancelled_one_ended_its_processes(
    place, run, compiled, caplog, monkeypatch, tmp_path
):
    place.forget(run, LOSS)
    caplog.set_level(logging.INFO, logger="tasks.steps.graphs")

    def interrupt() -> None:
        while f"compiling {LOSS}" not in caplog.text:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(local, "subprocess", subprocess)  # processes that pgrep finds
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            place.compile(run)
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGINT, before)
    left = subprocess.run(
        ["pgrep", "-f", f"modeling.tracing.compile.*{place.folder}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert left.stdout == ""

    runs = [micro.run_folder(tmp_path / str(n), *SETTINGS, f"model.num_hidden_layers={n}") for n in (2, 6, 7)]
    with ThreadPoolExecutor(3) as pool:
        found = [status(artifact.summary)[LOSS] for artifact in pool.map(place.compile, runs)]
    assert sorted(found) == ["compiled", "from cache", "from cache"]


def test_another_number_of_layers_shares_every_graph(place, compiled, tmp_path):
    deeper = micro.run_folder(tmp_path, *SETTINGS, "model.num_hidden_layers=5", "train.learning_rate=1e-4")
    artifact = place.compile(deeper)
    assert artifact.key != compiled.key
    assert artifact.summary["from_cache"] == artifact.summary["total"] == compiled.summary["total"]


def test_programs_of_one_name_have_jobs_of_their_own():
    kinds = [
        {"name": "block, training", "digest": digest * 32} for digest in "ab"
    ]  # with experts and without
    assert [graphs.job_name(kind) for kind in kinds] == [
        f"compile-block-training-{8 * letter}" for letter in "ab"
    ]


def test_without_a_cpp_compiler_one_line_says_that_training_runs_eager(place, tmp_path, monkeypatch, caplog):
    run = micro.run_folder(tmp_path / "run", *SETTINGS, *ALONE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    artifact = place.compile(run)
    said = "no C++ compiler (g++ or clang++) on this machine: training runs eager"
    assert artifact.summary["note"] == said
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [said]
    assert said in place.train(run, artifact, processes=1)
    assert micro.metrics(run)[0]["cold_compiles"] == micro.metrics(run)[0]["warm_graphs"] == 0
