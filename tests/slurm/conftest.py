"""A Slurm cluster per test worker, repaired before each test; a store with a dataset; Prefect workers."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.processes import training_ranks
from flows.cli.deployments import listed
from profiles import resolve
from profiles.schema import Profile
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.steps.training import TrainingStep
from tests.deployments import HOME, register
from tests.flows.conftest import command, pretrain, profile  # noqa: F401
from tests.flows.micro import losses, wait_for_step
from tests.forked_jobs import forked_jobs
from tests.slurm.cluster import WITH_PARENT, Cluster, missing
from tests.waiting import until

SLURM = ("cluster.launcher=slurm", "cluster.exclusive=false", "cluster.nodes=2", "parallel.tensor=2")
LOCAL = ("cluster.launcher=local", "cluster.nodes=1")  # instead of Slurm
STEPS = ("train.steps=200", "checkpoint.every=40", "evaluate.every=0")
INTERRUPTED_AT = 50


@pytest.fixture(scope="session")
def _cluster():
    if missing():
        pytest.skip(missing())
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster):
    _cluster.heal()
    yield _cluster
    _cluster.heal()
    until(lambda: not _cluster.tasks())


@dataclass
class Run:
    """Training of a run, without a flow."""

    profile: Profile
    folder: Path
    lab: "Lab"

    def train(self, watch=lambda: None):
        """One attempt, like that of the training step."""

        context = Context(self.profile, self.lab.store, self.folder, watch=watch)
        return TrainingStep(self.lab.dataset, self.folder.name).run(context)

    @property
    def log(self) -> str:
        return (self.folder / "logs/train.log").read_text()

    @property
    def losses(self) -> dict[int, float]:
        return losses(self.folder)

    def ranks(self) -> list[psutil.Process]:
        """Training processes by rank."""
        found = training_ranks(self.folder)
        assert len(found) == self.profile.world_size
        return found

    def at_step(self, step: int, act) -> threading.Thread:
        """Call `act` in a thread once `step` steps are complete; `train` polls too slowly for short runs."""

        def wait():
            wait_for_step(self.folder, step)
            act()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread


class Lab:
    """A store with the dataset of the profile `micro`."""

    def __init__(self, path: Path, folder: Path) -> None:
        from tasks.store.store import Store

        self.path, self.store = path, Store(str(folder))
        micro = resolve.load(str(path))
        self.dataset = DatasetStep(TokenizerStep().run(Context(micro, self.store))).run(
            Context(micro, self.store)
        )

    def run(self, name: str, *overrides: str) -> Run:
        """Create a run, on the cluster unless overridden."""
        own = resolve.load(str(self.path), [*STEPS, *SLURM, *overrides], name)
        resolve.check(own)
        folder = self.store.run_folder(name).prepare(name)
        (folder / "profile.yaml").write_text(resolve.dump(own))
        return Run(own, folder, self)


@pytest.fixture(scope="session")
def lab(profile, tmp_path_factory):  # noqa: F811
    return Lab(profile, tmp_path_factory.mktemp("lab") / "store")


@pytest.fixture(scope="session")
def undisturbed(lab):
    """Losses of a run without faults and without Slurm, on as many ranks."""
    run = lab.run("undisturbed", *LOCAL, "cluster.devices_per_node=2")
    with forked_jobs():
        run.train()
    return run.losses


def register_deployment(api: str, name: str, folder: Path) -> None:
    """Register the deployment that trains the shipped profile of this name, like `trainshed up`."""
    training = ("trainshed.pretrain", "trainshed.finetune")
    every = listed(HOME, every=True)
    register(
        api, [each for each in every if (each["name"] == name and each["entrypoint"] in training)], folder
    )


@contextmanager
def worker(api: str, log: Path, **environment: str) -> Iterator[subprocess.Popen]:
    """A Prefect worker of the pool, for the length of the block."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            [*WITH_PARENT, sys.executable, "-m", "prefect", "worker", "start", "--pool", "trainshed"],
            env={**os.environ, "PREFECT_API_URL": api, **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGINT)
        started.wait(timeout=60)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


os.environ.setdefault("OMP_NUM_THREADS", "1")
