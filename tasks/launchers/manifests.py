"""Kubernetes manifests: an indexed Job with a Pod per node, and a headless Service naming the Pods.

The Pod of index 0 is the rendezvous. Pods see the store and the working folder under the same paths as the flow, on a
PersistentVolumeClaim, and append to the job's log there; a POSIX file system (not NFS) makes each append atomic. A failed Pod
fails the Job at once: the flow starts the next attempt.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from pathlib import Path
from typing import Any

from parallel import device as devices
from profiles.sections.cluster import Cluster
from tasks.launchers.base import Job, torchrun
from tasks.launchers.environment import job_variables

PORT = 29500  # of the rendezvous; every Pod has a separate address
JOB_LABEL, FINGERPRINT, LOG_START = "trainshed/job", "trainshed/fingerprint", "trainshed/log-start"
KEPT_SECONDS = 86400  # that a Job is kept after its end
# For all Pods to start, while nodes are added one by one or pull the image; torchrun's default is 15 minutes.
RENDEZVOUS_SECONDS = 86400
# $1 is the log, $2 the index in a job array (else empty), the rest the command. Without braces, dash would end with 2, which
# means rejected input, if it cannot open the log.
SHELL = (
    'log=$1; index=$2; shift 2; [ -z "$index" ] || set -- "$@" --index "$index"; '
    '{ exec "$@"; } >> "$log" 2>&1 || exit 1'
)


def job_label(job: Job) -> str:
    """Value of JOB_LABEL, from the job's name, key and folder, so that a running job is found."""
    return hashlib.sha256(f"{job.name}\n{job.key}\n{job.folder.absolute()}".encode()).hexdigest()[:32]


def resource_name(job: Job) -> str:
    """A new, unique name for the Job and its Service: ts-RUN-JOB.

    It is short enough for the names of its Pods.
    """
    readable = re.sub(r"[^a-z0-9-]+", "-", job.title.lower())[:30].strip("-")
    return f"{readable}-{uuid.uuid4().hex[:12]}"


def service(name: str, job: Job) -> dict[str, Any]:
    """The headless Service of a Job's Pods."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {JOB_LABEL: job_label(job)}},
        # The rendezvous resolves names before Pods are ready.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def secret(name: str, job: Job) -> dict[str, Any]:
    """The Secret with a job's secrets, which its Pods get as environment variables."""
    metadata = {"name": name, "labels": {JOB_LABEL: job_label(job)}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(job.secrets)}


def manifest(name: str, job: Job, cluster: Cluster, log_start: int, attempt: int | None) -> dict[str, Any]:
    pods = job.array or job.nodes
    labels = {JOB_LABEL: job_label(job)}
    settings = cluster.kubernetes
    if settings.queue:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": labels,
            "annotations": {FINGERPRINT: job.fingerprint, LOG_START: str(log_start)},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {
                "metadata": {"labels": {JOB_LABEL: job_label(job)}},
                "spec": _pod(name, job, cluster, attempt),
            },
        },
    }


def _pod(name: str, job: Job, cluster: Cluster, attempt: int | None) -> dict[str, Any]:
    settings = cluster.kubernetes
    container: dict[str, Any] = {
        "name": "trainshed",
        "image": settings.image,
        "command": _command(name, job, cluster.grace, attempt),
        "workingDir": str(Path.cwd()),
        "env": [{"name": key, "value": value} for key, value in _environment(name, job, cluster).items()],
        "volumeMounts": [
            {"name": "store", "mountPath": settings.mount},
            {"name": "memory", "mountPath": "/dev/shm"},  # collectives and data workers need more than 64 MiB
        ],
    }
    if job.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}}]
    if resources := _resources(job, cluster):
        container["resources"] = {"requests": resources, "limits": resources}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": name,  # of the Service
        "terminationGracePeriodSeconds": cluster.grace,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "store", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if settings.node_selector:
        pod["nodeSelector"] = _pairs(settings.node_selector)
    if settings.tolerations:
        pod["tolerations"] = [{"key": key, "operator": "Exists"} for key in settings.tolerations]
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account
    if settings.priority_class:
        pod["priorityClassName"] = settings.priority_class
    return pod


def _command(name: str, job: Job, grace: int, attempt: int | None) -> list[str]:
    program = [
        "-m",
        *job.module,
        *job.arguments,
        *(["--attempt", str(attempt)] if attempt is not None else []),
    ]
    if job.processes:
        rendezvous = ("--master-addr", f"{name}-0.{name}", "--master-port", str(PORT))
        limit = ("--rdzv-conf", f"timeout={RENDEZVOUS_SECONDS}")
        program = [*torchrun(job, grace, *rendezvous, *limit), *program]
    # Kubernetes replaces $(NAME) in commands.
    escaped = [part.replace("$(", "$$(") for part in program]
    if job.processes:
        escaped[3:3] = ["--node-rank", "$(JOB_COMPLETION_INDEX)"]
    index = "$(JOB_COMPLETION_INDEX)" if job.array else ""
    return ["/bin/sh", "-c", SHELL, "-", str(job.log_file.absolute()), index, "python", *escaped]


def _environment(name: str, job: Job, cluster: Cluster) -> dict[str, str]:
    device = devices.resolve(cluster.device)
    variables = job_variables(job) | dict(device.environment)
    if device.communicator:
        variables[device.communicator] = f"{name}-0.{name}:{PORT + 1}"
    # Kubernetes replaces $(NAME) in values too.
    chosen = {key: value.replace("$(", "$$(") for key, value in cluster.kubernetes.variables.items()}
    return variables | chosen


def _resources(job: Job, cluster: Cluster) -> dict[str, str]:
    """Resource requests and limits of a Pod."""
    if cluster.kubernetes.resources:
        return _pairs(cluster.kubernetes.resources)
    return {"nvidia.com/gpu": str(job.processes or 1)} if cluster.device == "cuda" else {}


def _pairs(entries: list[str]) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in entries)
