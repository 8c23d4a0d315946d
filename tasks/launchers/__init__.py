"""Launchers start jobs (Python modules, usually under torchrun) on this machine or on a Slurm cluster.

Start with `base`: the `Launcher` protocol, the job types and `execute`. `local` and `slurm` implement the protocol, `batch`
writes the Slurm batch script, `causes` finds the cause of a failure in a log, `log_follower` reads growing files. Of Trainshed,
imports only `profiles`, `parallel.device` and the exit codes of `modeling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from profiles import state_files
from profiles.schema import Cluster
from tasks.launchers.base import Handle, Job, JobFailed, Launcher, Status, execute

__all__ = ["Handle", "Job", "JobFailed", "Launcher", "Status", "create", "execute", "latest_jobs"]


def create(kind: str, cluster: Cluster | None = None) -> Launcher:
    """Create the launcher that `cluster.launcher` names; "slurm" needs the whole `cluster` section."""
    if kind == "local":
        from tasks.launchers.local import LocalLauncher

        if (
            cluster is None or cluster.device == "cpu"
        ):  # which needs no environment, and torch takes a second to import
            return LocalLauncher()
        from parallel import device as devices

        return LocalLauncher(dict(devices.resolve(cluster.device).environment))
    if kind == "slurm" and cluster is not None:
        from tasks.launchers.slurm import SlurmLauncher

        return SlurmLauncher(cluster)
    raise ValueError(f"cluster.launcher = {kind}: unknown launcher; valid: local, slurm")


def latest_jobs(folder: Path) -> Iterator[Handle]:
    """Handles of the latest job of each name that was submitted in `folder`, running or not."""
    for path in sorted(folder.glob("*.job.json")):
        job = Job(path.name.removesuffix(".job.json"), "", (), folder)
        if state := state_files.read_json(path):
            yield Handle(job, state["identifier"])
