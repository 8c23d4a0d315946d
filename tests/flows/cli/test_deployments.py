"""Registration of deployments on a server that may have them already."""

import argparse
import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import yaml
from prefect.automations import Automation
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import registration
from flows.cli import deployments
from flows.cli.deployments import count_unregistered, listed, named, query
from flows.cli.main import main
from flows.server.deployments import register
from flows.server.prefect_settings import AUTOMATION

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture
def home(tmp_path):
    """A checkout with one deployment."""
    deployment = {
        "name": "only",
        "entrypoint": "trainshed.fleet",
        "work_pool": {"name": "trainshed", "job_variables": {"env": {"TZ": "{{ $TIMEZONE }}"}}},
        "tags": ["first"],
        "concurrency_limit": {"limit": 1, "collision_strategy": "ENQUEUE"},
        "schedules": [
            {"interval": 300, "active": False},
            {"cron": "30 2 * * *", "timezone": "Europe/Berlin"},
        ],
    }
    file = tmp_path / "prefect.yaml"
    pull = [{"trainshed.record_folder": {"directory": "{{ $TRAINSHED_FOLDER }}"}}]
    file.write_text(yaml.safe_dump({"deployments": [deployment], "pull": pull}))
    return tmp_path


@pytest.fixture
def registrations(prefect_server, monkeypatch):
    """The modules that were started, which are run in this process, to import nothing again."""
    monkeypatch.setenv("TRAINSHED_FOLDER", "/fsx")
    monkeypatch.setenv("TIMEZONE", "UTC")
    found = []

    def run(module, home, log_file, settings, total=0):
        found.append(module)
        assert module[0] == "flows.registration"
        return registration.main(module[1:])

    monkeypatch.setattr(deployments, "_run", run)
    yield found
    Automation.read(name=AUTOMATION).delete()
    for each in query(f"{prefect_server}/deployments/filter", {"deployments": named("only")}):
        query(f"{prefect_server}/deployments/{each['id']}", {}, "DELETE")


def deploy(home: Path, api: str, evaluate: list[str] | None = None) -> int:
    options = argparse.Namespace(alerts=None, all=False, evaluate=evaluate)
    return deployments.register(options, home, api, home / "deploy.log", {})


@pytest.mark.slow
def test_deployments_are_registered_again_only_if_they_or_the_servers_have_changed(
    prefect_server, home, registrations
):
    def registers() -> bool:
        assert deploy(home, prefect_server) == 0
        assert count_unregistered(prefect_server, home) == 0
        return "--deployments" in registrations[-1]

    def registered() -> dict:
        (found,) = query(f"{prefect_server}/deployments/filter", {"deployments": named("only")})
        return found

    assert registers()
    assert not registers()
    first = registered()
    assert first["job_variables"] == {"env": {"TZ": "UTC"}}
    assert first["pull_steps"] == [{"trainshed.record_folder": {"directory": "/fsx"}}]
    assert first["parameter_openapi_schema"]["properties"].keys() == {"store", "work_dir"}
    assert first["enforce_parameter_schema"]
    assert "all runs" in first["description"]

    # What a user changes in the UI and prefect.yaml does not mention is kept; the rest is restored.
    address = f"{prefect_server}/deployments/{first['id']}"
    every_five_minutes, nightly = sorted(first["schedules"], key=lambda each: "cron" in each["schedule"])
    query(f"{address}/schedules/{every_five_minutes['id']}", {"active": True}, "PATCH")
    query(address, {"paused": True}, "PATCH")
    assert not registers()
    file = home / "prefect.yaml"
    for change in (
        lambda: query(address, {"concurrency_limit": 2}, "PATCH"),
        lambda: query(address, {"concurrency_options": {"collision_strategy": "CANCEL_NEW"}}, "PATCH"),
        lambda: file.write_text(file.read_text().replace("first", "second")),
    ):
        change()
        assert registers()
    now = registered()
    assert now["global_concurrency_limit"]["limit"] == 1
    assert now["concurrency_options"] == first["concurrency_options"]
    assert now["tags"] == ["second"]
    assert now["paused"]
    assert {each["id"]: each["active"] for each in now["schedules"]} == {
        every_five_minutes["id"]: True,
        nightly["id"]: True,
    }
    query(address, {}, "DELETE")
    with ThreadPoolExecutor() as pool:  # two `trainshed up` on one port
        [*pool.map(lambda _: asyncio.run(register(home / "deployments.yaml")), range(2))]
    assert registered()["tags"] == ["second"]
    file.write_text(file.read_text().replace("30 2", "45 3"))
    assert registers()
    times = [each["schedule"].get("cron") for each in registered()["schedules"]]
    assert sorted(times, key=str) == ["45 3 * * *", None]


@pytest.mark.slow
def test_deployments_that_the_server_or_python_rejects_are_named(prefect_server, home, registrations, capsys):
    file = home / "prefect.yaml"
    described = yaml.safe_load(file.read_text())
    (only,) = described["deployments"]
    for change, says in (
        ({"entrypoint": "trainshed.flee"}, "only.entrypoint = trainshed.flee: names no flow that can be"),
        ({"entrypoint": "flows.flee.fleet"}, "only.entrypoint = flows.flee.fleet: names no flow that can be"),
        ({"entrypoint": "flows.fleet.PAGE"}, "only.entrypoint = flows.fleet.PAGE: names no flow that can be"),
        (
            {"work_pool": {"name": "missing"}},
            "only: was rejected by the Prefect server; change it in prefect.yaml: Work",
        ),
        ({"schedules": [{"interval": "often"}]}, "only: is invalid; change it in prefect.yaml: "),
        ({"schedules": [{"interval": 60, "until": 3}]}, "only: is invalid; change it in prefect.yaml: "),
    ):
        file.write_text(yaml.safe_dump({**described, "deployments": [only | change]}))
        assert deploy(home, prefect_server) == 2
        assert f"deployments.{says}" in capsys.readouterr().err.splitlines()[-1]


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
    """A user's deployment that only Prefect understands is left to it, before what may need it."""

    def time_out(*_):
        raise TimeoutError("timed out")

    monkeypatch.setattr(deployments, "query", time_out)
    described = yaml.safe_load((home / "prefect.yaml").read_text())
    (only,) = described["deployments"]
    described["deployments"].append({**only, "name": "triggered", "triggers": [{"enabled": True}]})
    (home / "prefect.yaml").write_text(yaml.safe_dump(described))
    assert deploy(home, "http://127.0.0.1:4200/api", ["endings"]) == 0
    (ours, _), (prefects, _), (evaluation, _) = started
    assert evaluation == ["flows.registration", "--evaluate", "endings"]
    assert ours[:2] == ["flows.registration", "--deployments"]
    assert prefects[:4] == ["prefect", "--no-prompt", "deploy", "--all"]
    for command, name in ((ours, "only"), (prefects, "triggered")):
        assert [each["name"] for each in yaml.safe_load(Path(command[-1]).read_text())["deployments"]] == [
            name
        ]


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
    ((command, log),) = started
    assert command[:3] == ["flows.registration", "--evaluate", "hellaswag"]
    assert not log.parent.exists()


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
