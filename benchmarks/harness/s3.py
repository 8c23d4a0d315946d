"""S3 server for benchmarks: moto in its own process, on loopback."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.ports import free_port


@contextmanager
def s3_server() -> Iterator[None]:
    """An S3 server on loopback, configured for s3fs by environment variables."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    os.environ.update(AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID="k", AWS_SECRET_ACCESS_KEY="k")
    os.environ.update(AWS_DEFAULT_REGION="us-east-1")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/moto-api/data.json", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, "moto.server: exited at start"
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()
