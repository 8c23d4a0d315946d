"""An S3 server on loopback (moto), configured for s3fs by the standard AWS environment variables."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch, name: str = "bucket") -> Iterator[str]:
    """The `s3://` address of a new bucket that exists during the block."""
    import s3fs
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
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir(name)
        yield f"s3://{name}"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
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


def fill(folder: Path, prefix: str, name: str = "bucket") -> None:
    """Put a folder's files into the bucket directly in the server, without HTTP requests."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for path in folder.rglob("*"):
        if path.is_file():
            backend.put_object(name, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
