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

from flows.server.shared_server import wait_healthy
from tests.flows.cli.test_up import ask, free_port  # noqa: F401
from tests.flows.micro import losses, settings, wait_for_step
from tests.slurm.cluster import WITH_PARENT
from tests.slurm.conftest import SLURM, ranks, register, until, worker

RUN = (*SLURM, "checkpoint.every=100", "evaluate.every=0")
ENDLESS = "train.steps=100000"  # until it is cancelled


@pytest.fixture
def server(tmp_path, free_port, prefect_database):  # noqa: F811
    """A Prefect server that can be killed and restarted: a function that starts it, and its API address."""
    (tmp_path / "home").mkdir()
    shutil.copy(prefect_database, tmp_path / "home")
    started = []
    address = f"http://127.0.0.1:{free_port}/api"

    def start() -> subprocess.Popen:
        command = [
            *WITH_PARENT,
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(free_port),
        ]
        with (tmp_path / "server.log").open("ab") as output:
            started.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, "PREFECT_HOME": str(tmp_path / "home")},
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        assert wait_healthy(address, lambda: started[-1].poll() is None)
        return started[-1]

    yield start, address
    for each in started:
        each.terminate()
        each.wait(timeout=30)


@pytest.fixture(scope="module")
def deployment(prefect_server, tmp_path_factory):
    """A worker and the deployment `pretrain/tiny`, registered as by `trainshed up`; its id."""
    register(prefect_server, "tiny")
    every = ask(f"{prefect_server}/deployments/filter")  # also what other tests registered on this server
    (found,) = (each for each in every if each["name"] == "tiny" and "pretrain" in each["tags"])
    with worker(prefect_server, tmp_path_factory.mktemp("worker") / "worker.log") as started:
        yield started, found["id"]


@pytest.fixture
def deploy(deployment, prefect_server, cluster, profile, tmp_path):
    """Start a run on the cluster with these settings; returns its folder and flow run id once it trains."""

    def start(*overrides: str) -> tuple[Path, str]:
        parameters = {"profile": str(profile), "overrides": [*RUN, *overrides], "name": "deployed"}
        parameters["store"] = str(tmp_path / "store")
        made = ask(
            f"{prefect_server}/deployments/{deployment[1]}/create_flow_run", {"parameters": parameters}
        )
        wait_for_step(tmp_path / "store/runs/deployed", 20)
        return tmp_path / "store/runs/deployed", made["id"]

    return start


def test_run_cancelled_in_the_ui_saves_and_ends_its_job(deploy, prefect_server, cluster):
    folder, flow_run = deploy(ENDLESS)
    ask(f"{prefect_server}/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
    until(lambda: not cluster.jobs())
    done = max(losses(folder))
    assert (folder / f"checkpoints/step_{done}/complete.json").exists()
    assert json.loads((folder / "logs/train.exit.json").read_text())["exit_code"] != 0
    until(lambda: not cluster.tasks())

    def cancelled() -> bool:
        (run,) = ask(f"{prefect_server}/flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
        return run["state_type"] == "CANCELLED"

    until(cancelled, every=1)


def test_command_reattaches_to_the_job_of_a_killed_worker(
    deploy, deployment, cluster, command, profile, prefect_server
):
    patient = ("train.steps=300", "cluster.hang_seconds=600")
    folder, flow_run = deploy(*patient)
    training = ranks(folder)
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
        "run", str(profile), "--name", "deployed", *settings(*RUN, *patient), PREFECT_API_URL=prefect_server
    )
    log = folder.parents[1] / "logs/deployed.log"
    until(lambda: log.exists() and "re-attached to it" in log.read_text())
    assert [each[0] for each in cluster.jobs()] == [job[0]]
    for process in training:
        process.resume()
    code, out, err = second.result()
    assert code == 0, err
    assert "is already running: re-attached to it" in out
    assert (folder / "logs/train.log").read_text().count("rendezvous at") == 1
    assert list(losses(folder)) == list(range(1, 301))


def test_run_completes_despite_a_server_outage(cluster, command, profile, server, tmp_path):
    start, address = server
    first = start()
    folder = tmp_path / "store/runs/micro"
    ran = command("run", str(profile), *settings(*RUN, "train.steps=300"), PREFECT_API_URL=address)
    wait_for_step(folder, 20)
    os.killpg(first.pid, signal.SIGKILL)
    assert max(losses(folder)) < 300
    until(lambda: (folder / "logs/train.exit.json").exists())
    start()
    code, _, err = ran.result()
    assert code == 0, err
    (run,) = ask(f"{address}/flow_runs/filter")
    assert run["state_type"] == "COMPLETED"
    assert json.loads((folder / "logs/train.exit.json").read_text())["exit_code"] == 0
