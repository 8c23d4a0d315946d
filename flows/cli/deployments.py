"""Deployments on a Prefect server: what it lacks, and their registration.

They are those of prefect.yaml, and one for each shipped profile.

Those whose profiles can start from this machine are registered, or with --all all, in about 10 s, most of it to import the flows.
The server keeps a digest of what they were made from, and of the result, in a variable, so that they are registered again only
after a change, or if they were changed or removed there. A digest that the server does not return or store in time only costs
another registration.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from flows.cli.exit_codes import DONE, FAILED, REJECTED
from flows.server.outages import await_start
from flows.server.prefect_settings import PASSWORD, POOL, SETTINGS, authorization
from flows.server.secrets import without_tokens
from flows.server.shared_server import ProcessOptions, start_module
from flows.ui.console import print_stderr, waiting
from flows.ui.summaries import cluster_summary
from profiles import resolve
from profiles.errors import ProfileError
from profiles.files import folders, state_files
from profiles.files.retry_policies import SERVER_BUSY
from profiles.rules.cluster import ACCELERATORS
from profiles.schema import Profile

VARIABLE = "trainshed_deployments"
# What deployments are made from: their definitions, and the flows and names of profiles, from which Prefect makes their forms.
SOURCES = ("prefect.yaml", "flows/**/*.py", "profiles/**/*.py", "profiles/**/*.y*ml")
# Those of a registered deployment that prefect.yaml or the flow decides; its limit of concurrent runs is nested, see `_digest`.
# Schedules are left out on purpose: a user activates them in the UI, which must not register everything again.
FIELDS = (
    "concurrency_options",
    "entrypoint",
    "name",
    "description",
    "tags",
    "parameters",
    "parameter_openapi_schema",
    "pull_steps",
    "job_variables",
)
RECORDS = (
    "trainshed.record_folder",
    "flows.working_folder.record",
)  # the pull step, and that of earlier versions
# Keys of a deployment of the user's own that only `prefect deploy` understands.
FOR_PREFECT = {"build", "push", "schedule", "sla", "triggers", "version_type"}
DEVICES = {"cuda": "nvidia[0-9]*", "neuron": "neuron[0-9]*"}  # of device types, in /dev
# What Slurm says about the nodes: their devices, such as gpu:h100:8, and features, such as the name of a cloud's instance type.
NODES = ("sinfo", "--noheader", "--format=%G %f")
NODES_SECONDS = 10.0
PAGE = 200  # the most deployments that the server returns at a time
FORBIDDEN, NOT_FOUND, UNAVAILABLE = 403, 404, 503
CSRF_TOKEN = "Prefect-Csrf-Token"


def register(
    options: argparse.Namespace, home: Path, api: str, log_file: Path, settings: ProcessOptions
) -> int:
    """Register work pool, automations and deployments; returns the exit code.

    Deployments that the server has unchanged are left out.
    """
    wanted = listed(home, every=options.all)
    folder = settings.get("env", {}).get("TRAINSHED_FOLDER", str(Path.cwd()))
    command = ["flows.registration", *(["--alerts", options.alerts] if options.alerts else [])]
    evaluation = [] if options.evaluate is None else ["--evaluate", *options.evaluate]
    if _is_registered(api, home, wanted, folder):
        return _run([*command, *evaluation], home, log_file, settings)
    if code := _deploy(command, evaluation, home, wanted, log_file, settings):
        return code
    with contextlib.suppress(OSError, ValueError):
        _write_digest(api, _digest(home, api, wanted, folder))
    return DONE


def _is_registered(api: str, home: Path, wanted: Sequence[Mapping[str, Any]], folder: str) -> bool:
    """Whether the server has these deployments unchanged; False if it does not answer in time."""
    with contextlib.suppress(OSError, ValueError):
        variables = query(f"{api}/variables/filter", {"variables": named(VARIABLE)})
        return bool(variables) and variables[0]["value"] == _digest(home, api, wanted, folder)
    return False


def _deploy(
    registration: Sequence[str],
    evaluation: Sequence[str],
    home: Path,
    wanted: Sequence[Mapping[str, Any]],
    log_file: Path,
    settings: ProcessOptions,
) -> int:
    """Register these deployments and the rest, last what needs evaluate/evaluate; returns the exit code."""
    ours = [entry for entry in wanted if not entry.keys() & FOR_PREFECT]
    others = [entry for entry in wanted if entry.keys() & FOR_PREFECT]
    file = log_file.absolute().with_name("deployments.yaml")  # written by each `up`, with the same contents
    write_file(file, home, ours)
    command = [*registration, *([] if others else evaluation), "--deployments", str(file)]
    if code := _run(command, home, log_file, settings, len(ours)):
        return code
    if not others:
        return DONE
    file = file.with_name("deployments-of-prefect.yaml")
    write_file(file, home, others)
    command = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
    if (code := _run(command, home, log_file, settings)) or not evaluation:
        return code
    return _run([*registration, *evaluation], home, log_file, settings)


def register_elsewhere(options: argparse.Namespace, home: Path) -> int:
    """Register with the server that Prefect's settings name, quietly; returns the exit code."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with waiting(lambda: "loading Prefect"):
        from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

    api = PREFECT_API_URL.value()
    if not api:
        reason = "is not set; export the address of the API, such as https://prefect.example.org/api"
        raise ProfileError("PREFECT_API_URL", None, reason)
    if password := PREFECT_API_AUTH_STRING.value():
        os.environ[PASSWORD] = password
    with waiting(lambda: "waiting for the Prefect server"):
        await_start(api)
    folder = Path(tempfile.mkdtemp(prefix="trainshed-deploy-"))
    environment = {"TRAINSHED_FOLDER": str(Path.cwd()), **without_tokens(), "PREFECT_API_URL": api}
    settings: ProcessOptions = {"env": environment, "stdin": subprocess.DEVNULL}
    if code := register(options, home, api, folder / "deploy.log", settings):
        return code
    shutil.rmtree(folder)
    print_stderr(f"registered with {api}: {summary(home, every=options.all)}")
    return DONE


def summary(home: Path, *, every: bool) -> str:
    """How many deployments are registered, and how to register the others."""
    count, total = len(listed(home, every=every)), len(listed(home, every=True))
    if count == total:
        return f"{total} deployments"
    return f"the {count} of {total} deployments that can start from here; --all registers all"


def write_file(file: Path, home: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write a file like prefect.yaml with some of the deployments that `listed` returns."""
    state_files.write(file, yaml.safe_dump({**_read(home), "deployments": [*entries]}, sort_keys=False))


def count_unregistered(api: str, home: Path, *, every: bool = False) -> int:
    """Number of deployments that the server lacks, of those that can start here or of all."""
    known = {(deployment["entrypoint"], deployment["name"]) for deployment in _registered(api)}
    return sum((entry["entrypoint"], entry["name"]) not in known for entry in listed(home, every=every))


def working_folder(api: str) -> str | None:
    """The folder in which the server's deployments run, whose store they use; None if it has none."""
    steps = (step for deployment in _registered(api) for step in deployment["pull_steps"] or ())
    return next((step[name]["directory"] for step in steps for name in RECORDS if name in step), None)


def listed(home: Path, *, every: bool = False) -> list[dict[str, Any]]:
    """The deployments whose profiles can start from this machine, or all."""
    described = _read(home)
    flows = described.get("each_profile")
    entries = [*(_of_profiles(flows) if flows else ()), *described["deployments"]]
    return [entry for entry in entries if every or _starts_here(entry)]


def _read(home: Path) -> dict[str, Any]:
    described: dict[str, Any] = yaml.safe_load((home / "prefect.yaml").read_text())
    return described


def _of_profiles(flows: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A deployment for each shipped profile.

    Args:
        flows: the definitions of prefect.yaml for profiles that pretrain, and for those that fine-tune.
    """
    for name in resolve.names():
        profile = _load(name)
        yield {
            **flows["finetune" if profile.fine_tunes else "pretrain"],
            "name": name,
            "description": profile.description,
            "tags": ["cpu" if profile.cluster.launcher == "local" else cluster_summary(profile)],
            "parameters": {"profile": name},
        }


@cache  # all take 0.3 s of CPU, and `up` asks for them five times
def _load(name: str) -> Profile:
    return resolve.load(name)


def _starts_here(deployment: Mapping[str, Any]) -> bool:
    parameters = deployment.get("parameters", {})
    profiles = parameters.get("profiles", [parameters[name] for name in ("profile",) if name in parameters])
    return all(map(_profile_starts_here, profiles))


@cache
def _profile_starts_here(name: str) -> bool:
    """Whether this machine has the launcher and data of the profile, and it or its cluster the devices."""
    try:
        profile = _load(name)
        resolve.check_start(profile)
    except ProfileError:
        return False
    except OSError as error:
        print_stderr(f"trainshed: {name} is left out of the deployments: {error}")
        return False
    cluster = profile.cluster
    if cluster.launcher == "slurm":
        known = _slurm_accelerators()
        return not known or cluster.accelerator in (None, *known)
    devices = DEVICES.get(cluster.device)
    return cluster.launcher != "local" or devices is None or bool(folders.matches(Path("/dev"), devices))


@cache
def _slurm_accelerators() -> frozenset[str]:
    """Accelerators that Slurm names for its nodes, whatever their state; empty if it names none."""
    try:
        done = subprocess.run(NODES, capture_output=True, text=True, errors="replace", timeout=NODES_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    names = (name for kind in ACCELERATORS.values() for name in kind)
    return frozenset(name for name in names if name in done.stdout.lower())


def named(name: str) -> dict[str, Any]:
    """Filter of Prefect's API by a name."""
    return {"name": {"any_": [name]}}


def query(address: str, body: Any, method: str = "POST") -> Any:
    """Query Prefect's API; returns its JSON. Raises OSError or ValueError if something else listens there."""
    header = {"Content-Type": "application/json", **authorization()}
    for delay in SERVER_BUSY.delays:
        request = urllib.request.Request(address, json.dumps(body).encode(), header, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code == FORBIDDEN and CSRF_TOKEN not in header:
                header |= _csrf_token(address)
                continue
            if error.code != UNAVAILABLE:
                raise
            time.sleep(delay)
    raise OSError(f"{address}: unavailable for {SERVER_BUSY.seconds:.0f} s")


def _csrf_token(address: str) -> dict[str, str]:
    """Headers that a server with CSRF protection asks of requests that may change something."""
    client = str(uuid4())
    api = address.partition("/api/")[0] + "/api"
    token = query(f"{api}/csrf-token?client={client}", None, "GET")
    return {CSRF_TOKEN: token["token"], "Prefect-Csrf-Client": client}


def _registered(api: str) -> list[dict[str, Any]]:
    """The deployments that the server has."""
    found: list[dict[str, Any]] = []
    while len(found) % PAGE == 0:  # the last page is shorter, or empty
        wanted = {"work_pools": named(POOL), "limit": PAGE, "offset": len(found)}
        page = query(f"{api}/deployments/filter", wanted)
        if not page:
            break
        found += page
    return found


def _digest(home: Path, api: str, wanted: Sequence[Mapping[str, Any]], folder: str) -> str:
    """Digest of what deployments are made from, the folder of their runs, and the server's deployments."""
    found = hashlib.sha256(f"{version('prefect')} {folder}".encode())
    found.update(json.dumps(wanted).encode())
    for pattern in SOURCES:
        for path in sorted(folders.find(home, pattern)):
            found.update(f"\0{path.relative_to(home)}\0".encode() + path.read_bytes())
    kept = [
        [(each.get("global_concurrency_limit") or {}).get("limit"), *(each.get(name) for name in FIELDS)]
        for each in _registered(api)
    ]
    found.update(json.dumps(sorted(json.dumps(row, sort_keys=True) for row in kept)).encode())
    return found.hexdigest()


def _write_digest(api: str, digest: str) -> None:
    try:
        query(f"{api}/variables/name/{VARIABLE}", {"value": digest}, "PATCH")
    except urllib.error.HTTPError as error:
        if error.code != NOT_FOUND:
            raise
        # A conflict, because another `up` has just created it, is one of the errors that `deploy` ignores.
        query(f"{api}/variables/", {"name": VARIABLE, "value": digest})


def _run(module: list[str], home: Path, log_file: Path, settings: ProcessOptions, total: int = 0) -> int:
    """Run a module that registers something; returns the exit code."""
    options: ProcessOptions = {**settings, "cwd": home}
    with waiting(_progress(log_file, total)):
        code = start_module(module, log_file, **options).wait()
    if code == REJECTED:
        print_stderr(log_file.read_text().splitlines()[-1])
        return REJECTED
    if code != 0:
        print_stderr(f"trainshed: `python -m {' '.join(module)}` failed; log: {log_file}")
        return FAILED
    return DONE


def _progress(log_file: Path, total: int) -> Callable[[], str]:
    """A description of the progress of a registration, read from its log."""
    before = log_file.stat().st_size if state_files.exists(log_file) else 0

    def describe() -> str:
        log = log_file.read_bytes()[before:] if state_files.exists(log_file) else b""
        done = sum(line.startswith(b"registered ") for line in log.splitlines())
        what = f"{total} deployments" if total else "automations"
        return f"registering {what}" + (f": {done} done" if done else "")

    return describe
