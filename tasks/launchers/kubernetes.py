"""Kubernetes launcher, on the official client: an indexed Job and a headless Service (manifests.py).

A running job is found by its labels, so any process can re-attach to it. The API server is polled every few seconds; while it
does not answer, methods raise Unavailable. Kubernetes removes a Job and its Pods a day after its end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from parallel import device as devices
from profiles.errors import ProfileError
from profiles.files import exit_codes, state_files
from profiles.files.jsonl import size_of
from profiles.sections.cluster import Cluster
from tasks.launchers import causes, manifests
from tasks.launchers.base import (
    NODE_FAILED,
    Handle,
    Job,
    JobFailed,
    Status,
    Unavailable,
    next_attempt,
    write_handle,
)
from tasks.launchers.environment import log_differences

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, V1ContainerStateTerminated, V1Job, V1Pod

log = logging.getLogger(__name__)

POLL_SECONDS = 3.0  # between requests to the API server
REQUEST_SECONDS = 30.0
KILL_SECONDS = 60.0  # for killed Pods to disappear
NOT_FOUND, TOO_MANY_REQUESTS, SERVER_ERROR = 404, 429, 500
# Status reasons of Pods that were ended by their node or the scheduler.
LOST = ("Evicted", "NodeLost", "NodeShutdown", "Terminated", "Preempting")
OOM_KILLED = "OOMKilled"  # reason of a container's end
# Exit codes of containers that Kubernetes stops, because another Pod failed.
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


class KubernetesLauncher:
    """Starts jobs as Jobs of a Kubernetes cluster. Raises ProfileError if none is configured here."""

    def __init__(self, cluster: Cluster) -> None:
        from kubernetes import client
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError

        self._cluster, self._namespace = cluster, cluster.kubernetes.namespace
        try:
            api = _configured(cluster.kubernetes.context)
        except ConfigException as error:
            reason = f"no Kubernetes cluster is configured here: {error}; set KUBECONFIG"
            raise ProfileError("cluster.launcher", "kubernetes", reason) from error
        self._jobs, self._core = client.BatchV1Api(api), client.CoreV1Api(api)
        self._api_error, self._connection_error = client.ApiException, HTTPError
        # Time and status of the latest poll, by identifier.
        self._polled: dict[str, tuple[float, Status]] = {}
        self._nodes: dict[str, list[str]] = {}  # of a failed job's Pods, by index

    def submit(self, job: Job) -> Handle:
        state_files.retried(partial(state_files.make_folder, job.folder))
        if running := self.find(job):
            return running
        for other in self._active(job):
            self.cancel(Handle(job, other.metadata.name), self._cluster.grace)
        defaults = dict(devices.resolve(self._cluster.device).environment)
        log_differences(job.name, defaults, self._cluster.kubernetes.variables)
        attempt = next_attempt(job.attempt_file) if job.attempt_file else None
        log_start = size_of(job.log_file)
        name = manifests.resource_name(job)
        body = manifests.manifest(name, job, self._cluster, log_start, attempt)
        created = self._call(self._jobs.create_namespaced_job, body=body, field_validation="Strict")
        try:
            handle = self._completed(job, created)
        except BaseException:
            self._delete(name, 0)
            raise
        log.info("%s: submitted as Kubernetes Job %s/%s", job.name, self._namespace, name)
        return handle

    def find(self, job: Job) -> Handle | None:
        for resource in self._active(job):
            if (resource.metadata.annotations or {}).get(manifests.FINGERPRINT) == job.fingerprint:
                return self._completed(job, resource)  # its submission may have been interrupted
        return None

    def poll(self, handle: Handle) -> Status:
        asked, status = self._polled.get(handle.identifier, (-float("inf"), Status(running=True)))
        if not status.running or time.monotonic() - asked < POLL_SECONDS:
            return status
        resource = self._job(handle.identifier)
        status = Status(running=False) if resource is None else self._status(resource)
        self._polled[handle.identifier] = (time.monotonic(), status)
        return status

    def location(self, handle: Handle) -> str:
        resource = self._job(handle.identifier)
        active = resource is not None and _end(resource) is None
        return f"Kubernetes Job {self._namespace}/{handle.identifier}" if active else ""

    def cancel(self, handle: Handle, grace: float) -> None:
        """Delete the Job: its Pods get SIGTERM, and SIGKILL after the grace time."""
        resource = self._job(handle.identifier)
        if resource is None or _end(resource) is not None:
            return
        for seconds, wait in ((int(grace), grace), (0, KILL_SECONDS)):
            for pod in self._pods(handle.identifier):
                with contextlib.suppress(self._api_error, Unavailable):
                    arguments = {"grace_period_seconds": seconds}
                    self._call(self._core.delete_namespaced_pod, name=pod.metadata.name, **arguments)
            self._delete(handle.identifier, seconds)
            deadline = time.monotonic() + wait
            while left := self._pods(handle.identifier):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.5)
            if not left:
                return
        log.warning(
            "%s: Pods of Kubernetes Job %s still exist after its deletion", handle.job.name, handle.identifier
        )

    def failure(self, handle: Handle, status: Status) -> JobFailed:
        failure = causes.job_failure(handle, status, self._nodes.get(handle.identifier, ()))
        # The log may name the killed rank, or one of another node that failed as a consequence.
        consequences = (*causes.CONSEQUENCES, -signal.SIGKILL)
        if status.exit_code == exit_codes.OUT_OF_MEMORY and failure.exit_code in consequences:
            message = f"{handle.job.name}: {status.note}; log: {handle.job.log_file}"
            return JobFailed(message, failure.detail, status.exit_code)
        return failure

    def _status(self, resource: V1Job) -> Status:
        end = _end(resource)
        if end is None:
            return Status(running=True)
        if end == "Complete":
            return Status(running=False, exit_code=0)
        pods = sorted(self._pods(resource.metadata.name), key=_index)
        self._nodes[resource.metadata.name] = [pod.spec.node_name or "" for pod in pods]
        if lost := [pod for pod in pods if _is_lost(pod)]:
            where = f"Pod {lost[0].metadata.name} on {lost[0].spec.node_name} was evicted"
            return Status(
                running=False,
                note=f"Kubernetes ended Job {resource.metadata.name}: {where}, or {NODE_FAILED}",
            )
        ended = [(pod, container) for pod in pods for container in _failed_containers(pod)]
        if killed := [pod for pod, container in ended if container.reason == OOM_KILLED]:
            note = f"Pod {killed[0].metadata.name} on {killed[0].spec.node_name} ran out of memory ({OOM_KILLED})"
            return Status(running=False, exit_code=exit_codes.OUT_OF_MEMORY, note=note)
        if ended:
            first = min((container for _, container in ended), key=_end_order)
            return Status(running=False, exit_code=first.exit_code)
        reasons = [
            f"{condition.reason}: {condition.message}" for condition in resource.status.conditions or ()
        ]
        note = f"Kubernetes ended Job {resource.metadata.name} ({'; '.join(reasons)}), or {NODE_FAILED}"
        return Status(running=False, note=note)

    def _completed(self, job: Job, resource: V1Job) -> Handle:
        """Handle of a Job, after creating its Service, Secret and handle file where they are missing."""
        name, core = resource.metadata.name, self._core
        dependents = [
            (manifests.service(name, job), core.create_namespaced_service, core.read_namespaced_service)
        ]
        if job.secrets:
            secret = manifests.secret(name, job)
            dependents.append((secret, core.create_namespaced_secret, core.read_namespaced_secret))
        # Makes Kubernetes delete them with the Job.
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": resource.metadata.uid}
        for body, create, read in dependents:
            body["metadata"]["ownerReferences"] = [owner]
            try:
                self._call(create, body=body, field_validation="Strict")
            except self._api_error:
                # An existing one is a conflict, or forbidden if the namespace's quota is used up.
                if self._read(read, name) is None:
                    raise
        handle = Handle(job, name, int(resource.metadata.annotations.get(manifests.LOG_START, 0)))
        write_handle(handle)
        return handle

    def _active(self, job: Job) -> list[V1Job]:
        """Jobs of this name, key and folder that have not ended and are not being deleted."""
        label = f"{manifests.JOB_LABEL}={manifests.job_label(job)}"
        resources = self._call(self._jobs.list_namespaced_job, label_selector=label).items
        return [each for each in resources if _end(each) is None and each.metadata.deletion_timestamp is None]

    def _pods(self, name: str) -> list[V1Pod]:
        selector = f"batch.kubernetes.io/job-name={name}"
        pods: list[V1Pod] = self._call(self._core.list_namespaced_pod, label_selector=selector).items
        return pods

    def _job(self, name: str) -> V1Job | None:
        return self._read(self._jobs.read_namespaced_job, name)

    def _read(self, method: Callable[..., Any], name: str) -> Any:
        """The resource of this name; None if it does not exist."""
        try:
            return self._call(method, name=name)
        except self._api_error as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def _delete(self, name: str, grace: int) -> None:
        with contextlib.suppress(self._api_error, Unavailable):
            options = {"propagation_policy": "Background", "grace_period_seconds": grace}
            self._call(self._jobs.delete_namespaced_job, name=name, **options)

    def _call(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Send a request. Raises Unavailable if the API server cannot be reached or cannot answer now."""
        try:
            return method(namespace=self._namespace, _request_timeout=REQUEST_SECONDS, **arguments)
        except self._connection_error as error:
            raise _unavailable(method, error) from error
        except self._api_error as error:
            if error.status in (0, TOO_MANY_REQUESTS) or error.status >= SERVER_ERROR:  # 0: a TLS error
                raise _unavailable(method, error) from error
            raise


def _configured(context: str | None) -> ApiClient:
    """A client of the cluster that the kubeconfig file names, or, in a Pod without one, of the Pod's own."""
    from kubernetes import client, config

    try:
        return config.new_client_from_config(config_file=os.environ.get("KUBECONFIG"), context=context)
    except config.ConfigException:
        if context is not None:
            raise
        config.load_incluster_config()
        return client.ApiClient()


def _unavailable(method: Callable[..., Any], error: Exception) -> Unavailable:
    reason = getattr(error, "reason", error)  # without the response's headers
    return Unavailable(f"Kubernetes API server: unavailable for {method.__name__}: {reason}")


def _end(resource: V1Job) -> str | None:
    """Complete or Failed; None while the Job has not ended."""
    conditions = resource.status.conditions if resource.status else None
    ended = (each.type for each in conditions or () if each.status == "True")
    return next((kind for kind in ended if kind in ("Complete", "Failed")), None)


def _index(pod: V1Pod) -> int:
    return int((pod.metadata.annotations or {}).get("batch.kubernetes.io/job-completion-index", 0))


def _is_lost(pod: V1Pod) -> bool:
    """Whether a Pod was ended by its node or the scheduler, not by itself."""
    conditions = pod.status.conditions or ()
    disrupted = any(each.type == "DisruptionTarget" and each.status == "True" for each in conditions)
    return disrupted or pod.status.reason in LOST


def _failed_containers(pod: V1Pod) -> list[V1ContainerStateTerminated]:
    ended = [each.state.terminated for each in pod.status.container_statuses or () if each.state]
    return [each for each in ended if each is not None and each.exit_code]


def _end_order(container: V1ContainerStateTerminated) -> tuple[bool, float]:
    """Sort key: by time, but stopped containers last, since clocks of nodes may differ."""
    time_ended = container.finished_at.timestamp() if container.finished_at else math.inf
    return container.exit_code in STOPPED, time_ended
