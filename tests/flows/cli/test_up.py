"""`trainshed up`: server, worker and deployments; runs started through the API; shutdown by Ctrl-C."""

import argparse
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from functools import cache
from pathlib import Path

import pytest

from benchmarks.harness.processes import training_ranks
from flows.cli import deployments as registry
from flows.cli import up as up_command
from flows.cli.deployments import listed, query
from flows.cli.main import main
from flows.server.locks import ServerLocks
from flows.server.prefect_settings import AUTOMATION, SETTINGS
from flows.server.shared_server import SERVE, wait_healthy
from flows.ui.summaries import cluster_summary
from profiles import resolve
from tests.flows.micro import final_state, losses, wait_for_step, write_patient_loss, write_shadowing_modules
from tests.ports import free_port
from tests.waiting import until

ENDLESS = ("train.steps=1000000", "checkpoint.every=40", "evaluate.every=0")  # until it is stopped


@pytest.fixture
def few_deployments(monkeypatch, tmp_path_factory):
    """A Slurm cluster whose nodes run no profile: 14 deployments are registered instead of 136."""
    programs = tmp_path_factory.mktemp("programs")
    for name, output in (("sbatch", ""), ("sinfo", "gpu:trn1:1 (null)")):
        (programs / name).write_text(f"#!/bin/sh\necho '{output}'\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name in ("_profile_starts_here", "_slurm_accelerators"):  # of earlier tests
        monkeypatch.setattr(registry, name, cache(getattr(registry, name).__wrapped__))


@pytest.fixture
def up(few_deployments, command, port, tmp_path):
    """The running command and its API's address, in a folder with modules that would shadow ours."""
    write_shadowing_modules(tmp_path)
    # Prefect schedules runs once a minute by default.
    started = command("up", "--port", str(port), PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS="5")
    line = started.process.stderr.readline()
    assert line == f"Prefect's UI: http://127.0.0.1:{port}\n"
    return started, f"http://127.0.0.1:{port}/api"


@pytest.fixture
def port():
    return free_port()


def ask(address: str, body: dict | list | None = None, method: str = "POST") -> list | dict | None:
    """The response of Prefect's API."""
    return query(address, body or {}, method)


def allows_pages_of(origin: str, api: str) -> bool:
    """Whether browsers let pages of this origin call the API."""
    request = urllib.request.Request(f"{api}/health", headers={"Origin": origin})
    with urllib.request.urlopen(request) as answer:
        return answer.headers["Access-Control-Allow-Origin"] is not None


def only(flow_run: str) -> dict:
    """Filter by one flow run."""
    return {"flow_runs": {"id": {"any_": [flow_run]}}}


@pytest.fixture
def plain_server(port, prefect_home, tmp_path):
    """API address of an empty Prefect server, started by hand."""
    with (tmp_path / "server.log").open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, *("-m", "prefect", "server", "start", "--port", str(port))],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    api = f"http://127.0.0.1:{port}/api"
    assert wait_healthy(api, lambda: server.poll() is None)
    yield api
    server.terminate()
    server.wait(timeout=180)


def test_up_completes_a_server_whose_deployment_runs_and_ctrl_c_saves_the_next_run(
    few_deployments, command, plain_server, port, profile, tmp_path, capsys, monkeypatch
):
    write_shadowing_modules(tmp_path)
    api = plain_server
    started = command("up", "--port", str(port), PYTHONPATH=str(tmp_path))
    assert f"instead of these on PYTHONPATH: {tmp_path}/flows.py, " in started.process.stderr.readline()
    line = started.process.stderr.readline()
    assert "without the work pool trainshed" in line
    assert "an online worker" in line
    assert started.process.stderr.readline() == f"Prefect's UI: http://127.0.0.1:{port}\n"
    assert ask(f"{api}/automations/filter")
    found = ask(f"{api}/deployments/filter")
    deployments = {each["name"]: each for each in found if each["entrypoint"] == "trainshed.pretrain"}
    assert f"/deployment/{deployments['tiny']['id']}/run" in started.process.stderr.readline()
    assert started.process.stderr.readline() == "or in another terminal:\n"
    # Otherwise Prefect would show a random name until the flow starts.
    assert started.process.stderr.readline().endswith("deployment run pretrain/tiny --flow-run-name tiny\n")
    form = deployments["tiny"]["parameter_openapi_schema"]["properties"]
    assert all(field["description"] for field in form.values())
    assert "null" not in json.dumps(form)
    assert form["name"]["title"] != "name"  # beside Prefect's own "Run Name"

    address = f"{api}/deployments/{deployments['tiny']['id']}/create_flow_run"
    run = ask(address, {"parameters": {"profile": str(profile), "name": "deployed", "until": "train"}})

    def state() -> dict:
        (now,) = ask(f"{api}/flow_runs/filter", only(run["id"]))
        return now["state"]

    until(lambda: state()["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"), seconds=400, every=1)
    assert state()["type"] == "COMPLETED", state()["message"]
    assert len(losses(tmp_path / "store/runs/deployed")) == 6

    # The server creates task runs from events, and receives logs, with a delay.
    def skips_checkpoint() -> bool:
        shown = ask(f"{api}/task_runs/filter", only(run["id"]))
        return ("checkpoint", "Skipped") in {(each["name"], each["state_name"]) for each in shown}

    until(skips_checkpoint, every=1)
    logs = {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "limit": 200}
    until(lambda: "from scratch, seed" in json.dumps(ask(f"{api}/logs/filter", logs)), every=1)
    artifacts = {artifact["key"]: artifact for artifact in ask(f"{api}/artifacts/filter", only(run["id"]))}
    assert float(artifacts["training"]["data"]) == 100
    assert json.loads(artifacts["last-steps"]["data"])[0]["step"] == "6"

    # A second `up` in another folder is told whose server this is; in the same one, it finds nothing to do. A second run is
    # interrupted while it trains.
    capsys.readouterr()
    assert main(["up", "--port", str(port)]) == 1
    assert f"the Prefect server of another store, {tmp_path}/store, where" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["up", "--port", str(port)]) == 0
    assert "already running" in capsys.readouterr().err
    (worker,) = ask(f"{api}/work_pools/trainshed/workers/filter")
    assert worker["status"] == "ONLINE"
    ask(address, {"parameters": {"profile": str(profile), "overrides": ENDLESS, "name": "interrupted"}})
    folder = tmp_path / "store/runs/interrupted"
    wait_for_step(folder, 50, timeout=300)
    os.killpg(started.process.pid, signal.SIGINT)
    code, _, _ = started.result(timeout=180)
    assert code == 0
    assert started.left_behind() == []
    urllib.request.urlopen(f"{api}/health", timeout=5).close()  # it was running before
    done = len(losses(folder))
    assert (folder / f"checkpoints/step_{done}/complete.json").exists()
    assert final_state(Path(os.environ["PREFECT_HOME"]), "interrupted") == (
        "Stopped",
        f"saved at step {done}",
    )


def test_repeated_up_registers_once_runs_schedules_and_a_second_ctrl_c_kills_everything(
    up, profile, tmp_path
):
    """Shares the database of the test above."""
    started, api = up
    own = api.removesuffix("/api").replace("127.0.0.1", "localhost")
    assert [allows_pages_of(origin, api) for origin in (own, "https://example.org")] == [True, False]
    automations = ask(f"{api}/automations/filter")
    (automation,) = (each for each in automations if each["name"] == AUTOMATION)
    assert automation["enabled"]
    assert automation["trigger"]["posture"] == "Proactive"
    (pool,) = ask(f"{api}/work_pools/filter")
    assert (pool["name"], pool["concurrency_limit"]) == ("trainshed", 4)
    deployments = ask(f"{api}/deployments/filter")
    assert len({(each["flow_id"], each["name"]) for each in deployments}) == len(deployments)

    # A schedule of the continual flow, with a time zone, starts a run on the worker.
    (nightly,) = (each for each in deployments if each["entrypoint"] == "trainshed.continual")
    (schedule,) = nightly["schedules"]
    assert schedule["schedule"]["timezone"] == "Europe/Berlin"
    assert not schedule["active"]
    soon = {  # Prefect submits runs 10 s ahead, so that the second one is not yet due when the first has started
        "schedule": {"interval": 20, "anchor_date": "2026-01-01T00:00:00Z", "timezone": "Europe/Berlin"},
        "active": True,
    }
    soon["parameters"] = {"profile": str(profile), "name": "nobody"}
    (made,) = ask(f"{api}/deployments/{nightly['id']}/schedules", [soon])
    of_nightly = {"deployments": {"id": {"any_": [nightly["id"]]}}}  # tests share the database

    def runs(*states: str) -> list[dict]:
        states_of_nightly = {**of_nightly, "flow_runs": {"state": {"type": {"any_": states}}}}
        return until(lambda: ask(f"{api}/flow_runs/filter", states_of_nightly), every=0.5)

    runs("PENDING", "RUNNING", "COMPLETED")
    ask(f"{api}/deployments/{nightly['id']}/schedules/{made['id']}", method="DELETE")  # one run is enough
    done = runs("COMPLETED")
    assert done[0]["state_name"] == "NoFinishedRun"
    assert done[0]["auto_scheduled"]

    # The second Ctrl-C also kills processes that ignore signals: here a suspended rank.
    tiny = ("tiny", "trainshed.pretrain")
    (deployment,) = (each for each in deployments if (each["name"], each["entrypoint"]) == tiny)
    overrides = [*ENDLESS, write_patient_loss(tmp_path)]
    parameters = {"profile": str(profile), "overrides": overrides, "name": "outlasting"}
    ask(f"{api}/deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})
    wait_for_step(tmp_path / "store/runs/outlasting", 50, timeout=300)

    # A killed server is started again, with its password; the worker and the run continue.
    (server,) = (each for each in started.processes() if SERVE in each.cmdline())
    server.kill()
    line = started.process.stderr.readline()
    while "the Prefect server exited" not in line:
        assert line
        line = started.process.stderr.readline()
    assert line == "the Prefect server exited with code -9; started again\n"
    assert wait_healthy(api, lambda: started.process.poll() is None)
    wait_for_step(tmp_path / "store/runs/outlasting", 100, timeout=300)  # and the server is no longer busy
    states = {each["name"]: each["state_type"] for each in ask(f"{api}/flow_runs/filter")}
    assert states["outlasting"] == "RUNNING"

    ranks = training_ranks(tmp_path / "store/runs/outlasting")
    assert ranks
    for process in ranks:
        process.suspend()
    os.killpg(started.process.pid, signal.SIGINT)
    while not started.process.stderr.readline().startswith("stopping"):
        assert started.process.poll() is None
    time.sleep(2)
    assert started.process.poll() is None
    os.killpg(started.process.pid, signal.SIGINT)
    code, _, err = started.result(timeout=20)
    assert code == 0
    assert "killing all processes that this command started" in err
    assert started.left_behind() == []


def test_server_that_cannot_be_kept_running_ends_up(port, tmp_path, monkeypatch, capsys):
    """After a few restarts; a taken port is waited for."""
    starts = []

    def start(*_):
        starts.append(len(starts))
        if len(starts) == 2:
            raise OSError
        return subprocess.Popen(["false"])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(up_command, "start_server", start)
    monkeypatch.setattr(up_command, "POLL", 0.05)
    options = argparse.Namespace(port=port)
    services = up_command._Services(options, tmp_path, ServerLocks(tmp_path), [up_command.SERVER])
    services.server = services._launch_server()
    end = "the Prefect server exited 4 times within 10 minutes, with code 1; log: store/logs/server.log"
    assert services._keep_running() == end
    assert len(starts) == 5
    again = "the Prefect server exited with code 1; started again"
    waits = f"the Prefect server exited with code 1; it starts again once port {port} is free"
    assert capsys.readouterr().err.splitlines() == [waits, again, again]


def test_taken_port_is_an_error(command, port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        code, _, err = command("up", "--port", str(port)).result()
    assert code == 1
    assert f"port {port} is taken" in err


def test_another_users_server_is_not_used(port, monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
        assert main(["up", "--port", str(port)]) == 1
    assert f"port {port} is taken by another user's server" in capsys.readouterr().err


def test_requests_to_the_api_send_its_password(monkeypatch):
    def open_url(request, **_):
        assert request.get_header("Authorization") == "Basic dGVhbTpwYXNzd29yZA=="
        return io.BytesIO(b"[]")

    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "team:password")
    monkeypatch.setattr(urllib.request, "urlopen", open_url)
    assert query("http://server/api/flows/filter", {}) == []


@pytest.fixture(scope="module")
def deployments():
    return listed(Path(__file__).parents[3], every=True)


def test_deployed_runs_get_prefect_settings_from_their_deployment(deployments):
    wanted = {
        name: SETTINGS[name] for name in ("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "PREFECT_CLIENT_MAX_RETRIES")
    }
    for each in deployments:
        assert each["work_pool"]["job_variables"]["env"] == wanted


def test_deployments_are_the_profiles_that_can_start_and_name_their_cluster(deployments):
    profiles = {name: resolve.load(name) for name in resolve.names()}
    entrypoints = ("trainshed.pretrain", "trainshed.finetune")
    pretraining = [each for each in deployments if each["entrypoint"] in entrypoints]
    assert {each["name"] for each in pretraining} == profiles.keys()
    for each in pretraining:
        profile = profiles[each["name"]]
        here = profile.cluster.launcher == "local"
        flow = "finetune" if profile.fine_tunes else "pretrain"
        assert each["entrypoint"] == f"trainshed.{flow}"
        assert each["tags"] == ["cpu" if here else cluster_summary(profile)]
        assert each["description"] == profile.description
