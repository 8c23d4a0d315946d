"""Jobs outlive their worker, flow and Prefect server; the next command re-attaches to them."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import psutil
import pytest

from tests.flows.micro import losses, settings, wait_for_step
from tests.flows.test_up import ask, free_port  # noqa: F401
from tests.slurm.cluster import WITH_PARENT
from tests.slurm.conftest import SLURM, register, until, worker

LONG = (*SLURM, "train.steps=1500", "checkpoint.every=300", "evaluate.every=0")


@pytest.fixture
def server(tmp_path, free_port):  # noqa: F811
    """A Prefect server that can be killed and restarted: a function that starts it, and its API address."""
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
        until(lambda: healthy(address), seconds=120)
        return started[-1]

    yield start, address
    for each in started:
        each.terminate()
        each.wait(timeout=30)


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def deployment(prefect_server):
    """The deployment `pretrain/tiny`, registered like by `trainshed up`."""
    register(prefect_server, "tiny")
    return next(each for each in ask(f"{prefect_server}/deployments/filter") if each["tags"] == ["pretrain"])


@pytest.fixture
def deployed(deployment, prefect_server, cluster, profile, tmp_path):
    """A deployed run that trains on the cluster: its worker, run folder and flow run id."""
    with worker(prefect_server, tmp_path / "worker.log") as started:
        parameters = {"profile": str(profile), "overrides": list(LONG), "name": "deployed"}
        parameters["store"] = str(tmp_path / "store")
        made = ask(
            f"{prefect_server}/deployments/{deployment['id']}/create_flow_run", {"parameters": parameters}
        )
        folder = tmp_path / "store/runs/deployed"
        wait_for_step(folder, 50)
        yield started, folder, made["id"]


def test_run_cancelled_in_the_ui_saves_and_ends_its_job(deployed, prefect_server, cluster):
    _, folder, flow_run = deployed
    ask(f"{prefect_server}/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
    until(lambda: not cluster.jobs(), seconds=40)
    done = max(losses(folder))
    assert (folder / f"checkpoints/step_{done}/complete.json").exists()
    until(lambda: not cluster.tasks())

    def cancelled() -> bool:
        (run,) = ask(f"{prefect_server}/flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
        return run["state_type"] == "CANCELLED"

    until(cancelled)


def test_command_reattaches_to_the_job_of_a_killed_worker(
    deployed, cluster, command, profile, prefect_server, tmp_path
):
    worker, folder, flow_run = deployed
    (job,) = cluster.jobs()
    started = psutil.Process(worker.pid).children(recursive=True)
    (flow,) = (each for each in started if each.environ().get("PREFECT__FLOW_RUN_ID") == flow_run)
    assert flow.environ()["PREFECT_CLIENT_MAX_RETRIES"] == "7"  # though its worker has none of it
    for process in [psutil.Process(worker.pid), *started]:
        process.kill()
    done = max(losses(folder))
    second = command(
        "run", str(profile), "--name", "deployed", *settings(*LONG), PREFECT_API_URL=prefect_server
    )
    until(lambda: max(losses(folder)) > done)
    assert [each[0] for each in cluster.jobs()][:1] == [job[0]]
    code, out, err = second.result()
    assert code == 0, err
    assert "is already running: re-attached to it" in out
    assert (folder / "logs/train.log").read_text().count("rendezvous at") == 1
    assert list(losses(folder)) == list(range(1, 1501))


def test_run_completes_despite_a_server_outage(cluster, command, profile, server, tmp_path):
    start, address = server
    first = start()
    folder = tmp_path / "store/runs/micro"
    ran = command("run", str(profile), *settings(*LONG), PREFECT_API_URL=address)
    wait_for_step(folder, 50)
    os.killpg(first.pid, signal.SIGKILL)
    wait_for_step(folder, 1500)
    until(lambda: (folder / "logs/train.exit.json").exists())
    start()
    code, _, err = ran.result()
    assert code == 0, err
    (run,) = ask(f"{address}/flow_runs/filter")
    assert run["state_type"] == "COMPLETED"
    assert json.loads((folder / "logs/train.exit.json").read_text())["exit_code"] == 0
