"""A store with random faults ends up as without: nothing lost, deleted, duplicated or quarantined."""

import os
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
import pytest
import s3fs

from parallel.checkpoint.locations import MARKER
from profiles.files import state_files
from tasks.store import run_artifacts
from tasks.store.artifacts import ArtifactId
from tasks.store.store import Store
from tests import faults, s3
from tests.tasks.store.test_artifacts import FILES, publish
from tests.unreliable import Proxy

pytestmark = pytest.mark.slow

SEEDS = 100
SHARE = 0.1  # of the operations fail
STATE = {"profile.yaml": b"model: tiny\n", "metrics.jsonl": b'{"step": 1}\n' * 50, "graphs.json": b"{}"}
TRAINING = ArtifactId("training", "t1")
CHECKPOINT = {"0.distcp": b"weights" * 500, MARKER: b'{"step": 4}'}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(state_files, "DELAYS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def folder():
    """A folder in memory where there is one: the disk is not what is tested."""
    shm = Path("/dev/shm")
    with TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        yield Path(name)


def persistently(operation, *arguments):
    """The result of an operation, repeated after errors of the file system as a flow's retries do."""
    for _ in range(10):
        try:
            return operation(*arguments)
        except OSError:
            continue
    return operation(*arguments)


def make(store: Store, kind: str, key: str, files, requires=()):
    """A step: find under the lock, else publish."""
    with store.artifacts.lock(ArtifactId(kind, key)):
        return store.artifacts.find(ArtifactId(kind, key)) or publish(
            store, kind, key, files, requires=requires
        )


def train(store: Store):
    """The end of the training step."""
    with store.artifacts.lock(TRAINING):
        found = run_artifacts.find(store, TRAINING, "tiny")
        return found or run_artifacts.publish(store, TRAINING, "tiny", "checkpoints/step_4", {})


def work(store: Store, other: Store) -> None:
    """What a flow does with a store, and what another process, or another machine, finds there."""
    tokens = persistently(make, store, "tokens", "k1", FILES)
    requires = [ArtifactId("tokens", "k1")]
    dataset = persistently(make, store, "dataset", "d1", {"corpus.json": b"{}"}, requires)
    run = store.run_folder("tiny")
    folder = persistently(run.prepare, "identity")
    for name, data in STATE.items():
        persistently(state_files.write, folder / name, data)
    for name, data in CHECKPOINT.items():
        persistently(store.backend.write, f"runs/tiny/checkpoints/step_4/{name}", data)
    persistently(run.sync().upload)
    trained = persistently(train, store)
    for seen in (store, other):
        assert persistently(seen.artifacts.find, ArtifactId("dataset", "d1")) == dataset
        assert persistently(run_artifacts.find, seen, TRAINING, "tiny") == trained
        persistently(seen.artifacts.path, tokens)
        persistently(seen.run_folder("tiny").prepare, "identity")
        assert persistently(seen.run_folder("tiny").checkpoint_steps) == [4]


def check(*stores: Store) -> None:
    """Everything is there, once, and nothing in quarantine."""
    for store in stores:
        folder = store.artifacts.path(store.artifacts.expect(ArtifactId("tokens", "k1")))
        assert {name: (folder / name).read_bytes() for name in FILES} == FILES
        run = store.run_folder("tiny").path
        assert {name: (run / name).read_bytes() for name in STATE} == STATE
        assert store.run_folder("tiny").identity == "identity"
        assert [path.name for path in run.parent.iterdir()] == ["tiny"]
        assert store.run_folder("tiny").files("checkpoints/step_4").keys() == CHECKPOINT.keys()
        for root in (store.backend, store._local):
            assert root.files("quarantine") == {}
        assert {name.split("/")[0] for name in store.backend.files("runs")} == {"tiny"}
        assert sorted(store.backend.files("artifacts/tokens/k1")) == sorted([*FILES, "manifest.json"])


def test_local_store_survives_random_faults(folder, monkeypatch):
    count = 0
    for seed in range(SEEDS):
        root, fault = folder / str(seed), faults.Once(seed, SHARE)
        with monkeypatch.context() as patch:
            faults.inject(patch, root, fault)
            for _ in range(2):  # the second time, everything is there
                work(Store(str(root)), Store(str(root)))
        check(Store(str(root)))
        count += fault.count
    assert count > 10 * SEEDS


def test_object_store_survives_random_faults(folder, monkeypatch):
    count = 0
    for seed in range(SEEDS):
        fsspec.filesystem("memory").store.clear()
        root, fault = folder / str(seed), faults.Once(seed, SHARE)
        stores = [Store(f"memory://bucket/{seed}", root / machine) for machine in ("here", "there")]
        with monkeypatch.context() as patch:
            faults.inject(patch, root, fault)
            faults.inject_objects(patch, fault)
            for _ in range(2):
                work(*stores)
        check(*stores)
        count += fault.count
    assert count > 10 * SEEDS


@pytest.mark.s3
def test_s3_store_survives_random_faults(tmp_path, monkeypatch):
    with s3.bucket(monkeypatch) as address, Proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # s3fs retries these faults too, with shorter pauses
        s3fs.S3FileSystem.clear_instance_cache()
        kinds, fault = cycle(["lost", "unanswered", "half"]), faults.Once(0, SHARE)
        proxy.fault = lambda method, path: next(kinds) if fault(method, path.partition("?")[0]) else None
        stores = [Store(f"{address}/store", tmp_path / machine) for machine in ("here", "there")]
        work(*stores)
        proxy.fault = lambda method, path: None
        check(*stores)
        assert proxy.faults > 5
