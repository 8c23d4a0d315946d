"""Registration of deployments on a server that may have them already."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from flows.cli import deployments
from flows.cli.deployments import count_unregistered, deploy, listed, named, query
from flows.registration import register_pool


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
    with monkeypatch.context() as patch:  # registering takes seconds; here only whether it is started matters
        started = []
        patch.setattr(deployments, "_run", lambda *arguments: started.append(arguments) or 0)
        for changed in (
            {"concurrency_limit": 2},
            {"concurrency_options": {"collision_strategy": "CANCEL_NEW"}},
        ):
            query(address, changed, "PATCH")
            assert deploy(home, prefect_server, log, settings) == 0
        assert len(started) == 2
        assert deploy(home, prefect_server, log, settings) == 0
        assert len(started) == 2
    query(address, {}, "DELETE")
    assert registers()
    file = home / "prefect.yaml"
    file.write_text(file.read_text().replace("first", "second"))
    assert registers()
    assert not registers()


def test_a_server_too_busy_for_the_digest_has_the_deployments_registered(home, monkeypatch):
    def time_out(*_):
        raise TimeoutError("timed out")

    def start(module, log_file, **_):
        started.append(module)
        return subprocess.Popen([sys.executable, "-c", ""])

    started = []
    monkeypatch.setattr(deployments, "query", time_out)
    monkeypatch.setattr(deployments, "start_module", start)
    assert deploy(home, "http://127.0.0.1:4200/api", home / "deploy.log", {}) == 0
    (command,) = started
    assert command[:4] == ["prefect", "--no-prompt", "deploy", "--all"]
    assert yaml.safe_load(Path(command[-1]).read_text())["deployments"][0]["name"] == "only"


def test_deployments_are_of_the_profiles_that_can_start_here(monkeypatch):
    """Without sbatch and accelerators, those on this machine's CPU; others only if all are wanted."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(deployments, "DEVICES", {"cuda": "no-such-device", "neuron": "no-such-device"})
    monkeypatch.setattr(deployments, "_profile_starts_here", deployments._profile_starts_here.__wrapped__)
    checkout = Path(__file__).parents[3]
    found = [each for each in listed(checkout) if "profile" in each.get("parameters", {})]
    assert {each["name"] for each in found} == {"tiny", "tiny-moe", "tiny-sft", "tiny-lora", "tiny-dpo"}
    assert {"fleet", "chain", "evaluate"} < {each["name"] for each in listed(checkout)}
    assert "llama3-8b-chain" not in {each["name"] for each in listed(checkout)}
    assert "llama3-70b" in {each["name"] for each in listed(checkout, every=True)}
