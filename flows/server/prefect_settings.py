"""Prefect settings of clients and servers, and names of registered objects, flows, states and events."""

from __future__ import annotations

import base64
import contextlib
import getpass
import hashlib
import os
import secrets
import sys
import tempfile
from pathlib import Path

from profiles.files import file_locks, state_files
from profiles.files.retry_policies import SERVER

POOL = "trainshed"  # the work pool
ALERT_KINDS = {  # kinds of events, and when they are emitted (flows/alerts)
    "started": "a run begins",
    "checkpoint": "a checkpoint is complete",
    "spike": "steps are skipped because their loss is a spike, or their loss or gradient norm is not finite",
    "rollback": "training rolled back to a checkpoint after skipped steps",
    "not-saved": "a checkpoint could not be saved; again if no later one is complete for long",
    "corrupted-checkpoint": "a checkpoint was corrupted and moved to quarantine",
    "straggler": "a rank is slower than the others",
    "hang": "training hung and was stopped",
    "node-lost": "a job ended without an exit code: the cluster ended it, or its node failed",
    "resumed": "training resumed after a failure or a stop",
    "queued": "a job has not started for half an hour, or Slurm holds it",
    "finished": "a run has finished",
    "promoted": "continual pretraining promoted a model",
    "not-promoted": "continual pretraining trained a model that did not meet its gates",
    "failed": "a flow run failed, crashed or was rejected",
}
ALERTS = [f"Trainshed alert: {kind}" for kind in ALERT_KINDS]  # names of automations
EVENT = "trainshed.run."  # prefix of an event's name; the kind follows
RESOURCE = "trainshed.run."  # prefix of its resource's id; the run's name follows
AUTOMATION = "Runs without a heartbeat have crashed"
# Whose failures are alerts.
FLOWS = ("pretrain", "finetune", "continual", "evaluate", "ladder", "mixture", "share", "branches", "export")
STOPPED, REJECTED, GATE_MISSED = "Stopped", "Rejected", "GateMissed"  # final states (final_states.py)

HEARTBEAT_SECONDS = 30
# Of requests to an unreachable server. With Prefect's jitter, they take a fifth longer.
CLIENT_RETRIES = len(SERVER.delays)
# Without a heartbeat for this long, a run counts as crashed; longer than a run can wait for the server.
SILENCE_SECONDS = 360

PASSWORD = "PREFECT_API_AUTH_STRING"  # setting with the password that clients send
LOGIN = "/sign-in"  # page of a local server: its fragment is the password, which it stores for Prefect's UI
PRIVATE = 0o700  # permissions of a home, whose database has secrets

# Environment of servers and flow runs, read when Prefect is imported.
SETTINGS = {
    # Telemetry would delay the start without a network, and print a notice over the progress line.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLIENT_MAX_RETRIES": str(CLIENT_RETRIES),
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
}


def configure(store: Path) -> Path:
    """Set default Prefect settings in the environment, before Prefect is imported; returns Prefect's home.

    The home, with the database of a local server, is in the store's local folder, and each user has one there. If that file
    system has no file locks, which SQLite needs, too, it is in the user's state folder or in the folder for temporary files. A
    server that the user has configured in ~/.prefect is still used.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    give_name_and_home(store.absolute() / "prefect-home")
    if not os.environ.get("PREFECT_HOME"):
        profiles = Path(os.path.expanduser("~/.prefect/profiles.toml"))  # as it is for a user without a home
        if state_files.exists(profiles):
            os.environ.setdefault("PREFECT_PROFILES_PATH", str(profiles))
        os.environ["PREFECT_HOME"] = str(_with_locks(_private_home(store.absolute() / "prefect-home")))
    return Path(os.environ["PREFECT_HOME"]).expanduser()


def give_name_and_home(home: Path) -> None:
    """Set HOME and USER if the user has neither, as in containers.

    Prefect, torch and others need them.
    """
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = str(home)
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.geteuid())


def _with_locks(home: Path) -> Path:
    """The first of this home and two others outside the store whose file system has file locks.

    This home if none has.
    """
    name = f"trainshed-{os.geteuid()}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}"
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    for folder in (home, state / name, Path(tempfile.gettempdir()) / name):
        try:
            folder.mkdir(PRIVATE, parents=True, exist_ok=True)
            # Another user could have made the folder in /tmp, and would read the database.
            if folder.stat().st_uid == os.geteuid() and file_locks.supported(folder / "server.lock"):
                return folder
        except OSError:  # not writable; ServerLocks reports it
            if folder == home:
                break
    return home


def _private_home(home: Path) -> Path:
    """This home, made inaccessible to others; if it belongs to another user, one beside it."""
    with contextlib.suppress(OSError):  # does not exist yet, or its file system has no permissions
        status = home.stat()
        if status.st_uid != os.geteuid():
            return home.with_name(f"{home.name}-{os.geteuid()}")
        if status.st_mode & ~PRIVATE & 0o777:
            home.chmod(PRIVATE)
    return home


def cors_setting(port: int) -> dict[str, str]:
    """Setting of a server on loopback: browsers may call its API only from its own pages.

    A value in the environment takes precedence.
    """
    name = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
    return {name: os.environ.get(name, f"http://127.0.0.1:{port},http://localhost:{port}")}


def access_settings(home: Path) -> dict[str, str]:
    """Settings of the server of a home and of its clients: the API's password, and CSRF protection.

    The password is generated once, in a file that only this user can read, unless the user has set one. Call it with the home's
    lock held.
    """
    password = os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or os.environ.get(PASSWORD)
    if not password:
        path = home / "password"
        password = (state_files.read_text(path) or "").strip("\0 \n")
        if not password:
            password = f"trainshed:{secrets.token_urlsafe(24)}"
            state_files.write(path, password, private=True)
    return {
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        PASSWORD: password,
    }


def authorization() -> dict[str, str]:
    """Header of requests to Prefect's API, if its password is set in the environment."""
    password = os.environ.get(PASSWORD)
    return {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"} if password else {}


def single_certificate_setting(home: Path) -> dict[str, str]:
    """Setting that makes clients load one TLS certificate instead of all: faster, and enough for loopback.

    Every Prefect client loads certificates, needed or not, and deploying starts hundreds of clients.
    """
    path = home / "certificate.pem"
    if not state_files.exists(path):
        import certifi

        end = "-----END CERTIFICATE-----\n"
        first = Path(certifi.where()).read_text(encoding="utf-8").partition(end)[0]
        state_files.write(path, first + end)
    return {"PREFECT_API_SSL_CERT_FILE": str(path)}


def may_have_server_settings(home: Path) -> bool:
    """Whether Prefect settings of the user may name a server, without importing Prefect (takes a second)."""
    if "prefect" in sys.modules:  # reading them costs nothing
        return True
    files = (home / "profiles.toml", Path(".env"), Path("prefect.toml"))
    variables = ("PREFECT_API_URL", "PREFECT_PROFILES_PATH")
    if any(map(os.environ.get, variables)) or any(state_files.exists(file) for file in files):
        return True
    project = Path("pyproject.toml")
    return state_files.exists(project) and "tool.prefect" in project.read_text(errors="replace")
