"""Registration of deployments on a server that may have them already."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.cli import deployments
from flows.cli.deployments import count_unregistered, deploy, listed, named, query
from flows.cli.main import main
from flows.registration import register_pool

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture
def home(tmp_path):
    """A checkout with one deployment."""
    deployment = {
        "name": "only",
        "entrypoint": "flows.fleet.fleet",
        "work_pool": {"name": "trainshed"},
        "tags": ["first"],
        "concurrency_limit": {"limit": 1, "collision_strategy": "ENQUEUE"},
    }
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml.safe_dump({"deployments": [deployment]}))
    return tmp_path


@pytest.mark.slow
def test_deployments_are_registered_again_only_if_they_or_the_servers_have_changed(
    prefect_server, home, monkeypatch
):
    register_pool()
    log, settings = home / "deploy.log", {"env": {**os.environ, "PREFECT_API_URL": prefect_server}}

    def registers() -> bool:
        log.write_text("")
        assert deploy(home, prefect_server, log, settings) == 0
        assert count_unregistered(prefect_server, home) == 0
        return "' successfully " in log.read_text()

    with ThreadPoolExecutor() as pool:  # two `trainshed up` on one port
        codes = pool.map(lambda name: deploy(home, prefect_server, home / name, settings), ("one", "other"))
        assert list(codes) == [0, 0]
    assert not registers()
    (registered,) = query(f"{prefect_server}/deployments/filter", {"deployments": named("only")})
    address = f"{prefect_server}/deployments/{registered['id']}"
    file = home / "prefect.yaml"
    changes = (
        lambda: query(address, {"concurrency_limit": 2}, "PATCH"),
        lambda: query(address, {"concurrency_options": {"collision_strategy": "CANCEL_NEW"}}, "PATCH"),
        lambda: file.write_text(file.read_text().replace("first", "second")),
    )
    with monkeypatch.context() as patch:  # registering takes seconds; here only whether it is started matters
        started = []
        patch.setattr(deployments, "_run", lambda *arguments: started.append(arguments) or 0)
        for number, change in enumerate(changes, 1):
            change()
            assert deploy(home, prefect_server, log, settings) == 0
            assert len(started) == number
        assert deploy(home, prefect_server, log, settings) == 0
        assert len(started) == len(changes)
    query(address, {}, "DELETE")
    assert registers()
    (registered,) = query(f"{prefect_server}/deployments/filter", {"deployments": named("only")})
    assert registered["tags"] == ["second"]
    assert not registers()


@pytest.fixture
def started(monkeypatch):
    """Modules that are started instead of run, with their logs."""
    found = []

    def start(module, log_file, **_):
        found.append((module, log_file))
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(deployments, "start_module", start)
    return found


def test_a_server_too_busy_for_the_digest_has_the_deployments_registered(home, monkeypatch, started):
    def time_out(*_):
        raise TimeoutError("timed out")

    monkeypatch.setattr(deployments, "query", time_out)
    assert deploy(home, "http://127.0.0.1:4200/api", home / "deploy.log", {}) == 0
    ((command, _),) = started
    assert command[:4] == ["prefect", "--no-prompt", "deploy", "--all"]
    assert yaml.safe_load(Path(command[-1]).read_text())["deployments"][0]["name"] == "only"


def test_up_register_registers_with_the_configured_server_and_prints_one_line(monkeypatch, capsys, started):
    monkeypatch.setattr(deployments, "await_start", lambda _: None)
    count = len(listed(CHECKOUT, every=True))
    for address, code, says in (
        ("http://127.0.0.1:9/api", 0, "registered with http://127.0.0.1:9/api: {count} deployments\n"),
        (None, 2, "trainshed: PREFECT_API_URL: is not set; export the address of the API"),
    ):
        with temporary_settings({PREFECT_API_URL: address}):
            assert main(["up", "--register", "--all", "--evaluate", "hellaswag"]) == code
        assert capsys.readouterr().err.startswith(says.format(count=count))
    assert [module[0] for module, _ in started] == [
        "flows.registration",
        "prefect",
        "flows.alerts.evaluation",
    ]
    assert not any(log.parent.exists() for _, log in started)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without devices, and a function that gives it a Slurm cluster of such nodes."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(deployments, "DEVICES", {"cuda": "no-such-device", "neuron": "no-such-device"})
    monkeypatch.setattr(deployments, "_profile_starts_here", deployments._profile_starts_here.__wrapped__)
    monkeypatch.setattr(deployments.resolve, "load", cache(deployments.resolve.load))
    accelerators = deployments._slurm_accelerators.__wrapped__

    def with_nodes(text: str) -> None:
        for name in ("sbatch", "sinfo"):
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\necho '{text}'\n")
            program.chmod(0o755)
        found = accelerators()
        monkeypatch.setattr(deployments, "_slurm_accelerators", lambda: found)

    return with_nodes


def test_deployments_are_of_the_profiles_that_can_start_here(machine):
    """Those on this machine's CPU, and those whose accelerators Slurm names; others if all are wanted."""

    def names(**wanted) -> set[str]:
        return {each["name"] for each in listed(CHECKOUT, **wanted)}

    profiles = {each["name"] for each in listed(CHECKOUT) if "profile" in each.get("parameters", {})}
    assert profiles == {"tiny", "tiny-moe", "tiny-sft", "tiny-lora", "tiny-dpo"}
    here, every = names(), names(every=True)
    assert {"fleet", "chain", "evaluate"} < here
    of_gpus = {name for name in every if name.endswith(("-h100", "-h200"))}
    of_trainium = every - here - of_gpus
    assert {"llama3-70b", "llama3-8b-chain"} < of_trainium
    for nodes, expected in (
        ("gpu:H100:8 static,p5.48xlarge", here | {name for name in of_gpus if name.endswith("-h100")}),
        ("(null) dynamic,trn2.48xlarge,queue1", here | of_trainium),
        ("(null) (null)", every),
    ):
        machine(nodes)
        assert names() == expected
