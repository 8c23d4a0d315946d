"""Shared Prefect server (PostgreSQL, password, CSRF): no secret in stores, logs or the database."""

import os
import pwd
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path

import pytest

from tests.flows.micro import settings
from tests.ports import free_port
from tests.slurm.cluster import WITH_PARENT
from tests.waiting import until

PASSWORD = "team:planted-password-3f9c"
DATABASE_PASSWORD = "planted-of-the-database-52ee"
TOKENS = {
    "HF_TOKEN": "hf_planted-token-71ab",
    "PREFECT_API_AUTH_STRING": PASSWORD,
    "AWS_SECRET_ACCESS_KEY": "planted-key-c0de",
}
SLURM = (
    *("cluster.launcher=slurm", "cluster.exclusive=false", "cluster.nodes=1"),
    *("train.steps=4", "checkpoint.every=2", "evaluate.every=0"),
)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """URL of an empty PostgreSQL database, set up as in docs/operating/prefect.md, and a query function."""
    programs = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
    if programs is None or os.geteuid() != 0:
        pytest.skip("needs Debian's postgresql, and root to start it as another user")
    try:
        user = pwd.getpwnam("postgres").pw_name
    except KeyError:
        pytest.skip("there is no user postgres")
    folder = Path("/tmp") / f"trainshed-postgresql-{os.getpid()}"
    folder.mkdir()
    shutil.chown(folder, user)

    number = free_port()

    def run(program: str, *arguments: str, typed: str | None = None) -> None:
        """Run as user postgres, whom Debian admits by socket; prompts read `typed`, as there is no terminal."""
        done = subprocess.run(
            [programs / program, *arguments],
            user=user,
            group=user,
            extra_groups=[],
            cwd="/",
            env={"PGHOST": str(folder), "PGPORT": str(number)},
            input=typed,
            text=True,
            capture_output=True,
            start_new_session=True,
        )
        assert done.returncode == 0, done.stderr

    # Like Debian's pg_hba.conf: the system user through the socket, a password over loopback.
    run("initdb", "-D", f"{folder}/data", "--auth-local=peer", "--auth-host=scram-sha-256")
    server = subprocess.Popen(
        [
            *(*WITH_PARENT, programs / "postgres", "-D", f"{folder}/data"),
            *("-h", "127.0.0.1", "-p", str(number), "-k", str(folder)),
        ],
        user=user,
        group=user,
        extra_groups=[],
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ready = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(number)]
        until(lambda: subprocess.run(ready, capture_output=True).returncode == 0)
        run("createuser", "--pwprompt", "prefect", typed=f"{DATABASE_PASSWORD}\n{DATABASE_PASSWORD}\n")
        run("createdb", "--owner", "prefect", "prefect")
        run("psql", "-d", "prefect", "-c", "CREATE EXTENSION pg_trgm")
        location = f"127.0.0.1:{number}/prefect"

        def query(statement: str, password: str = DATABASE_PASSWORD) -> list[str]:
            address = f"postgresql://prefect:{password}@{location}"
            command = [programs / "psql", "-d", address, "-Atc", statement]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return done.stdout.split()

        yield f"postgresql+asyncpg://prefect:{DATABASE_PASSWORD}@{location}", query
    finally:
        server.terminate()
        server.wait(timeout=180)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def team_server(database, tmp_path_factory):
    """API address of a Prefect server with that database, started as in docs/operating/prefect.md."""
    number = free_port()
    log = tmp_path_factory.mktemp("server") / "server.log"
    environment = {
        **os.environ,
        "PREFECT_API_DATABASE_CONNECTION_URL": database[0],
        "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "true",
        "PREFECT_EVENTS_RETENTION_PERIOD": "P7D",
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            [
                *(*WITH_PARENT, sys.executable, "-m", "prefect", "server", "start"),
                *("--host", "127.0.0.1", "--port", str(number)),
            ],
            env=environment,
            stdout=output,
            stderr=output,
        )
    api = f"http://127.0.0.1:{number}/api"
    try:
        until(lambda: server.poll() is not None or ask(f"{api}/admin/version", PASSWORD), every=0.2)
        assert server.poll() is None, log.read_text()
        yield api
    finally:
        server.terminate()
        server.wait(timeout=180)


def ask(address: str, password: str | None = None, body: bytes | None = None) -> int | None:
    """HTTP status of the response; None without a response."""
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    if password:
        request.add_header("Authorization", f"Basic {b64encode(password.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, ConnectionError):
        return None


def test_cluster_run_reports_to_a_shared_server_and_leaks_no_secret(
    team_server, database, cluster, command, profile, tmp_path
):
    assert ask(f"{team_server}/admin/version") == 401
    assert ask(f"{team_server}/admin/version", "team:wrong") == 401
    assert ask(f"{team_server}/flows/", PASSWORD, b'{"name": "forged"}') == 403  # without a CSRF token

    ran = command("run", str(profile), *settings(*SLURM), PREFECT_API_URL=team_server, **TOKENS)
    code, out, err = ran.result()
    assert code == 0, err
    assert database[1]("SELECT name, state_type FROM flow_run") == ["micro|COMPLETED"]
    with pytest.raises(subprocess.CalledProcessError):
        database[1]("SELECT 1", password="wrong")

    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert {"train.sbatch", "train.log", "micro.log", "profile.yaml", "report.html"} <= {
        path.name for path in files
    }
    for secret in ("planted-password-3f9c", DATABASE_PASSWORD, "planted-token-71ab", "planted-key-c0de"):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
        assert secret not in out + err
        assert database[1](f"SELECT count(*) FROM log WHERE message LIKE '%{secret}%'") == ["0"]
