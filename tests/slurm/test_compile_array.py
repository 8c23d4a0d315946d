"""Programs compiled once each by a job array on a real cluster, also by flows that are killed."""

import os
import signal
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

from profiles.resolve import load
from tasks import keys
from tasks.failures import FatalError
from tasks.launchers import JobFailed
from tasks.step import Context
from tasks.steps import compile_array, graphs
from tasks.steps.programs import PROGRAM
from tasks.store.artifacts import ArtifactId
from tasks.store.store import Store
from tests.forked_jobs import forked_jobs
from tests.forkserver import forkserver
from tests.modeling import micro
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.compiles]
SETTINGS = (
    *("compile.enabled=true", "compile.launcher=slurm", "cluster.partition=train"),
    *("cluster.shards_partition=spot", "cluster.constraint=accelerated"),  # a node that this cluster lacks
    *("parallel.tensor=1", "cluster.devices_per_node=1"),
)


class Workspace:
    """The traced programs of a run that compile fastest, each for a job of the array, and a store."""

    def __init__(self, folder: Path) -> None:
        run, self.store = micro.run_folder(folder / "run", *SETTINGS), Store(str(folder / "store"))
        self.profile, self.work = load(str(run / "profile.yaml")), run
        (run / "logs").mkdir()
        with forked_jobs():
            traced = graphs._trace(self.profile, run)
        self.programs = [each for each in traced["programs"] if each["name"].startswith("loss")]

    @property
    def names(self) -> list[str]:
        return [program["name"] for program in self.programs]

    def compile(self, **context) -> list[dict]:
        """Compile the programs, as the graphs step does; returns their entries."""
        return compile_array.compile_all(
            Context(self.profile, self.store, **context), self.work, self.programs
        )

    def start(self, count: int) -> ForkServerProcess:
        """Compile the first `count` programs in a flow of its own."""
        arguments = (self, self.programs[:count], dict(os.environ))
        process = forkserver().Process(target=compile_in_flow, args=arguments)
        process.start()
        return process

    def forget(self, program: dict) -> None:
        self.store.artifacts.remove(ArtifactId(PROGRAM, keys.graph(self.profile, program["digest"])))


def compile_in_flow(workspace: Workspace, programs: list[dict], environment: dict[str, str]) -> None:
    os.environ.update(environment)  # how to reach the cluster, which was started after the fork server
    signal.signal(signal.SIGINT, signal.default_int_handler)
    workspace.programs = programs
    workspace.compile()


def running(cluster, module: str, job: int | None = None) -> list[psutil.Process]:
    """Processes that run this module in the array, or in one of its jobs."""
    found = []
    for process in cluster.tasks():
        with suppress(psutil.Error):  # it has just ended
            index = int(process.environ().get("SLURM_ARRAY_TASK_ID", -1))
            program, *arguments = process.cmdline()
            if "python" in program and module in arguments[:3] and job in (None, index):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("compile"))


def test_each_program_is_compiled_once_by_an_array_that_flows_cancel_or_re_attach_to(
    cluster, workspace, caplog
):
    def compiles() -> list[psutil.Process]:
        return running(cluster, "modeling.tracing.compile")

    interrupted = workspace.start(1)
    until(compiles)
    os.kill(interrupted.pid, signal.SIGINT)
    interrupted.join()
    assert interrupted.exitcode == 1
    until(lambda: not cluster.tasks())  # compiles have sessions of their own
    assert not cluster.jobs("PENDING,RUNNING")

    log = workspace.work / "logs/compile.log"
    before = log.stat().st_size
    killed = workspace.start(2)
    suspended = until(lambda: len(found := compiles()) == 2 and found)
    for process in suspended:
        process.suspend()
    killed.kill()
    killed.join()

    def resume() -> None:
        while suspended:
            suspended.pop().resume()

    made = workspace.compile(watch=resume)
    assert "compile is already running: re-attached to it" in caplog.text
    assert [(entry["name"], entry["status"]) for entry in made] == [
        (name, "compiled") for name in workspace.names
    ]
    lines = log.read_bytes()[before:].decode().splitlines()
    assert sorted(line for line in lines if line.endswith(": compiled")) == sorted(
        f"{name}: compiled" for name in workspace.names
    )
    script = (workspace.work / "logs/compile.sbatch").read_text()
    assert "--array=0-1\n" in script
    assert "--partition=spot\n" in script
    assert "accelerated" not in script


def test_program_of_a_failed_job_and_a_node_with_another_compiler_are_named(cluster, workspace, monkeypatch):
    first, last = workspace.names
    assert {entry["error"] for entry in workspace.compile()} == {None}

    def kill() -> None:
        for process in running(cluster, "tasks.steps.compile_array", job=1):
            process.kill()

    workspace.forget(workspace.programs[1])
    with pytest.raises(JobFailed, match=rf"compile: .*SIGKILL.*; not tried: {last}\n"):
        workspace.compile(watch=kill)

    here = keys.compiler(workspace.profile)
    monkeypatch.setattr(keys, "compiler", lambda profile: {**here, "versions": {"torch": "2.99"}})
    monkeypatch.setattr(compile_array, "MAX_JOBS", 1)
    named = rf"{first} was not compiled: versions is .* and .*2\.99.* where the flow runs"
    with pytest.raises(FatalError, match=named):
        workspace.compile()
