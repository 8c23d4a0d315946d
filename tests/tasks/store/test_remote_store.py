"""A store on S3 with a busy server, lost connections, interrupted uploads and many artifacts."""

import itertools
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import UTC, datetime

import pytest
import s3fs

from parallel.checkpoint import locations
from profiles.errors import ProfileError
from profiles.files import retries, state_files
from tasks.sources import remote
from tasks.store.artifacts import ArtifactId
from tasks.store.backends.backend import FileInfo
from tasks.store.backends.objects import ObjectBackend
from tasks.store.mirrored_artifacts import LIST_WHOLE_KIND
from tasks.store.store import Store
from tests import s3
from tests.tasks.store.test_artifacts import FILES, publish
from tests.unreliable import Proxy

pytestmark = pytest.mark.slow

LARGE = {"large.bin": os.urandom(12 << 20)}


@pytest.fixture
def network(monkeypatch):
    """A faulty proxy in front of the server, and the store's address."""
    with s3.bucket(monkeypatch) as address, Proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        s3fs.S3FileSystem.clear_instance_cache()
        yield proxy, f"{address}/store"


def contents(store: Store, artifact) -> dict[str, bytes]:
    """Files of an artifact but its manifest, downloaded."""
    folder = store.artifacts.path(artifact)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_files_on_azure_are_identified_by_their_etag(monkeypatch, tmp_path):
    from fsspec.implementations.memory import MemoryFileSystem

    changed = datetime(2026, 1, 2, tzinfo=UTC)
    listed = {"name": "/bucket/a", "type": "file", "size": 3, "etag": "0x8D", "last_modified": changed}
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *arguments, **options: [listed])
    found = Store("memory://bucket", tmp_path).backend.entries("")
    assert found == {"a": FileInfo(3, "0x8D", changed.timestamp())}


@pytest.mark.s3
@pytest.mark.parametrize("fault", ["busy", "lost", "unanswered"])
def test_failed_requests_are_retried(network, tmp_path, fault, caplog):
    caplog.set_level(logging.DEBUG)
    proxy, address = network
    here, there = Store(address, tmp_path / "here"), Store(address, tmp_path / "there")
    requests = itertools.count()
    proxy.fault = lambda method, path: fault if next(requests) % 3 == 0 else None
    with here.artifacts.lock(ArtifactId("tokens", "k1")):
        made = publish(here, files={**FILES, **LARGE})
    assert there.artifacts.find(ArtifactId("tokens", "k1")) == made
    assert contents(there, made) == {**FILES, **LARGE}
    assert proxy.faults > 5
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in caplog.text


@pytest.mark.s3
def test_refused_deletion_is_an_error_that_names_what_is_left(network, tmp_path):
    proxy, address = network
    backend = Store(address, tmp_path / "here").backend
    for file in ("checkpoints/step_2/weights", "identity"):
        backend.write(f"runs/a/{file}", b"1")
    proxy.fault = lambda method, path: "refused" if method == "POST" and "delete" in path else None
    with pytest.raises(
        PermissionError, match=r"refused to delete 2 files .*, such as checkpoints/step_2/weights"
    ):
        backend.remove("runs/a")
    with pytest.raises(PermissionError, match="refused to delete 1 file "):
        backend.move("runs/a", "runs/a~1")
    assert backend.read("runs/a/identity") == b"1"  # deleted last
    with pytest.raises(PermissionError, match="refused to delete 1 object "):
        locations.discard(f"{address}/runs/a/checkpoints/step_2")
    with pytest.raises(PermissionError, match="refused to delete 1 object "):
        locations.move_aside(f"{address}/runs/a/checkpoints", [2], f"{address}/runs/a/checkpoints~1")
    proxy.fault = lambda method, path: None
    backend.remove("runs/a/identity")
    backend.remove("runs/a")
    assert backend.files("runs/a") == {}


@pytest.mark.s3
@pytest.mark.parametrize("endpoint", s3.WITHOUT_TRAILERS)
def test_server_without_newer_checksums_is_rejected_until_they_are_off(
    network, endpoint, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    proxy, address = network
    proxy.fault = lambda method, path: "older"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint or proxy.url)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(ObjectBackend, "_exclusive", set())
    with (
        pytest.raises(ProfileError, match="set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"),
        Store(address, tmp_path / "here").lock("run-a"),
    ):
        pass
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    s3fs.S3FileSystem.clear_instance_cache()
    backend = Store(address, tmp_path / "here").backend
    conflicts = iter(["conflict"])
    proxy.fault = lambda method, path: (
        next(conflicts, "older") if "run-b" in path and method == "PUT" else "older"
    )
    assert backend.create("runs/run-b/identity", b"1")
    assert endpoint or next(conflicts, None) is None
    # Of requests that delete several objects, SDKs send a checksum nevertheless.
    backend.move("runs/run-b", "runs/run-b~1")
    backend.remove("runs/run-b~1")
    assert backend.files("runs") == {}
    backend.write("runs/a/checkpoints/step_1/complete.json", b"{}")
    locations.move_aside(f"{address}/runs/a/checkpoints", [1], f"{address}/runs/a/checkpoints~1")
    locations.discard(f"{address}/runs/a/checkpoints~1/step_1")
    assert backend.files("runs/a") == {}
    assert endpoint or "deleting 1 objects one by one" in caplog.text


def test_web_page_in_place_of_an_answer_is_an_outage(network, tmp_path, monkeypatch):
    monkeypatch.setattr(state_files, "DELAYS", (0.01,) * 6)
    monkeypatch.setattr(locations, "READ_PAUSES", (0.01,))
    monkeypatch.setattr(retries, "sleep", lambda seconds: None)
    proxy, address = network
    here, there = Store(address, tmp_path / "here"), Store(address, tmp_path / "there")
    made = publish(here)
    here.backend.write("runs/a/checkpoints/step_2/complete.json", b"{}")
    location = f"{address}/runs/a/checkpoints"
    locations.claim(location, "this run")
    pages = itertools.count()
    proxy.fault = lambda method, path: "page" if method == "GET" and next(pages) % 2 == 0 else None
    assert contents(there, made) == FILES
    assert proxy.faults > 2
    proxy.fault = lambda method, path: "page" if method == "GET" else None
    for read in (
        lambda: here.backend.read("runs/a/checkpoints/owner"),
        lambda: locations.read_marker(f"{location}/step_2"),
        lambda: locations.claimed_by(location),
        lambda: remote.cat_file(*remote.open_filesystem(f"{proxy.url}/state.json")),
        lambda: remote.open_file(*remote.open_filesystem(f"{proxy.url}/a.txt")).read(),
        lambda: remote.get_file(*remote.open_filesystem(f"{proxy.url}/a.safetensors"), tmp_path / "a"),
    ):
        with pytest.raises(
            ConnectionError, match=r"a web page was answered in place of (this file|the answer to Get)"
        ):
            read()
    s3fs.S3FileSystem.clear_instance_cache()
    for listing in (
        lambda: Store(address, tmp_path / "here").backend.files("runs"),
        lambda: [*locations.complete_checkpoints(location)],
    ):
        with pytest.raises(ConnectionError, match="a web page was answered in place of a listing"):
            listing()
    proxy.fault = lambda method, path: "page" if method in ("PUT", "POST", "DELETE") else None
    here = Store(address, tmp_path / "here")
    (tmp_path / "file").write_bytes(b"1")
    for change in (
        lambda: here.backend.write("runs/a/state.json", b"{}"),
        lambda: here.backend.upload(tmp_path, ["file"], "runs/a"),
        lambda: here.backend.copy("runs/a/checkpoints", "runs/b/checkpoints"),
        lambda: here.backend.remove("runs/a/checkpoints"),
        lambda: locations.claim(location, "another run"),
    ):
        with pytest.raises(OSError, match="a web page was answered in place of the answer to "):
            change()
    proxy.fault = lambda method, path: None
    here.backend.write("runs/a/report.html", page := b"<html><body>a report</body></html>")
    assert here.backend.read("runs/a/report.html") == page
    assert locations.claimed_by(location) == "this run"
    assert there.artifacts.find(ArtifactId("tokens", "k1")) == made  # nothing counted as corrupted
    assert [step for step, _ in locations.complete_checkpoints(location)] == [2]


@pytest.mark.s3
def test_truncated_responses_are_retried(network, tmp_path):
    proxy, address = network
    made = publish(Store(address, tmp_path / "here"), files={**FILES, **LARGE})
    requests = itertools.count()
    proxy.fault = lambda method, path: "half" if method == "GET" and next(requests) % 2 else None
    there = Store(address, tmp_path / "there")
    assert contents(there, made) == {**FILES, **LARGE}
    assert proxy.faults


@pytest.mark.s3
def test_a_failed_upload_publishes_nothing_and_is_repeated_from_the_local_copy(
    network, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    proxy, address = network
    here, there = Store(address, tmp_path / "here"), Store(address, tmp_path / "there")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # fail without long backoff
    proxy.fault = lambda method, path: "lost" if method in ("PUT", "POST") and "large.bin" in path else None
    with pytest.raises(OSError, match="artifacts/tokens/k1: Connection was closed"):
        publish(here, files={**FILES, **LARGE})
    proxy.fault = lambda method, path: None
    assert there.artifacts.find(ArtifactId("tokens", "k1")) is None
    assert here.artifacts.find(ArtifactId("tokens", "k1"))  # uploads the local copy
    assert "tokens k1 is missing in the store; uploading the local copy" in caplog.text
    assert contents(there, there.artifacts.find(ArtifactId("tokens", "k1"))) == {**FILES, **LARGE}
    here.artifacts.remove(ArtifactId("tokens", "k1"))
    assert here.artifacts.find(ArtifactId("tokens", "k1")) is None


@pytest.mark.s3
def test_a_process_killed_during_its_upload_publishes_nothing(network, tmp_path):
    proxy, address = network
    uploading = threading.Event()

    def slow(method: str, path: str) -> None:
        if method in ("PUT", "POST") and "large.bin" in path:
            uploading.set()
            time.sleep(0.5)

    proxy.fault = slow
    code = """
        import os, sys
        from tasks.store.artifacts import ArtifactId
        from tasks.store.store import Store
        with Store(sys.argv[1], sys.argv[2]).artifacts.publish(ArtifactId("tokens", "k1")) as folder:
            for part in range(4):
                (folder / f"{part}-large.bin").write_bytes(os.urandom(12 << 20))
        """
    writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), address, str(tmp_path / "here")])
    try:
        assert uploading.wait(60)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    proxy.fault = lambda method, path: None
    there = Store(address, tmp_path / "there")
    assert there.artifacts.find(ArtifactId("tokens", "k1")) is None
    assert contents(there, publish(there)) == FILES


@pytest.mark.s3
def test_concurrent_writers_leave_one_complete_artifact(network, tmp_path):
    _, address = network
    stores = [Store(address, tmp_path / str(number)) for number in range(4)]
    files = [{**FILES, "writer": str(number).encode() * (6 << 20)} for number in range(4)]
    threads = [
        threading.Thread(target=publish, args=(store,), kwargs={"files": each})
        for store, each in zip(stores, files, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = Store(address, tmp_path / "there")
    assert contents(there, there.artifacts.find(ArtifactId("tokens", "k1"))) in files


@pytest.mark.s3
def test_many_artifacts_are_listed_over_several_pages(tmp_path, monkeypatch):
    shards = [f"k{number}" for number in range(LIST_WHOLE_KIND + 5)]
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "100")  # files per page of a listing; 1000 elsewhere
    files = 9 if s3.OTHER_SERVER else 1
    with s3.bucket(monkeypatch) as address:
        local = Store(str(tmp_path / "local"))
        for key in shards:
            with local.artifacts.publish(ArtifactId("tokens", key)) as folder:
                for number in range(files):
                    (folder / f"{number}.idx").write_bytes(key.encode())
        publish(local, "dataset", "d1", FILES, requires=[ArtifactId("tokens", key) for key in shards])
        s3.fill(tmp_path / "local/artifacts", f"{address}/artifacts")
        there = Store(address, tmp_path / "there")
        assert s3fs.S3FileSystem().call_s3("list_objects_v2", Bucket=address[5:])["IsTruncated"]
        assert len(there.backend.files("artifacts/tokens")) == (files + 1) * len(shards)
        assert there.artifacts.find(ArtifactId("dataset", "d1")).summary == {"tokens": 3}


@pytest.mark.s3
def test_missing_bucket_is_named_and_no_empty_store(tmp_path, monkeypatch):
    with s3.bucket(monkeypatch) as address:
        with pytest.raises(ProfileError, match="there is no such bucket, or not at this endpoint"):
            Store(address.replace("bucket", "another"), tmp_path).existing()
        with pytest.raises(ProfileError, match="there is nothing at this prefix"):
            Store(f"{address}/new", tmp_path).existing()


def test_missing_credentials_are_an_error_at_once(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/missing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ProfileError, match="store = s3://bucket/runs: no S3 credentials; set AWS_PROFILE"):
        ObjectBackend("s3://bucket/runs").read("run.json")
