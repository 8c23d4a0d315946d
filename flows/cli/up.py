"""`trainshed up`: a Prefect server, a worker and every deployment of prefect.yaml on this machine, until Ctrl-C.

Everything listens on loopback. Each child has a session of its own, so that Ctrl-C reaches this process alone, which
then ends them in order: the flow runs (so that their training saves and stops), the worker, the server. A second Ctrl-C
ends all of it at once. Beside a Prefect server that is there already, only what it lacks is added.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml

from flows.cli.temporary_server import START_TIMEOUT
from flows.prefect_settings import AUTOMATION, POOL, SETTINGS
from flows.ui.console import say

GRACE = 60.0  # seconds for flow runs to stop their training, which saves a checkpoint first
WORKER_SECONDS = 60.0  # that a worker may take to report, after a start or when the machine is busy
SERVER, WORKER = "a server", "a worker that is online"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def up(port: int) -> int:
    """Start everything, print where the UI is, wait; returns the exit code."""
    home = Path(__file__).parents[2]
    if not (home / "prefect.yaml").exists():
        say(
            f"trainshed: {home} has no prefect.yaml; `up` needs a checkout of Trainshed, installed with `pip install -e`"
        )
        return 1
    address = f"http://127.0.0.1:{port}"
    lacking = [SERVER, WORKER]
    if _taken(port):
        found = _lacking(f"{address}/api", home)
        if found is None:
            say(f"trainshed: port {port} is taken, perhaps by another `trainshed up`; choose one with --port")
            return 1
        if not found:
            say(f"Prefect's UI: {address}\nit is up already, and was left as it is")
            return 0
        say(f"there is a Prefect server already, without {', '.join(found)}: this is added")
        lacking = found
    for number in SIGNALS:  # also undoes an ignored SIGINT, which children would inherit
        signal.signal(number, _interrupt)
    logs = Path("store/logs")
    logs.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        **SETTINGS,
        "PREFECT_API_URL": f"{address}/api",
        "TRAINSHED_FOLDER": str(Path.cwd()),
    }
    children: list[subprocess.Popen[bytes]] = []
    try:
        if SERVER in lacking:
            server = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
            children.append(_python(server, environment, logs / "server.log"))
            if not _answers(f"{address}/api/health", children[0]):
                say(f"trainshed: the Prefect server did not start; its log: {logs / 'server.log'}")
                return 1
        for setup in (["flows.registration"], ["prefect", "--no-prompt", "deploy", "--all"]):
            if _python(setup, environment, logs / "deploy.log", home).wait() != 0:
                say(f"trainshed: `python -m {' '.join(setup)}` failed; its log: {logs / 'deploy.log'}")
                return 1
        if WORKER in lacking:
            worker = ["prefect", "worker", "start", "--pool", POOL]
            children.append(_python(worker, environment, logs / "worker.log"))
        say(f"Prefect's UI: {address}\nstart a run there, or in another terminal:")
        say(f"  PREFECT_API_URL={address}/api .venv/bin/prefect deployment run pretrain/tiny")
        if not children:
            return 0
        say("Ctrl-C stops all of it." if SERVER in lacking else "Ctrl-C stops the worker, not the server.")
        while all(child.poll() is None for child in children):
            time.sleep(0.5)
        say(f"trainshed: the server or the worker ended by itself; the logs: {logs}")
        return 1
    except KeyboardInterrupt:
        say("stopping; another Ctrl-C ends all of it at once")
        return 0
    finally:
        _stop(children)


def _lacking(api: str, home: Path) -> list[str] | None:
    """What the Prefect server at this address has not of what runs need, in words; None: none answers there."""
    try:
        deployments = yaml.safe_load((home / "prefect.yaml").read_text())["deployments"]
        pool = _asked(f"{api}/work_pools/filter", {"work_pools": _named(POOL)})
        automation = _asked(f"{api}/automations/filter", {"automations": _named(AUTOMATION)})
        registered = _asked(f"{api}/deployments/filter", {"work_pools": _named(POOL)})
        known = {(each["entrypoint"], each["name"]) for each in registered}
        missing = sum((each["entrypoint"], each["name"]) not in known for each in deployments)
        lacking = [] if pool else [f"the work pool {POOL}"]
        lacking += [] if automation else ["the automation for runs that died"]
        lacking += [f"{missing} of {len(deployments)} deployments"] if missing else []
        return lacking if pool and _has_worker(api) else [*lacking, WORKER]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_worker(api: str) -> bool:
    """Whether the pool's worker is online; it is waited for, since another `trainshed up` may just have started it."""
    workers = f"{api}/work_pools/{POOL}/workers/filter"
    begun, told = time.monotonic(), False
    while not any(worker["status"] == "ONLINE" for worker in _asked(workers, {})):
        waited = time.monotonic() - begun
        if waited > WORKER_SECONDS:
            return False
        if waited > 2 and not told:
            told = True
            say("there is a Prefect server already; waiting for its worker to report")
        time.sleep(0.5)
    return True


def _named(name: str) -> dict[str, Any]:
    return {"name": {"any_": [name]}}


def _asked(address: str, only: dict[str, Any]) -> Any:
    """What Prefect's API has of a kind. Raises OSError or ValueError where something else answers."""
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(only).encode(), header, method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def _python(
    arguments: list[str], environment: dict[str, str], log_file: Path, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    with log_file.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )


def _answers(address: str, server: subprocess.Popen[bytes]) -> bool:
    """Whether it says that it is well, before this server ends or has taken too long."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return True
        time.sleep(0.1)
    return False


def _stop(children: list[subprocess.Popen[bytes]]) -> None:
    """End the newest first, each after what it started: a flow run that is told first can still report its end.

    What has not ended then, or when a second signal comes, is killed.
    """
    families = _families(children)
    try:
        for child in reversed(children):
            with contextlib.suppress(psutil.NoSuchProcess):
                started = psutil.Process(child.pid).children()
                for process in started:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.terminate()
                psutil.wait_procs(started, timeout=GRACE)
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=GRACE)
    except KeyboardInterrupt:
        say("stopping at once")
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        for process in families | _families(children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # does nothing to another process that has its number by now
        for child in children:
            child.wait()


def _families(children: list[subprocess.Popen[bytes]]) -> set[psutil.Process]:
    """These and all that they started, whichever session it is in."""
    found = set()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(child.pid)
            found |= {process, *process.children(recursive=True)}
    return found


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
