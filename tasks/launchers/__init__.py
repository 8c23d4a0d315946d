"""Launchers: start jobs (Python modules, usually under torchrun) locally, on Slurm or on Kubernetes.

Start with `base`: the `Launcher` protocol, the job types and `execute`. `local`, `slurm` and `kubernetes` implement the protocol,
`plugins` finds them and those of other packages, `conformance` tests any of them. `slurm_batch` writes the batch script,
`manifests` those of Kubernetes, and `causes` finds the cause of a failure in a log. Imports `parallel` and `profiles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from profiles.files import folders, state_files
from tasks.launchers.base import HANDLE, Handle, Job, JobFailed, Launcher, Status, execute
from tasks.launchers.plugins import create

__all__ = ["Handle", "Job", "JobFailed", "Launcher", "Status", "create", "execute", "latest_jobs"]


def latest_jobs(folder: Path) -> Iterator[Handle]:
    """Handles of the latest job of each name that was submitted in `folder`, running or not."""
    for path in folders.matches(folder, "*.job.json"):
        job = Job(path.name.removesuffix(".job.json"), "", (), folder)
        if state := state_files.read_json(path, HANDLE, ["identifier"]):
            yield Handle(job, state["identifier"])
