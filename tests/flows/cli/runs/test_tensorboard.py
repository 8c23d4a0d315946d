"""`trainshed tensorboard`: a page on loopback with the run's metrics, until Ctrl-C."""

import ipaddress
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from urllib.parse import unquote

import psutil
import pytest

from flows.cli.main import main
from modeling.training.metrics import MetricsWriter
from tests.ports import free_port
from tests.waiting import until

ROW = {
    "loss": 5.0,
    "learning_rate": 1e-3,
    "gradient_norm": 0.5,
    "parameter_norm": 9.0,
    "tokens_per_second": 4096.0,
    "mfu": 0.31,
    "step_seconds": 0.5,
    "data_wait_seconds": 0.01,
    "forward_backward_seconds": 0.3,
    "optimizer_seconds": 0.1,
    "communication_seconds": 0.05,
    "memory_bytes": 1 << 30,
    "consumed_samples": 8,
    "consumed_tokens": 2048,
}
SHOWN = {
    *("loss/loss", "loss/validation_loss"),
    *("optimizer/learning_rate", "optimizer/gradient_norm", "optimizer/parameter_norm"),
    *("speed/tokens_per_second", "speed/mfu"),
    *("time/step_seconds", "time/data_wait_seconds", "time/forward_backward_seconds"),
    *("time/optimizer_seconds", "time/communication_seconds", "memory/memory_bytes"),
    *("consumed/consumed_samples", "consumed/consumed_tokens"),
}


@pytest.fixture
def run(tmp_path):
    """The folder of a run of three steps, in the store of the command's folder."""
    folder = tmp_path / "store/runs/first"
    folder.mkdir(parents=True)
    (folder / "profile.yaml").write_text("name: first\n")
    metrics = MetricsWriter(folder, step=0, total_steps=3)
    for step in (1, 2, 3):
        metrics.write({"step": step, **ROW, "loss": 6.0 - step})
    metrics.write({"step": 3, "validation_loss": 3.5})
    metrics.close()
    return folder


@pytest.fixture
def port():
    return free_port()


def wait_for(address: str) -> str:
    """The response of an address, once it has content."""

    def content() -> str | None:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                text = answer.read().decode()
        except (urllib.error.URLError, ConnectionError):
            return None
        return None if text == "{}" else text

    return until(content)


@pytest.mark.parametrize("named", [["first"], ["./store/runs/first"], []])
def test_all_metrics_are_served_until_ctrl_c(command, run, port, named):
    started = command("tensorboard", *named, "--port", str(port))
    address = f"http://127.0.0.1:{port}"
    assert "<title>TensorBoard" in wait_for(address)
    ((name, tags),) = json.loads(wait_for(f"{address}/data/plugin/scalars/tags")).items()
    assert (name, set(tags)) == ("first", SHOWN)
    query = f"run={name}&tag=loss/loss"
    points = json.loads(wait_for(f"{address}/data/plugin/scalars/scalars?{query}"))
    assert [(step, value) for _, step, value in points] == [(1, 5.0), (2, 4.0), (3, 3.0)]
    listening = {
        ipaddress.ip_address(each.laddr.ip).is_loopback
        for process in started.processes()
        for each in psutil.Process(process.pid).net_connections()
        if each.status == psutil.CONN_LISTEN
    }
    assert listening == {True}
    os.killpg(started.process.pid, signal.SIGINT)  # as a terminal does it
    code, out, err = started.result(timeout=30)
    assert (code, out) == (0, "")
    opens, *others = err.splitlines()
    assert opens.startswith(f"TensorBoard: {address}/?pinnedCards=")
    assert json.loads(unquote(opens.partition("=")[2]))[0] == {"plugin": "scalars", "tag": "loss/loss"}
    assert others == ["Ctrl-C stops it", "stopping"]
    assert started.left_behind() == []


def test_unknown_run_is_rejected_with_existing_names(run, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["tensorboard", "frist"]) == 2
    assert capsys.readouterr().err == (
        f"trainshed: run = frist: no such run in {tmp_path}/store/runs; `trainshed runs` lists them; "
        "nearest valid: first\n"
    )


def test_store_without_runs_is_rejected(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    assert main(["tensorboard"]) == 2
    assert f"there are no runs in {tmp_path}/store/runs" in capsys.readouterr().err


def test_taken_port_is_reported(command, run, port):
    with socket.create_server(("127.0.0.1", port)):
        code, _, err = command("tensorboard", "first", "--port", str(port)).result(timeout=60)
    assert code == 1
    assert err == f"trainshed: port {port} is taken, perhaps by another TensorBoard; choose one with --port\n"
