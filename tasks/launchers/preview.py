"""What a launcher would submit: a Slurm batch script, Kubernetes manifests or a local command."""

from __future__ import annotations

import shlex

import yaml

from profiles.errors import ProfileError
from profiles.rules.cluster import LAUNCHERS
from profiles.sections.cluster import Cluster
from tasks.launchers import local, manifests, slurm_batch
from tasks.launchers.base import Job


def preview(job: Job, cluster: Cluster) -> str:
    """The text; needs neither the cluster nor its client.

    Raises ProfileError for a plugin's launcher.
    """
    if cluster.launcher == "slurm":
        return slurm_batch.script(job, cluster, slurm_batch.PREVIEW)
    if cluster.launcher == "kubernetes":
        name, attempt = manifests.resource_name(job), 1 if job.attempt_file else None
        documents = [manifests.service(name, job), manifests.manifest(name, job, cluster, 0, attempt)]
        return yaml.safe_dump_all(documents, sort_keys=False)
    if cluster.launcher == "local":
        return f"{shlex.join(local.command(job, cluster.grace))}\n"
    reason = "is a plugin, which cannot show what it would submit"
    raise ProfileError("cluster.launcher", cluster.launcher, reason, LAUNCHERS)
