"""Ahead-of-time compilation of graphs, and training with them; tests repeat parts of one compilation."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from modeling.compilation import compilers
from modeling.compilation.graph_cache import unpack
from modeling.compilation.manifest import Manifest
from profiles.check import with_value
from profiles.resolve import load
from profiles.schema import Profile
from tasks import keys
from tasks.launchers import Job, JobFailed, local
from tasks.step import Context
from tasks.steps import graphs, programs
from tasks.steps.graphs import GraphsStep
from tasks.store.artifacts import ArtifactId
from tasks.store.store import Store
from tests import disk
from tests.forked_jobs import forked_jobs, run_forked
from tests.forkserver import ensure_running
from tests.modeling import micro

pytestmark = pytest.mark.slow

# Products are in chunks, as on GPUs.
SETTINGS = ("compile.enabled=true", "train.steps=6", "evaluate.every=3", "checkpoint.every=2")
SETTINGS += ("parallel.overlap_chunks=2",)
ALONE = ("parallel.tensor=1", "cluster.devices_per_node=1", "train.steps=1", "evaluate.every=0")
ALONE += ("parallel.overlap_chunks=null",)
LOSS = "loss, evaluation"  # the program that is quickest to compile
TARGET = {
    "NEURON_PLATFORM_TARGET_OVERRIDE": "trn3",
    "NEURON_LOGICAL_NC_CONFIG": "1",
    "NEURON_CC_FLAGS": "-O1",
}


class Workspace:
    """A store, and a dataset and run folders beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Store(str(folder / "store"))
        self.dataset = micro.dataset(folder / "data")

    def compile(self, run: Path, **context):
        return GraphsStep().run(Context(load(str(run / "profile.yaml")), self.store, **context))

    def forget(self, run: Path, *names: str) -> None:
        """Remove the artifacts of the run's graphs and of these programs."""
        profile = load(str(run / "profile.yaml"))
        found = self.store.artifacts.find(GraphsStep.id(keys.graphs(profile)))
        for entry in found.summary["programs"]:
            if entry["name"] in names:
                self.store.artifacts.remove(ArtifactId(programs.PROGRAM, entry["key"]))
        self.store.artifacts.remove(GraphsStep.id(keys.graphs(profile)))

    def train(self, run: Path, artifact=None, processes: int = 2, read_only: Path | None = None) -> str:
        arguments = ["--run-folder", run, "--dataset", self.dataset]
        if artifact is not None:
            arguments += ["--graphs", self.store.artifacts.path(artifact)]
        if read_only is None:
            return micro.run("training.train", *arguments, processes=processes)
        code, output = run_forked("tests.modeling.train_read_only", [read_only, *arguments], processes)
        assert code == 0, output[-4000:]
        return output


def test_jobs_for_neuron_start_with_their_compilers_settings(tmp_path, monkeypatch, caplog):
    """TorchNeuron reads some when torch imports it, before a program could set them."""
    started = []

    def execute(launcher: local.LocalLauncher, job: Job, *_: object, **__: object) -> None:
        started.append(launcher._variables(job, "identifier"))
        if job.name != "trace":
            raise JobFailed("stopped here")
        (job.folder / "trace.json").write_text("{}")
        Path(started[-1]["TORCH_NEURONX_HLO_CACHE_DIR"], f"{len(started)}").touch()

    monkeypatch.setattr(graphs, "execute", execute)
    monkeypatch.setattr(programs, "execute", execute)
    # They are what Pods get, and not what this machine has.
    for name in ("NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.setenv(name, "1")
    settings = ("compile.flags=-O1", "cluster.accelerator=trn3", *in_pods("NEURON_CC_FLAGS=-O2"))
    profile = load("llama3-8b", settings)
    (tmp_path / "logs").mkdir()
    for _ in range(2):
        graphs._trace(profile, tmp_path)
    # What a restarted flow prepares anew replaces nothing: jobs of the earlier one may be copying it.
    assert [path.name for path in (tmp_path / programs.PREPARED).iterdir()] == ["1"]
    program = {"name": "loss, training", "digest": "0" * 16, "regions": ["0"], "stage": 0, "graphs": []}
    context = Context(profile, Store(str(tmp_path / "store")))
    assert programs.compile_program(context, tmp_path, program, (), lambda: None)["status"] == "failed"
    caches = [found["TORCH_NEURONX_HLO_CACHE_DIR"] for found in started]
    assert caches[:2] == 2 * [str(tmp_path / graphs.PREPARING)]
    assert Path(caches[2]).is_relative_to(tmp_path / "store")
    # Neither uses a device, which this machine may lack.
    assert {found["TORCH_NEURONX_COMPILE_ONLY"] for found in started} == {"1"}
    assert {found["NEURON_PLATFORM_TARGET_OVERRIDE"] for found in started} == {"trn3"}
    assert {found["NEURON_CC_FLAGS"] for found in started} == {"-O2"}
    assert not any("NEURON_LOGICAL_NC_CONFIG" in found for found in started)
    with patch.dict(os.environ):  # as a rank, whose image has other settings
        compilers.make_compiler(profile).use_cache(tmp_path)
        assert os.environ["NEURON_CC_FLAGS"] == "-O2"
        assert not {"NEURON_LOGICAL_NC_CONFIG", "NEURON_PLATFORM_TARGET_OVERRIDE"} & os.environ.keys()
    assert "NEURON_LOGICAL_NC_CONFIG=1 of this machine is replaced" in caplog.text
    assert "NEURON_CC_FLAGS=-O2 is kept; compile.flags is -O1" in caplog.text


def test_graphs_of_neuron_are_compiled_without_a_device_and_under_the_same_key(tmp_path, monkeypatch):
    """Those of GPUs are not. The key has what the environment of jobs decides."""
    monkeypatch.setattr(compilers.Neuron, "missing_software", lambda self: None)
    monkeypatch.setattr(compilers.Inductor, "missing_software", lambda self: None)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    traced = trace_nothing(monkeypatch)
    store, found = Store(str(tmp_path / "store")), {}
    for available in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda available=available: available)
        found[available] = keys.graphs(load("llama3-8b"))
        if not available:
            summaries = [
                GraphsStep().run(Context(load(name), store)).summary
                for name in ("llama3-8b", "llama3-8b-h100")
            ]
    assert [summary.get("note", "").partition(" on")[0] for summary in summaries] == ["", "no cuda device"]
    assert [profile.name for profile in traced] == ["llama3-8b"]
    assert found[False] == found[True] == keys.graphs(load("llama3-8b", in_pods()))
    others = set()
    for name, value in TARGET.items():
        monkeypatch.setenv(name, value)
        others.add(keys.graphs(load("llama3-8b")))
        assert keys.graphs(load("llama3-8b", in_pods())) == found[True]  # Pods do not inherit it
        monkeypatch.delenv(name)
        assert keys.graphs(load("llama3-8b", in_pods(f"{name}={value}"))) in others
    assert len({found[True], *others}) == 1 + len(TARGET)


def in_pods(*variables: str) -> tuple[str, ...]:
    """Overrides for Pods with these environment variables."""
    resources = "resources: [aws.amazon.com/neuron=16]"
    settings = f"image: trainshed, claim: store, mount: /, {resources}, environment: [{', '.join(variables)}]"
    return "cluster.launcher=kubernetes", f"cluster.kubernetes={{{settings}}}"


def trace_nothing(monkeypatch) -> list[Profile]:
    """Let runs have no programs; returns a list of the profiles that will be traced."""
    traced = []

    def trace(profile: Profile, work: Path) -> dict[str, list]:
        traced.append(profile)
        (work / "logs").mkdir()
        Manifest({}).write(work / "logs")
        return {"programs": [], "stages": []}

    monkeypatch.setattr(graphs, "_trace", trace)
    monkeypatch.setattr(graphs, "apply_trace", lambda profile, planned, traced: planned)
    monkeypatch.setattr(programs, "compile_all", lambda *_: [])
    return traced


@pytest.fixture(scope="module", autouse=True)
def _forked_jobs():
    with forked_jobs():
        yield


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("a folder"))  # g++'s command, too, must survive the space


@pytest.fixture(scope="module")
def run(workspace) -> Path:
    return micro.run_folder(workspace.folder / "run", *SETTINGS)


@pytest.fixture
def compiled(workspace, run):
    """The artifact of the run's graphs; only what an earlier test removed is compiled again."""
    return workspace.compile(run)


def status(summary: dict) -> dict[str, str]:
    return {entry["name"]: entry["status"] for entry in summary["programs"]}


@pytest.mark.compiles
def test_summary_counts_graphs_and_has_the_cost_of_each_program(compiled):
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


def written(unpacked):
    """When each file of unpacked graphs was written, but for those that each machine makes anew."""
    return {
        path: path.stat().st_mtime_ns
        for path in unpacked.rglob("*")
        if path.is_file() and not {*programs.LOCAL_ONLY} & {*path.relative_to(unpacked).parts}
    }


@pytest.mark.compiles
def test_training_compiles_nothing_and_equals_eager_losses_without_chunks(workspace, compiled, run):
    """With graphs that it cannot change, where the tests may mount file systems."""
    unpacked = unpack(workspace.store.artifacts.path(compiled), run)
    before = written(unpacked)
    assert before
    workspace.train(run, compiled, read_only=unpacked if disk.can_mount() else None)
    assert written(unpacked) == before
    lines = micro.metrics(run)
    assert {line["graph_cache_misses"] for line in lines} == {0}
    assert [line["graph_cache_hits"] for line in lines if "loss" in line][-1] == compiled.summary["total"]
    assert (run / "checkpoints" / "step_2").exists()
    assert not (run / "events.jsonl").exists()

    plain = ("compile.enabled=false", "parallel.overlap_chunks=1")
    eager = micro.run_folder(workspace.folder / "eager", *SETTINGS, *plain)
    workspace.train(eager)
    assert {line["graph_cache_hits"] for line in micro.metrics(eager)} == {0}
    expected = micro.losses(eager)
    for step, loss in micro.losses(run).items():
        assert loss == pytest.approx(expected[step], rel=1e-5)


@pytest.mark.compiles
def test_graphs_of_other_shapes_are_cache_misses_and_are_named(workspace, compiled, tmp_path):
    other = micro.run_folder(tmp_path, *SETTINGS, *ALONE)
    output = workspace.train(other, compiled, processes=1)
    first = micro.metrics(other)[0]
    assert first["graph_cache_misses"] > 0
    assert first["graph_cache_hits"] == 0
    events = [json.loads(line) for line in (other / "events.jsonl").read_text().splitlines()]
    assert {(event["event"], event["step"]) for event in events} == {("graph cache miss", 1)}
    reasons = [event["reason"] for event in events]
    differs = "differs from the programs that were compiled ahead of time: operator"
    assert [reason.partition(f": {differs}")[0] for reason in reasons] == [
        "block, training",
        "loss, training",
    ]
    assert f"warning: {reasons[0]}" in output


@pytest.mark.compiles
def test_after_a_kill_a_failure_and_an_interrupt_only_what_is_missing_is_compiled_and_once(
    workspace, run, compiled, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    workspace.forget(run, LOSS)
    kill_while_compiling(workspace, run)

    tight = micro.run_folder(tmp_path / "tight", *SETTINGS, "compile.memory_gib=0.3")
    profile, tables = load(str(tight / "profile.yaml")), []
    with pytest.raises(graphs.GraphsFailed, match=LOSS):
        workspace.compile(tight, table=lambda *table: tables.append(table))
    ((_, title, rows),) = tables
    assert "5 graphs: 4 successful, 1 failed" in title
    assert [row["program"] for row in rows if row["error"]] == [LOSS]
    assert workspace.store.artifacts.find(GraphsStep.id(keys.graphs(profile))) is None

    caplog.clear()
    with forked_jobs(real="modeling.tracing.compile"):  # processes that pgrep finds
        interrupt_while_compiling(workspace, run, caplog)
    left = ["pgrep", "-f", f"modeling.tracing.compile.*{workspace.folder}"]
    assert subprocess.run(left, capture_output=True, text=True, check=False).stdout == ""
    assert "waiting for" not in caplog.text  # no process left a lock

    # Runs that differ in layers and learning rate share every program; of two at a time, one compiles it.
    others = ("model.num_hidden_layers=5", "model.num_hidden_layers=6")
    runs = [
        micro.run_folder(tmp_path / str(n), *SETTINGS, other, f"train.learning_rate={n}e-4")
        for n, other in enumerate(others, 1)
    ]
    with ThreadPoolExecutor(2) as pool:
        artifacts = [*pool.map(workspace.compile, runs)]
    assert len({compiled.key, *(artifact.key for artifact in artifacts)}) == 3
    second, first = sorted(artifacts, key=lambda artifact: artifact.summary["from_cache"], reverse=True)
    assert second.summary["from_cache"] == second.summary["total"] == compiled.summary["total"]
    assert {name for name, how in status(first.summary).items() if how == "compiled"} == {LOSS}
    assert first.summary["failed"] == 0


def kill_while_compiling(workspace: Workspace, run: Path) -> None:
    """Compile in another process, which is killed when it starts to compile LOSS."""
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True);"
        "from profiles.resolve import load; from tasks.steps.graphs import GraphsStep;"
        "from tasks.step import Context; from tasks.store.store import Store;"
        f"profile = load({str(run / 'profile.yaml')!r});"
        f"GraphsStep().run(Context(profile, Store({str(workspace.folder / 'store')!r})))"
    )
    process = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if f"compiling {LOSS}" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()


def interrupt_while_compiling(workspace: Workspace, run: Path, caplog) -> None:
    """Compile in this process, which gets a SIGINT when it starts to compile LOSS."""

    def interrupt() -> None:
        while f"compiling {LOSS}" not in caplog.text:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            workspace.compile(run)
    finally:
        signal.signal(signal.SIGINT, before)


def test_programs_that_share_a_name_have_separate_jobs():
    kinds = [
        {"name": "block, training", "digest": digest * 32} for digest in "ab"
    ]  # with experts and without
    assert [programs.job_name(kind) for kind in kinds] == [
        f"compile-block-training-{8 * letter}" for letter in "ab"
    ]


def test_missing_cpp_compiler_is_the_note_of_the_step_and_training_runs_eager(
    workspace, tmp_path, monkeypatch, caplog
):
    run = micro.run_folder(tmp_path / "run", *SETTINGS, *ALONE)
    ensure_running()  # the fork server needs the usual PATH
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    artifact = workspace.compile(run)
    note = "no C++ compiler (install g++) on this machine: training runs in eager mode"
    assert artifact.summary["note"] == note
    assert note not in caplog.text  # which the terminal would show twice
    assert note in workspace.train(run, artifact, processes=1)
    assert micro.metrics(run)[0]["graph_cache_misses"] == micro.metrics(run)[0]["graph_cache_hits"] == 0


def test_a_machine_that_cannot_compile_is_tested_again_by_the_next_run(run, tmp_path, monkeypatch, caplog):
    killed = {"name": LOSS, "graphs": 1, "status": "failed", "seconds": None, "peak_bytes": None}
    error = "CppCompileError: g++: fatal error: Killed signal terminated program cc1plus"
    monkeypatch.setattr(graphs, "_trace", lambda *_: {"programs": [], "stages": []})
    monkeypatch.setattr(graphs, "apply_trace", lambda profile, planned, traced: planned)
    monkeypatch.setattr(programs, "compile_all", lambda *_: [{**killed, "error": error}])
    context = Context(load(str(run / "profile.yaml")), Store(str(tmp_path / "store")))
    for reason in ("too little memory", "no Python headers"):
        summary = GraphsStep().run(context).summary
        assert summary["eager"]
        assert reason in summary["note"]
        monkeypatch.setattr(compilers.Inductor, "fault", lambda *_: "no Python headers (install python3-dev)")
    assert GraphsStep().find(context, GraphsStep().key(context)) is None

    monkeypatch.undo()
    monkeypatch.setattr(graphs, "_trace", lambda *_: {"programs": [], "stages": []})
    monkeypatch.setattr(graphs, "apply_trace", lambda profile, planned, traced: planned)
    monkeypatch.setattr(
        programs, "compile_all", lambda *_: [{**killed, "error": "TypeError: not the machine's"}]
    )
    with pytest.raises(graphs.GraphsFailed, match="TypeError"):
        GraphsStep().run(context)


@pytest.mark.compiles
def test_a_trial_compiles_a_small_graph_and_its_note_says_what_all_would_cost(run, tmp_path):
    profile = load(str(run / "profile.yaml"), ["compile.enabled=auto"])
    summary = GraphsStep().run(Context(profile, Store(str(tmp_path / "store")))).summary
    assert (summary["eager"], summary["total"], summary["failed"]) == (True, 1, 0)
    assert status(summary) == {"activation": "compiled"}
    seconds = r"[\d.:]+( s)?"
    said = rf"1 graph as a trial; all would take {seconds} of CPU to compile and save at most {seconds}: eager mode"
    assert re.fullmatch(said, summary["note"])


def test_auto_compiles_only_where_a_trial_shows_that_it_pays(run, tmp_path, monkeypatch):
    store, jobs = Store(str(tmp_path / "store")), []
    trial = {"seconds": 2.0, "compiling": 32.0}
    errors = [
        JobFailed("trial: ended with exit code 1; log: removed", "x.py\nInductorError: no such operator\n\n")
    ]

    def execute(launcher: local.LocalLauncher, job: Job, *_: object, **__: object) -> None:
        if errors:
            raise errors.pop()
        jobs.append(job.name)
        job.folder.mkdir()
        (job.folder / "trial.json").write_text(json.dumps({**trial, "training": steps}))

    monkeypatch.setattr(graphs, "execute", execute)
    trace_nothing(monkeypatch)
    profile = load(str(run / "profile.yaml"), ["compile.enabled=auto"])
    contexts = {n: Context(with_value(profile, "train.steps", n), store) for n in (100, 200)}
    steps = 100
    note = "a trial of the compiler failed (InductorError: no such operator): training runs in eager mode"
    assert GraphsStep().run(contexts[steps]).summary["note"] == note  # and it is not found again
    for _ in range(2):  # the second time, the decision is in the store
        summary = GraphsStep().run(contexts[steps]).summary
        assert (summary["eager"], summary["total"]) == (True, 1)
        assert "all would take 32.0 s of CPU to compile and save at most 25.0 s" in summary["note"]
    steps = 200
    artifact = GraphsStep().run(contexts[steps])
    assert artifact.key == keys.graphs(with_value(profile, "compile.enabled", True))
    assert "eager" not in artifact.summary
    assert jobs == ["trial", "trial"]
    # Also for the shorter run, these graphs cost nothing now.
    assert GraphsStep().run(contexts[100]).key == artifact.key
