"""Bytes a second that artifacts move to a store on S3 and back, against plain s3fs with the same files and the same server.

    python -m benchmarks.store [--megabytes 256] [--files 4] [--rounds 5]

The server is moto's, on loopback, a process of its own, which is slower than the network of a cluster: what the store adds
(hashing every byte twice, locks, the manifest) stands beside what the server takes. Runs alternate; a row is the median.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

GOAL = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.store")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, server():
        compare(Path(name), options.megabytes, options.files, options.rounds)


@contextmanager
def server() -> Iterator[None]:
    """An S3 server on loopback, which s3fs finds through the environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    own = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "k"}
    os.environ.update(own, AWS_DEFAULT_REGION="us-east-1")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/moto-api/data.json", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert started.poll() is None, "the server did not start"
                time.sleep(0.1)
        yield
    finally:
        started.terminate()
        started.wait()


def compare(folder: Path, megabytes: int, files: int, rounds: int) -> None:
    import s3fs

    from tasks.store.artifacts import Artifact
    from tasks.store.store import Store

    plain = s3fs.S3FileSystem(use_listings_cache=False)
    plain.mkdir("bucket")
    source = folder / "source"
    source.mkdir()
    for number in range(files):
        (source / f"{number}.bin").write_bytes(os.urandom((megabytes << 20) // files))
    here, there = (Store("s3://bucket/store", folder / name) for name in ("here", "there"))

    def publish() -> None:
        with here.artifacts.publish(
            "tokens", "k"
        ) as staging:  # made where it is published: nothing is copied
            for path in source.iterdir():
                os.link(path, staging / path.name)

    def fetch() -> None:
        there.artifacts.path(here.artifacts.expect("tokens", "k"))

    def forget() -> None:
        here.artifacts.remove("tokens", "k")
        there.artifacts.evict(Artifact("tokens", "k", "", {}))
        shutil.rmtree(folder / "plain", ignore_errors=True)
        if plain.exists("bucket/plain"):
            plain.rm("bucket/plain", recursive=True)

    names = [f"{number}.bin" for number in range(files)]
    far = [f"bucket/plain/{name}" for name in names]
    (folder / "plain").mkdir()
    rows: dict[str, Callable[[], object]] = {
        "store, up": publish,
        "s3fs, up": lambda: plain.put([str(source / name) for name in names], far),
        "store, down": fetch,
        "s3fs, down": lambda: plain.get(far, [str(folder / "plain" / name) for name in names]),
    }
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, call in rows.items():
            (folder / "plain").mkdir(exist_ok=True)
            begun = time.perf_counter()
            call()
            rates[name].append(megabytes / (time.perf_counter() - begun))
        forget()
    print(f"{megabytes} MiB in {files} files; MiB a second")
    for name, found in rates.items():
        print(f"{name:<12} {statistics.median(found):7.1f}   ({', '.join(f'{rate:.0f}' for rate in found)})")
    for way in ("up", "down"):
        pairs = zip(rates[f"store, {way}"], rates[f"s3fs, {way}"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{way}: {ratio:.2f} of s3fs (goal {GOAL})")


if __name__ == "__main__":
    main()
