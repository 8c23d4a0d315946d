"""Environment variables of a device's jobs: the user's values win, with every launcher.

A value of the user's that replaces a default is logged.

The user's values are the submitting process's environment on this machine and on Slurm, and `cluster.kubernetes.environment` on
Kubernetes, whose Pods inherit nothing. Only what launchers need to run and follow a job is not subject to the rule: the
rendezvous, unbuffered output and the format of log lines.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from shlex import quote

from parallel.device import Device
from tasks.launchers.base import SAFE_PATH, Job
from tasks.launchers.causes import RANK_PREFIX

log = logging.getLogger(__name__)


def job_variables(job: Job) -> dict[str, str]:
    """What every launcher sets to run and follow a job."""
    threads = {} if job.threads is None else {"OMP_NUM_THREADS": str(job.threads)}
    lines = {"PYTHONUNBUFFERED": "1", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_PREFIX}
    return {**SAFE_PATH, **lines, **threads}


def defaults(device: Device, address: str) -> dict[str, str]:
    """A device's variables in the shell's syntax; those that the job's environment has keep their values.

    Args:
        address: where the device's collectives rendezvous, in the shell's syntax.
    """
    values = {name: quote(value) for name, value in device.environment}
    if device.communicator:
        values[device.communicator] = f'"{address}"'
    return {name: f"${{{name}-{value}}}" for name, value in values.items()}


def log_differences(job: str, defaults: Mapping[str, str], users: Mapping[str, str]) -> None:
    """Log the user's values that replace a device's."""
    for name, default in defaults.items():
        if users.get(name, default) != default:
            log.warning("%s: %s=%s is kept; the default is %s", job, name, users[name], default)
