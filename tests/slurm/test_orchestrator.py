"""Jobs outlive their worker, flow and Prefect server; the next command re-attaches to them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.processes import training_ranks
from flows.server.shared_server import wait_healthy
from tests.flows.cli.test_up import ask
from tests.flows.micro import (
    losses,
    settings,
    wait_for_step,
    write_patient_loss,
    write_shadowing_modules,
)
from tests.ports import free_port
from tests.slurm.cluster import WITH_PARENT
from tests.slurm.conftest import SLURM, register_deployment, worker
from tests.waiting import until

RUN = (*SLURM, "cluster.nodes=1", "parallel.tensor=1", "checkpoint.every=100", "evaluate.every=0")
ENDLESS = "train.steps=100000"  # until it is cancelled


class Server:
    """A Prefect server that can be killed and restarted.

    Attributes:
        api: its address.
    """

    def __init__(self, folder: Path, database: Path) -> None:
        shutil.copy(database, folder)
        self._port = str(free_port())
        self._folder, self.api = folder, f"http://127.0.0.1:{self._port}/api"

    def start(self) -> None:
        command = [*WITH_PARENT, sys.executable, *("-m", "prefect", "server", "start"), "--port", self._port]
        environment = {**os.environ, "PREFECT_HOME": str(self._folder)}
        with (self._folder / "server.log").open("ab") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        assert wait_healthy(self.api, lambda: self.process.poll() is None)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(prefect_database, tmp_path_factory):
    started = Server(tmp_path_factory.mktemp("server"), prefect_database)
    started.start()
    yield started
    started.process.terminate()
    started.process.wait(timeout=180)


@pytest.fixture(scope="module")
def deployment(server, tmp_path_factory):
    """A worker, the deployment `pretrain/tiny`, registered as by `trainshed up`, its id, and a slow loss.

    The loss is beside modules that would shadow ours.
    """
    folder = tmp_path_factory.mktemp("deployments")
    write_shadowing_modules(folder)
    patient = write_patient_loss(folder)
    register_deployment(server.api, "tiny", folder)
    every = ask(f"{server.api}/deployments/filter")
    (found,) = (each for each in every if each["entrypoint"] == "trainshed.pretrain")
    with worker(server.api, folder / "worker.log", PYTHONPATH=str(folder)) as started:
        yield started, found["id"], patient


@pytest.fixture
def deploy(deployment, server, cluster, profile, tmp_path):
    """Start a run on the cluster with these settings; returns its folder and flow run id once it trains."""

    def start(*overrides: str) -> tuple[Path, str]:
        parameters = {"profile": str(profile), "overrides": [*RUN, *overrides], "name": "deployed"}
        parameters["store"] = str(tmp_path / "store")
        made = ask(f"{server.api}/deployments/{deployment[1]}/create_flow_run", {"parameters": parameters})
        wait_for_step(tmp_path / "store/runs/deployed", 20)
        return tmp_path / "store/runs/deployed", made["id"]

    return start


def state(server: Server, flow_run: str) -> str:
    (run,) = ask(f"{server.api}/flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    return run["state_type"]


def test_run_cancelled_in_the_ui_saves_and_ends_its_job(deploy, deployment, server, cluster):
    folder, flow_run = deploy(ENDLESS, deployment[2])
    ask(f"{server.api}/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
    until(lambda: not cluster.jobs())
    done = max(losses(folder))
    assert (folder / f"checkpoints/step_{done}/complete.json").exists()
    assert json.loads((folder / "logs/train.exit.json").read_text())["exit_code"] != 0
    until(lambda: not cluster.tasks())
    until(lambda: state(server, flow_run) == "CANCELLED", every=1)


def test_command_reattaches_to_the_job_of_a_killed_worker_and_completes_despite_a_server_outage(
    deploy, deployment, cluster, command, profile, server
):
    patient = ("train.steps=300", "cluster.hang_seconds=600")
    folder, flow_run = deploy(*patient)
    training = training_ranks(folder)
    assert len(training) == 1
    for process in training:  # so that training outlasts the start of the command
        process.suspend()
    (job,) = cluster.jobs()
    prefect_worker = psutil.Process(deployment[0].pid)
    started = prefect_worker.children(recursive=True)
    (flow,) = (each for each in started if each.environ().get("PREFECT__FLOW_RUN_ID") == flow_run)
    assert flow.environ()["PREFECT_CLIENT_MAX_RETRIES"] == "7"  # though its worker has none of it
    for process in [prefect_worker, *started]:
        process.kill()
    second = command(
        *("run", str(profile), "--name", "deployed", "--until", "train", *settings(*RUN, *patient)),
        PREFECT_API_URL=server.api,
    )
    log = folder.parents[1] / "logs/deployed.log"
    until(lambda: log.exists() and "re-attached to it" in log.read_text())
    assert [each[0] for each in cluster.jobs()] == [job[0]]
    server.kill()
    for process in training:
        process.resume()
    until(lambda: (folder / "logs/train.exit.json").exists())
    server.start()
    code, out, err = second.result()
    assert code == 0, err
    assert "is already running: re-attached to it" in out
    assert (folder / "logs/train.log").read_text().count("rendezvous at") == 1
    assert list(losses(folder)) == list(range(1, 301))
    (own,) = (run["id"] for run in ask(f"{server.api}/flow_runs/filter") if run["deployment_id"] is None)
    assert state(server, own) == "COMPLETED"
