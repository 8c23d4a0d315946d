"""Launcher names: Trainshed's own and the entry points of packages, found without importing them."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

from profiles import plugins
from profiles.errors import ProfileError, install_command
from profiles.schema import Profile

OWN = ("local", "slurm", "kubernetes")
GROUP = "trainshed.launchers"  # of entry points


def check(profile: Profile) -> None:
    """Raise ProfileError for an unknown launcher or incomplete settings of the Kubernetes launcher."""
    cluster = profile.cluster
    if cluster.launcher not in OWN:
        plugins.find(GROUP, cluster.launcher, "cluster.launcher", OWN)
    if cluster.launcher == "kubernetes":
        settings = cluster.kubernetes
        for key in ("image", "claim", "mount"):
            if getattr(settings, key) is None:
                raise ProfileError(
                    f"cluster.kubernetes.{key}", None, "is missing: the Kubernetes launcher needs it"
                )
        if cluster.device == "neuron" and not settings.resources:
            reason = "is empty; list the devices that a Pod requests"
            raise ProfileError("cluster.kubernetes.resources", [], reason, ["[aws.amazon.com/neuron=16]"])


def check_installed(profile: Profile) -> None:
    """Raise ProfileError unless this machine has what the launcher calls: sbatch or the Kubernetes client."""
    if profile.cluster.launcher == "slurm" and shutil.which("sbatch") is None:
        raise ProfileError("cluster.launcher", "slurm", "sbatch is not on this machine's PATH", ["local"])
    if profile.cluster.launcher == "kubernetes" and find_spec("kubernetes") is None:
        reason = f"its client is not installed; install it with: {install_command('kubernetes')}"
        raise ProfileError("cluster.launcher", "kubernetes", reason)
