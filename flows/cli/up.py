"""`trainshed up`: local Prefect server, worker and the deployments that can start here, until Ctrl-C.

Everything listens on loopback. Each child runs in its own session, so that Ctrl-C reaches only this process, which stops
them in order: flow runs (whose training saves a checkpoint), worker, server. A second Ctrl-C kills them. A server that exits is
started again, and the worker and its runs wait for it. If a Prefect server of this user is already running, only what it lacks
is added. Another user's is never used: each could run code as the other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import psutil

from flows.cli.deployments import (
    count_unregistered,
    listed,
    named,
    query,
    register,
    register_elsewhere,
    summary,
    working_folder,
)
from flows.cli.exit_codes import DONE, FAILED
from flows.server.locks import ServerLocks
from flows.server.prefect_settings import (
    AUTOMATION,
    LOGIN,
    PASSWORD,
    POOL,
    access_settings,
    configure,
    single_certificate_setting,
)
from flows.server.secrets import without_tokens
from flows.server.serve import UP
from flows.server.shared_server import SERVE, ProcessOptions, start_module, start_server, wait_healthy
from flows.ui.console import print_stderr, relative, waiting
from profiles.files import state_files

GRACE = 60.0  # seconds for the worker and the server to stop
WORKER_SECONDS = 60.0  # for a worker to report to the server
POLL = 0.5  # seconds between checks of the server and the worker
RESTARTS, RESTART_SECONDS = 3, 600.0  # a server that exits more often within this time is not started again
SERVER, WORKER = "a server", "an online worker"
LOOPBACK = ("127.0.0.1", "0.0.0.0", "::")  # addresses of listeners that are reached at 127.0.0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Profile of Prefect's commands, to be named in PREFECT_PROFILES_PATH.
CLIENT = """\
active = "trainshed"

[profiles.trainshed]
PREFECT_API_URL = "{api}"
PREFECT_API_AUTH_STRING = "{password}"
"""


def run(options: argparse.Namespace) -> int:
    """Start what is missing, print the UI's address and wait; returns the exit code."""
    home = Path(__file__).parents[2]
    if not state_files.exists(home / "prefect.yaml"):
        advice = "`up` needs a checkout, installed with `pip install -e`"
        print_stderr(f"trainshed: no prefect.yaml in {home}; {advice}")
        return FAILED
    if options.register:
        return register_elsewhere(options, home)
    port = options.port
    address = f"http://127.0.0.1:{port}"
    missing = [SERVER, WORKER]
    prefect_home, taken = configure(Path("store")), _is_taken(port)
    if taken:
        listener = _own_listener(port)
        if listener is None:
            print_stderr(f"trainshed: port {port} is taken by another user's server; choose one with --port")
            return FAILED
        its_home = _prefect_home(listener)
        if its_home and not its_home.is_relative_to(prefect_home):
            return _taken_by(port, its_home.parent)
    locks = ServerLocks(prefect_home)
    with locks.locked():
        os.environ |= access_settings(locks.home)
    if taken:
        found = _missing(f"{address}/api", home, every=options.all)
        if found is None:
            advice = "perhaps by another `trainshed up`; choose one with --port"
            print_stderr(f"trainshed: port {port} is taken, {advice}")
            return FAILED
        elsewhere = working_folder(f"{address}/api")
        if WORKER not in found and elsewhere not in (None, str(Path.cwd())):
            return _taken_by(port, Path(elsewhere) / "store")
        if not found and not options.alerts and options.evaluate is None:
            print_stderr(f"Prefect's UI: {_sign_in(address)}\nalready running; nothing was changed")
            return DONE
        missing = found
        lacks = f" without {', '.join(missing)}; adding them" if missing else "; changing its automations"
        print_stderr(f"a Prefect server is already running{lacks}")
    for number in SIGNALS:  # also resets an ignored SIGINT, which children would inherit
        signal.signal(number, signal.default_int_handler)
    return _Services(options, home, locks, missing).run()


class _Services:
    """The server and the worker that `up` starts, if they are missing."""

    def __init__(
        self, options: argparse.Namespace, home: Path, locks: ServerLocks, missing: Sequence[str]
    ) -> None:
        self.options, self.home, self.locks, self.missing = options, home, locks, missing
        self.port, self.address = options.port, f"http://127.0.0.1:{options.port}"
        self.logs = Path("store/logs")
        state_files.make_folder(self.logs)
        self.variables = {
            "PREFECT_API_URL": f"{self.address}/api",
            "TRAINSHED_FOLDER": str(Path.cwd()),
            "PREFECT_HOME": str(self.locks.home),
            **single_certificate_setting(self.locks.home),
        }
        self.settings: ProcessOptions = {
            "env": {**without_tokens(), **self.variables},
            "stdin": subprocess.DEVNULL,
        }
        self.server: subprocess.Popen[bytes] | None = None
        self.worker: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start what is missing and wait until it exits or the user interrupts; returns the exit code."""
        try:
            if SERVER in self.missing and not self._start_server():
                print_stderr(f"trainshed: the Prefect server did not start; log: {self.logs / 'server.log'}")
                return FAILED
            api, log_file = f"{self.address}/api", self.logs / "deploy.log"
            if code := register(self.options, self.home, api, log_file, self.settings):
                return code
            if WORKER in self.missing:
                worker = ["prefect", "worker", "start", "--pool", POOL]
                settings: ProcessOptions = {**self.settings, "env": {**os.environ, **self.variables}}
                self.worker = start_module(worker, self.logs / "worker.log", **settings)
            self._print_addresses()
            if not self._children():
                return DONE
            stops = "everything" if SERVER in self.missing else "the worker, not the server"
            print_stderr(f"Ctrl-C stops {stops}")
            print_stderr(f"trainshed: {self._keep_running()}")
            return FAILED
        except KeyboardInterrupt:
            print_stderr("stopping; press Ctrl-C again to kill all processes that this command started")
            return DONE
        finally:
            if SERVER in self.missing:
                with self.locks.locked():
                    self.locks.close(self.port)
            _stop(self._children(), lambda: self.server is not None and self.locks.is_used(self.port))

    def _children(self) -> list[subprocess.Popen[bytes]]:
        return [child for child in (self.server, self.worker) if child is not None]

    def _start_server(self) -> bool:
        """Start the server; returns whether it answers."""
        child = self.server = self._launch_server()
        if child is None:
            return False
        with waiting(lambda: "starting Prefect's server"):
            return wait_healthy(f"{self.address}/api", lambda: child.poll() is None)

    def _launch_server(self) -> subprocess.Popen[bytes] | None:
        """Start the server's process; None if another process has taken the port."""
        try:
            with self.locks.locked():
                return start_server(self.locks, UP, self.port, self.logs / "server.log")
        except OSError:
            return None

    def _keep_running(self) -> str:
        """Start the server again when it exits, until it or the worker has exited for good; returns why."""
        exits: list[float] = []
        while self.worker is None or self.worker.poll() is None:
            if self.server is not None and (code := self.server.poll()) is not None:
                now = time.monotonic()
                exits = [*(earlier for earlier in exits if now - earlier < RESTART_SECONDS), now]
                if len(exits) > RESTARTS:
                    often = f"exited {len(exits)} times within {RESTART_SECONDS / 60:.0f} minutes"
                    return f"the Prefect server {often}, with code {code}; log: {self.logs / 'server.log'}"
                self.server = self._launch_server()
                # Taken by a run that uses the server and was first, or by any other process.
                later = f"it starts again once port {self.port} is free"
                what = "started again" if self.server else later
                print_stderr(f"the Prefect server exited with code {code}; {what}")
            elif self.server is None and SERVER in self.missing:
                self.server = self._launch_server()
            time.sleep(POLL)
        return f"the worker exited with code {self.worker.returncode}; log: {self.logs / 'worker.log'}"

    def _print_addresses(self) -> None:
        client = self.locks.home / "client.toml"
        state_files.write(
            client, CLIENT.format(api=f"{self.address}/api", password=os.environ[PASSWORD]), private=True
        )
        print_stderr(f"Prefect's UI: {_sign_in(self.address)}\nstart `tiny` there: {_form(self.address)}")
        prefect = relative(str(Path(sys.executable).with_name("prefect")))
        print_stderr("or in another terminal:")
        start = f"{prefect} deployment run pretrain/tiny --flow-run-name tiny"
        print_stderr(f"  PREFECT_PROFILES_PATH={relative(str(client))} {start}")
        print_stderr(f"Prefect's database: {self.locks.home}")
        print_stderr(f"registered: {summary(self.home, every=self.options.all)}")


def _sign_in(address: str) -> str:
    """The UI's address, with the password only if a terminal shows it.

    Logs never contain the password.
    """
    return f"{address}{LOGIN}#{quote(os.environ[PASSWORD])}" if sys.stderr.isatty() else address


def _missing(api: str, home: Path, *, every: bool) -> list[str] | None:
    """What runs need but the Prefect server at this address lacks; None if none answers there."""
    try:
        pool = query(f"{api}/work_pools/filter", {"work_pools": named(POOL)})
        automation = query(f"{api}/automations/filter", {"automations": named(AUTOMATION)})
        unregistered = count_unregistered(api, home, every=every)
        total = len(listed(home, every=every))
        missing = [] if pool else [f"the work pool {POOL}"]
        missing += [] if automation else ["the automation for crashed runs"]
        missing += [f"{unregistered} of {total} deployments"] if unregistered else []
        return missing if pool and _has_online_worker(api) else [*missing, WORKER]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_online_worker(api: str) -> bool:
    """Whether the pool has an online worker; waits, as another `trainshed up` may have just started one."""
    workers = f"{api}/work_pools/{POOL}/workers/filter"
    started, announced = time.monotonic(), False
    while not any(worker["status"] == "ONLINE" for worker in query(workers, {})):
        waited = time.monotonic() - started
        if waited > WORKER_SECONDS:
            return False
        if waited > 2 and not announced:
            announced = True
            print_stderr("a Prefect server is already running; waiting for its worker")
        time.sleep(0.5)
    return True


def _form(address: str) -> str:
    """Address of the form that starts `tiny`, which is far down in Prefect's list; else of the list."""
    with contextlib.suppress(OSError, ValueError):
        deployment = query(f"{address}/api/deployments/name/pretrain/tiny", {}, "GET")
        return f"{address}/deployments/deployment/{deployment['id']}/run"
    return f"{address}/deployments"


def _stop(children: Sequence[subprocess.Popen[bytes]], is_used: Callable[[], bool]) -> None:
    """Terminate the children, latest first, each after its subprocesses, so flow runs report their end.

    Flow runs take as long as saving takes (cluster.grace). The first child, the server, is stopped once no other command uses it.
    After GRACE for a child, or at a second signal, the rest is killed.
    """
    processes = _process_trees(children)
    try:
        for child in reversed(children):
            if child is children[0] and is_used():
                print_stderr("waiting for the commands that use the server")
                while is_used():
                    time.sleep(0.5)
            with contextlib.suppress(psutil.NoSuchProcess):
                subprocesses = psutil.Process(child.pid).children()
                for process in subprocesses:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.terminate()
                while psutil.wait_procs(subprocesses, timeout=GRACE)[1]:
                    print_stderr("waiting for flow runs to save and stop; press Ctrl-C again to kill them")
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=GRACE)
    except KeyboardInterrupt:
        print_stderr("killing all processes that this command started")
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        for process in processes | _process_trees(children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # psutil checks that the pid was not reused
        for child in children:
            child.wait()


def _process_trees(children: Sequence[subprocess.Popen[bytes]]) -> set[psutil.Process]:
    """The children and all their descendants, whatever session they are in."""
    found = set()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(child.pid)
            found |= {process, *process.children(recursive=True)}
    return found


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _own_listener(port: int) -> psutil.Process | None:
    """A process of this user that listens on the port; None if it cannot be determined."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or cannot be read
            if process.uids().effective == os.geteuid() and any(
                each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.laddr.ip in LOOPBACK
                for each in process.net_connections("tcp")
            ):
                return process
    return None


def _prefect_home(server: psutil.Process) -> Path | None:
    """The home of a local server, whose password this command may not know; None for other processes."""
    with contextlib.suppress(psutil.Error):
        if SERVE in server.cmdline():
            return Path(server.environ()["PREFECT_HOME"])
    return None


def _taken_by(port: int, store: Path) -> int:
    """Print that another store's server has the port; returns the exit code."""
    whose = f"the Prefect server of another store, {store}, where runs started from it are kept"
    advice = "to start one for this folder, choose another port with --port"
    print_stderr(f"trainshed: port {port} is taken by {whose}; {advice}")
    return FAILED
