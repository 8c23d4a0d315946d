"""Compare uploading and downloading artifacts on S3 with plain s3fs, with the same files and server.

The server is moto on loopback in its own process, which is slower than a cluster's network. The store additionally hashes every
byte twice, and writes locks and the manifest. Sides alternate; figures are medians.
"""

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.timing import alternate_timed, make_parser, median_ratio

GOAL = 0.8


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--files", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, s3_server():
        compare(Path(name), options.megabytes, options.files, options.rounds)


@contextmanager
def s3_server() -> Iterator[None]:
    """An S3 server on loopback, configured for s3fs by environment variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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


def compare(folder: Path, megabytes: int, files: int, rounds: int) -> None:
    import s3fs

    from tasks.store.artifacts import Artifact
    from tasks.store.store import Store

    plain = s3fs.S3FileSystem(use_listings_cache=False)
    plain.mkdir("bucket")
    names = [f"{number}.bin" for number in range(files)]
    source, target = folder / "source", folder / "plain"
    source.mkdir()
    target.mkdir()
    for name in names:
        (source / name).write_bytes(os.urandom((megabytes << 20) // files))
    uploader, downloader = (Store("s3://bucket/store", folder / name) for name in ("up", "down"))

    def publish() -> None:
        with uploader.artifacts.publish("tokens", "k") as staging:
            for path in source.iterdir():
                os.link(path, staging / path.name)  # instead of a copy, as a step would write there directly

    def fetch() -> None:
        downloader.artifacts.path(uploader.artifacts.expect("tokens", "k"))

    def reset() -> None:
        uploader.artifacts.remove("tokens", "k")
        downloader.artifacts.evict(Artifact("tokens", "k", "", {}))
        shutil.rmtree(target)
        target.mkdir()
        plain.rm("bucket/plain", recursive=True)

    remote = [f"bucket/plain/{name}" for name in names]
    sides = {
        "store, up": publish,
        "s3fs, up": lambda: plain.put([str(source / name) for name in names], remote),
        "store, down": fetch,
        "s3fs, down": lambda: plain.get(remote, [str(target / name) for name in names]),
    }
    seconds = alternate_timed(sides, rounds, after_round=reset)
    print(f"{megabytes} MiB in {files} files; MiB/s")
    for side, times in seconds.items():
        rates = [megabytes / duration for duration in times]
        print(f"{side:<12} {statistics.median(rates):7.1f}   ({', '.join(f'{rate:.0f}' for rate in rates)})")
    for direction in ("up", "down"):
        ratio = median_ratio(seconds[f"s3fs, {direction}"], seconds[f"store, {direction}"])
        print(f"{direction}: {ratio:.2f} of s3fs (goal {GOAL})")


if __name__ == "__main__":
    main()
