"""Registry of launchers: Trainshed's own, and those that installed packages declare as entry points.

A package adds a launcher under the group `trainshed.launchers`, here one called `cloud`:

    [project.entry-points."trainshed.launchers"]
    cloud = "my_package.launcher:CloudLauncher"

The name is the value of `cluster.launcher`; the object is called with the `cluster` section and returns a Launcher.
"""

from __future__ import annotations

from collections.abc import Callable

from profiles import plugins
from profiles.rules.cluster import LAUNCHER_GROUP, LAUNCHERS
from profiles.sections.cluster import Cluster
from tasks.launchers.base import Launcher


def create(cluster: Cluster) -> Launcher:
    """The launcher that `cluster.launcher` names.

    Raises:
        ProfileError: no installed package provides it, several do, or it cannot be imported.
    """
    kind = cluster.launcher
    if kind == "local":
        return _local(cluster)
    if kind == "slurm":
        from tasks.launchers.slurm import SlurmLauncher

        return SlurmLauncher(cluster)
    if kind == "kubernetes":
        from tasks.launchers.kubernetes import KubernetesLauncher

        return KubernetesLauncher(cluster)
    point = plugins.find(LAUNCHER_GROUP, kind, "cluster.launcher", LAUNCHERS)
    factory: Callable[[Cluster], Launcher] = plugins.load(point, "cluster.launcher")
    return factory(cluster)


def _local(cluster: Cluster) -> Launcher:
    from tasks.launchers.local import LocalLauncher

    if cluster.device == "cpu":  # needs no environment, and torch takes a second to import
        return LocalLauncher(grace=cluster.grace)
    from parallel import device as devices

    return LocalLauncher(devices.resolve(cluster.device).local_environment(), cluster.grace)
