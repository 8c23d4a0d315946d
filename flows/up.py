"""`trainshed up`: a Prefect server, a worker and every deployment of prefect.yaml on this machine, until Ctrl-C.

Everything listens on loopback. Each child has a session of its own, so that Ctrl-C reaches this process alone, which
then ends them in order: the flow runs (so that their training saves and stops), the worker, the server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType

import psutil

from flows.console import say
from flows.server import SETTINGS, START_TIMEOUT

POOL = "trainshed"
GRACE = 60.0  # seconds for flow runs to stop their training, which saves a checkpoint first


def up(port: int) -> int:
    """Start everything, print where the UI is, wait; returns the exit code."""
    home = Path(__file__).parents[1]
    if not (home / "prefect.yaml").exists():
        say(
            f"trainshed: {home} has no prefect.yaml; `up` needs a checkout of Trainshed, installed with `pip install -e`"
        )
        return 1
    if _taken(port):
        if _answers(f"http://127.0.0.1:{port}/api/health", seconds=5):
            say(f"Prefect's UI: http://127.0.0.1:{port}\nit is up already, and was left as it is")
            return 0
        say(f"trainshed: port {port} is taken, perhaps by another `trainshed up`; choose one with --port")
        return 1
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # also undoes an ignored SIGINT, which children would inherit
        signal.signal(number, _interrupt)
    logs = Path("store/logs")
    logs.mkdir(parents=True, exist_ok=True)
    address = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        **SETTINGS,
        "PREFECT_API_URL": f"{address}/api",
        "TRAINSHED_FOLDER": str(Path.cwd()),
    }
    children: list[subprocess.Popen[bytes]] = []
    try:
        server = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        children.append(_python(server, environment, logs / "server.log"))
        if not _answers(f"{address}/api/health", server=children[0]):
            say(f"trainshed: the Prefect server did not start; its log: {logs / 'server.log'}")
            return 1
        for setup in (["flows.registration"], ["prefect", "--no-prompt", "deploy", "--all"]):
            if _python(setup, environment, logs / "deploy.log", home).wait() != 0:
                say(f"trainshed: `python -m {' '.join(setup)}` failed; its log: {logs / 'deploy.log'}")
                return 1
        worker = ["prefect", "worker", "start", "--pool", POOL]
        children.append(_python(worker, environment, logs / "worker.log"))
        say(f"Prefect's UI: {address}\nstart a run there, or in another terminal:")
        say(
            f"  PREFECT_API_URL={address}/api .venv/bin/prefect deployment run pretrain/tiny\nCtrl-C stops all of it."
        )
        while all(child.poll() is None for child in children):
            time.sleep(0.5)
        say(f"trainshed: the server or the worker ended by itself; the logs: {logs}")
        return 1
    except KeyboardInterrupt:
        say("stopping")
        return 0
    finally:
        _stop(children)


def _python(
    arguments: list[str], environment: dict[str, str], log_file: Path, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    with log_file.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )


def _answers(
    address: str, seconds: float = START_TIMEOUT, server: subprocess.Popen[bytes] | None = None
) -> bool:
    """Whether it says that it is well, within so many seconds or before this server ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (server is None or server.poll() is None):
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(address, timeout=min(5, seconds)),
        ):
            return True
        time.sleep(0.1)
    return False


def _stop(children: list[subprocess.Popen[bytes]]) -> None:
    """End the newest first, each after what it started: a flow run that is told first can still report its end."""
    for child in reversed(children):
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(child.pid).children()
            for process in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
            psutil.wait_procs(started, timeout=GRACE)
        child.terminate()
        try:
            child.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
