"""Runs by name: opening a run folder for one flow run at a time, finding finished runs, and reading what a run recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profiles import resolve
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks.launchers import create, latest_jobs
from tasks.launchers.log_follower import LogFollower, is_event, is_metrics, last_row
from tasks.store.artifacts import Artifact
from tasks.store.backends import FolderBackend
from tasks.store.store import Store

INPUTS = "inputs.json"
ATTEMPT = "attempt"  # number of the training attempt that may complete checkpoints
METRICS = "metrics.jsonl"
FLOW_RUN = "flow-run"  # id of the flow run that uses the folder, or used it last


@contextmanager
def open_run(store: Store, profile: Profile, identity: str, flow_run: str) -> Iterator[Path]:
    """The run's folder, locked for the block; others wait. Raises ProfileError if another run of that name has an active job."""
    with store.lock(f"run-{profile.name}"):
        _require_no_active_job_of_another(store, profile, identity)
        folder = store.run_folder(profile.name).prepare(identity)
        FolderBackend(folder).write("profile.yaml", resolve.dump(profile).encode())
        record_flow_run(folder, flow_run)
        yield folder


def record_flow_run(folder: Path, flow_run: str) -> None:
    """Record that a flow run uses this folder, so that its cancellation finds the jobs."""
    FolderBackend(folder).write(FLOW_RUN, flow_run.encode())


def folders_of_flow_run(store: Store, name: str, flow_run: str) -> list[Path]:
    """Folders of a run, and of the rounds of its series, that a flow run used last; the latest first."""
    folder = store.run_folder(name).path
    records = [folder / FLOW_RUN, *folder.parent.glob(f"{name}-round-*/{FLOW_RUN}")]
    found = [record for record in records if _names(record, flow_run)]
    return [record.parent for record in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def scratch_folders_of_flow_run(store: Store, flow_run: str) -> list[Path]:
    """Scratch folders of the store that a flow run uses or used last."""
    records = store.work_dir.glob(f"work/*/{FLOW_RUN}")
    return [record.parent for record in records if _names(record, flow_run)]


def _names(record: Path, flow_run: str) -> bool:
    return record.exists() and record.read_text() == flow_run


def _require_no_active_job_of_another(store: Store, profile: Profile, identity: str) -> None:
    run = store.run_folder(profile.name)
    if run.identity in (None, identity):
        return
    try:
        cluster = resolve.load(str(run.path / "profile.yaml")).cluster
    except ProfileError:  # written by another version, or corrupted
        cluster = profile.cluster
    launcher = create(cluster.launcher, cluster)
    for handle in latest_jobs(run.path / "logs"):
        if where := launcher.location(handle):
            reason = (
                f"a different run (model, data or training) has this name, and its {handle.job.name} job is still active as "
                f"{where}; end it first, or choose another name"
            )
            raise ProfileError("name", profile.name, reason, [f"{profile.name}-2"])


def fetch(store: Store, name: str) -> Path:
    """The folder of an existing run, downloaded if this machine has none. Raises ProfileError if the store lacks part of it."""
    run = store.run_folder(name)
    identity = run.stored_identity
    if identity is None:
        raise ProfileError("run", name, f"there is no such run in {store.uri}")
    folder = run.prepare(identity)
    if missing := [file for file in ("profile.yaml", INPUTS) if not (folder / file).exists()]:
        reason = f"{missing[0]} is neither in {folder} nor in {store.uri}; set the work_dir in which the run was started"
        raise ProfileError("work_dir", str(store.work_dir), reason)
    return folder


def record_inputs(folder: Path, identity: str, tokenizer: Artifact, dataset: Artifact) -> None:
    """Record what a run was made from, for exports and for continual pretraining."""
    inputs = {"identity": identity, "tokenizer": tokenizer.key, "dataset": dataset.key}
    FolderBackend(folder).write(INPUTS, json.dumps(inputs, indent=1).encode())


def read_inputs(folder: Path) -> dict[str, str]:
    """A run's `identity`, and the keys of its `tokenizer` and `dataset`. Raises FileNotFoundError if nothing is recorded."""
    return json.loads((folder / INPUTS).read_text())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl; empty if there is no such file."""
    return list(LogFollower(folder / METRICS).rows(is_metrics))


def last_training_row(folder: Path) -> dict[str, Any] | None:
    """The row of the last training step in a run's metrics.jsonl; None if there is none. Costs the same for any length."""
    return last_row(folder / METRICS, "loss")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run's events.jsonl (failures and anomalies); empty if there is no such file."""
    return list(LogFollower(folder / "events.jsonl").rows(is_event))
