"""The conformance suite on the local launcher, and on Kubernetes with an emulated API server."""

import pytest

from profiles import resolve
from tasks.launchers import create
from tasks.launchers.conformance import LauncherConformance
from tasks.launchers.local import LocalLauncher

pytestmark = pytest.mark.slow

SETTINGS = ("cluster.launcher=kubernetes", "cluster.kubernetes={image: trainshed, claim: store, mount: /}")


class TestLocal(LauncherConformance):
    def create(self):
        return LocalLauncher()


@pytest.mark.usefixtures("cluster")
class TestKubernetes(LauncherConformance):
    def create(self):
        return create(resolve.load("tiny", SETTINGS).cluster)
