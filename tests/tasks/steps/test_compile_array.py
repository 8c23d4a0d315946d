"""Programs compiled by a job array, each once; array and compiler are stand-ins."""

import json
import platform
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from modeling.compilation import compilers
from profiles import resolve
from profiles.schema import Cluster
from tasks import keys
from tasks.failures import FatalError
from tasks.launchers import Job, JobFailed
from tasks.step import Context
from tasks.steps import compile_array, programs
from tasks.store.store import Store

SETTINGS = ("compile.launcher=slurm", "cluster.shards_partition=cpu", "cluster.threads=1")
NAMES = ("block, training", "block, evaluation", "loss, training")
PROGRAMS = [
    {"name": name, "digest": f"{number}" * 32, "stage": 0, "graphs": [{}]}
    for number, name in enumerate(NAMES)
]


@pytest.fixture
def array(tmp_path, monkeypatch):
    """Runs arrays in this process; the names of programs that were compiled, and what was submitted."""
    monkeypatch.setattr(compilers.Neuron, "missing_software", lambda self: None)
    monkeypatch.setattr(compile_array, "MAX_JOBS", 2)  # so that one job has two programs
    compiled: list[str] = []
    submitted: list[Job | Cluster] = []

    def run_array(
        launcher: object, job: Job, watch: object, *, on_submit: Callable[[], None], grace: float
    ) -> None:
        submitted.append(job)
        on_submit()
        for index in range(job.array):
            assert compile_array.main([*job.arguments, "--index", str(index)]) == 0

    def run_compiler(launcher: object, job: Job, watch: object, **_: object) -> None:
        given = dict(zip(job.arguments[::2], job.arguments[1::2], strict=True))
        compiled.append(given["--program"])
        error = "it is too large" if given["--program"] == NAMES[1] else None
        result = {"graphs": 1, "seconds": 2.0, "peak_bytes": 3, "error": error}
        Path(given["--result"]).write_text(json.dumps(result))
        Path(given["--cache"], "code.neff").touch()
        if error:
            raise JobFailed("ended with exit code 1")

    monkeypatch.setattr(compile_array, "create", lambda name, cluster: submitted.append(cluster))
    monkeypatch.setattr(compile_array, "execute", run_array)
    monkeypatch.setattr(programs, "execute", run_compiler)
    work = tmp_path / "work"
    (work / programs.PREPARED).mkdir(parents=True)
    (work / "logs").mkdir()
    profile = resolve.load("llama3-8b", SETTINGS)
    (work / "profile.yaml").write_text(resolve.dump(profile))
    terminate = signal.getsignal(signal.SIGTERM)
    yield Context(profile, Store(str(tmp_path / "store"))), work, compiled, submitted
    signal.signal(signal.SIGTERM, terminate)


def test_each_program_is_compiled_by_one_job_and_found_afterwards(array):
    context, work, compiled, submitted = array
    made = compile_array.compile_all(context, work, PROGRAMS)
    assert [(entry["name"], entry["status"]) for entry in made] == [
        (NAMES[0], "compiled"),
        (NAMES[1], "failed"),
        (NAMES[2], "compiled"),
    ]
    assert [entry["error"] for entry in made] == [None, "it is too large", None]
    assert compiled == [NAMES[0], NAMES[2], NAMES[1]]
    cluster, job = submitted
    assert job.array == 2
    # Without an accelerator's nodes.
    assert (cluster.partition, cluster.constraint, cluster.exclusive) == ("cpu", None, False)

    again = compile_array.compile_all(context, work, PROGRAMS)  # what failed only
    assert [entry["status"] for entry in again] == ["from cache", "failed", "from cache"]
    assert compiled[3:] == [NAMES[1]]
    # The same array, so that a flow which is started again re-attaches to one that is still running.
    assert submitted[3].signature == job.signature


def test_node_with_another_compiler_is_named(array, monkeypatch):
    context, work, compiled, _ = array
    here = keys.compiler(context.profile)
    found = iter([here, *2 * [{**here, "versions": {"neuronx-cc": "2.22"}}]])
    monkeypatch.setattr(compile_array.keys, "compiler", lambda profile: next(found))
    monkeypatch.setattr(compile_array.keys, "graph", lambda profile, digest: digest)
    with pytest.raises(FatalError) as failure:  # neither retried, nor trained without the graphs
        compile_array.compile_all(context, work, PROGRAMS)
    named = (
        f"block, training was not compiled: versions is {{'neuronx-cc': '2.22'}} on {platform.node()}, and {{"
    )
    assert named in str(failure.value)
    assert compiled == []


def test_job_that_slurm_cancels_stops_its_compile(array, monkeypatch):
    """Which `execute` does, as on any exception of this kind; the compile has a session of its own."""
    context, work, _, _ = array
    monkeypatch.setattr(programs, "execute", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        compile_array.compile_all(context, work, PROGRAMS)
    assert stop.value.code == 128 + signal.SIGTERM
