"""Fixtures of launcher tests: an emulated Kubernetes cluster."""

import pytest

from tests.tasks.launchers.emulated_kubernetes import Cluster


@pytest.fixture
def cluster(tmp_path_factory, monkeypatch):
    """An emulated Kubernetes cluster, which the kubeconfig file names."""
    emulated = Cluster(tmp_path_factory.mktemp("cluster"))
    monkeypatch.setenv("KUBECONFIG", str(emulated.kubeconfig))
    monkeypatch.setattr("tasks.launchers.kubernetes.POLL_SECONDS", 0.1)
    yield emulated
    emulated.close()
