"""A bucket of an S3 server, configured for s3fs by the standard AWS environment variables.

The server is moto on loopback or, if TRAINSHED_TEST_S3 has its address, another one, whose credentials are in the environment.
`make test-s3` runs all tests marked `s3` against Ceph's radosgw (radosgw.py).
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer

OTHER_SERVER = os.environ.get("TRAINSHED_TEST_S3")
# Endpoints that reject the checksums of newer AWS SDKs: a proxy of the tests; radosgw 16 over TLS.
WITHOUT_TRAILERS = [None, *filter(None, [os.environ.get("TRAINSHED_TEST_S3_TLS")])]
SECRET = "a-secret-access-key-that-only-the-tests-know"  # moto accepts any


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The `s3://` address of a new bucket that exists during the block."""
    import s3fs

    with _other_server(OTHER_SERVER, monkeypatch) if OTHER_SERVER else _moto(monkeypatch):
        s3fs.S3FileSystem.clear_instance_cache()
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        s3fs.S3FileSystem().mkdir(name)
        try:
            yield f"s3://{name}"
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            if OTHER_SERVER:
                monkeypatch.setenv("AWS_ENDPOINT_URL", OTHER_SERVER)  # a test may have put a proxy before it
                _remove(name)


def fill(folder: Path, address: str) -> None:
    """Put a folder's files below an address; into moto directly, without HTTP requests."""
    import s3fs

    paths = [path for path in folder.rglob("*") if path.is_file()]
    name, _, prefix = address.removeprefix("s3://").partition("/")
    if OTHER_SERVER:
        targets = [f"{address}/{path.relative_to(folder)}" for path in paths]
        s3fs.S3FileSystem().put([str(path) for path in paths], targets)
        return
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for path in paths:
        backend.put_object(name, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())


@contextmanager
def _moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _make_conditional_requests_atomic(server)
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        urlopen(
            Request(f"{url}/moto-api/reset", method="POST")
        ).close()  # moto's state is global to the process
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield
    finally:
        server.stop()


def _make_conditional_requests_atomic(server: ThreadedMotoServer) -> None:
    """Handle conditional requests one at a time.

    moto tests a condition and stores the object in two steps.
    """
    application, lock = server._server.app, threading.Lock()

    def one_at_a_time(environ: dict[str, Any], start_response: Any) -> Any:
        with lock if {"HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"} & environ.keys() else nullcontext():
            return application(environ, start_response)

    server._server.app = one_at_a_time


@contextmanager
def _other_server(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", os.environ.get("AWS_DEFAULT_REGION", "us-east-1"))
    yield


def _remove(name: str) -> None:
    """Remove a bucket with its objects and what interrupted uploads left."""
    import s3fs

    files = s3fs.S3FileSystem()
    for upload in files.call_s3("list_multipart_uploads", Bucket=name).get("Uploads", []):
        files.call_s3("abort_multipart_upload", Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
    files.rm(name, recursive=True)
    files.clear_instance_cache()
