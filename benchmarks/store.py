"""Compare uploading and downloading artifacts on S3 with plain s3fs, with the same files and server.

The server is moto on loopback in its own process, which is slower than a cluster's network. The store additionally hashes every
byte twice, and writes locks and the manifest. Sides alternate; figures are medians.
"""

import os
import shutil
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness.results import Results
from benchmarks.harness.s3 import s3_server
from benchmarks.harness.timing import alternate_timed, make_parser, median_ratio

GOAL = 0.8


def main() -> None:
    parser = make_parser(__doc__, rounds=5, out="store")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--files", type=int, default=4)
    options = parser.parse_args()
    results = Results(options.out)
    with tempfile.TemporaryDirectory() as name, s3_server():
        compare(Path(name), options.megabytes, options.files, options.rounds, results)


def compare(folder: Path, megabytes: int, files: int, rounds: int, results: Results) -> None:
    import s3fs

    from tasks.store.artifacts import Artifact, ArtifactId
    from tasks.store.store import Store

    id = ArtifactId("tokens", "k")
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
        with uploader.artifacts.publish(id) as staging:
            for path in source.iterdir():
                os.link(path, staging / path.name)  # instead of a copy, as a step would write there directly

    def fetch() -> None:
        downloader.artifacts.path(uploader.artifacts.expect(id))

    def reset() -> None:
        uploader.artifacts.remove(id)
        downloader.artifacts.evict(Artifact(id))
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
    seconds = alternate_timed(sides, rounds, after_round=reset, keep=results.turn)
    print(f"{megabytes} MiB in {files} files; MiB/s")
    for side, times in seconds.items():
        rates = [megabytes / duration for duration in times]
        print(f"{side:<12} {statistics.median(rates):7.1f}   ({', '.join(f'{rate:.0f}' for rate in rates)})")
    for direction in ("up", "down"):
        ratio = median_ratio(seconds[f"s3fs, {direction}"], seconds[f"store, {direction}"])
        print(f"{direction}: {ratio:.2f} of s3fs (goal {GOAL})")


if __name__ == "__main__":
    main()
