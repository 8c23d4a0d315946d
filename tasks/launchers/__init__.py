"""How programs get onto devices: one interface (`base`), one module a kind of cluster, one function to choose."""

from tasks.launchers.base import Handle, Job, JobFailed, Launcher, Status, execute

__all__ = ["Handle", "Job", "JobFailed", "Launcher", "Status", "create", "execute"]


def create(kind: str) -> Launcher:
    """The launcher that a profile's `cluster.launcher` names."""
    if kind == "local":
        from tasks.launchers.local import LocalLauncher

        return LocalLauncher()
    raise ValueError(f"cluster.launcher = {kind}: there is no such launcher; valid: local")
