"""How programs get onto devices: one interface (`base`), one module a kind of cluster, one function to choose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from profiles.schema import Cluster
from tasks.launchers.base import Handle, Job, JobFailed, Launcher, Status, execute

__all__ = ["Handle", "Job", "JobFailed", "Launcher", "Status", "create", "execute", "latest_jobs"]


def create(kind: str, cluster: Cluster | None = None) -> Launcher:
    """The launcher that a profile's `cluster.launcher` names; `slurm` needs the whole section."""
    if kind == "local":
        from tasks.launchers.local import LocalLauncher

        return LocalLauncher()
    if kind == "slurm" and cluster is not None:
        from tasks.launchers.slurm import SlurmLauncher

        return SlurmLauncher(cluster)
    raise ValueError(f"cluster.launcher = {kind}: there is no such launcher; valid: local, slurm")


def latest_jobs(folder: Path) -> Iterator[Handle]:
    """The jobs that were started last in a folder, under each name; they may long be over."""
    for path in sorted(folder.glob("*.job.json")):
        job = Job(path.name.removesuffix(".job.json"), "", (), folder)
        yield Handle(job, json.loads(path.read_text())["identifier"])
