"""Collect in a folder what a rented machine without a network lacks, before its time starts.

    python -m benchmarks.gpu_lease.prepare lease-files --python 3.12

The folder gets wheels of the packages that measured modules import, metadata of this package, NCCL with one architecture's code,
compressed, and `go.sh`, which installs them there and starts the lease. In the repository's root:
`bash lease-files/go.sh 9 lease.jsonl`.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.gpu_lease.slim_nccl import slim
from benchmarks.harness.timing import make_parser

PACKAGES = ("pydantic", "rich", "psutil", "pyyaml")  # with what they require
NCCL = "nvidia-nccl-cu13==2.30.7"  # the first versions with several ranks on a GPU
LIBRARY = "libnccl.so.2"
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
GO = """# On the rented machine, in the root of the repository: bash {folder}/go.sh MINUTES FILE
set -e
here=$(cd "$(dirname "$0")" && pwd)
site=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$here"/wheels/*.whl
cp -r "$here"/metadata/* "$site"
python3 -c "import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], 'wb'))" \\
    "$here/{library}.xz" "$site/{library}"
PYTHONPATH="$site:$PWD" exec python3 -m benchmarks.gpu --minutes "$1" --out "$2" --nccl "$site/{library}"
"""


def pip(*arguments: str, python: str) -> None:
    """Run `pip download` for another machine."""
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run(
        [*command, "--python-version", python, "--implementation", "cp", *platforms, *arguments], check=True
    )


def pinned(names: tuple[str, ...]) -> list[str]:
    """The packages and all that they require, at the versions that are installed here."""
    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = version(name)
        needed = (Requirement(each) for each in requires(name) or ())
        waiting += [
            each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    return [f"{name}=={number}" for name, number in sorted(found.items())]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add("--python VERSION", "version of Python on the rented machine", default="3.12")
    parser.add("--keep N", "architecture of its GPU: 90 is that of H100 and H200", type=int, default=90)
    options = parser.parse_args()
    folder: Path = options.folder
    metadata = folder / "metadata" / f"trainshed-{version('trainshed')}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: trainshed\nVersion: {version('trainshed')}\n"
    (metadata / "METADATA").write_text(text)
    pip("-d", str(folder / "wheels"), *pinned(PACKAGES), python=options.python)
    with tempfile.TemporaryDirectory() as work:
        pip("-d", work, NCCL, python=options.python)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(LIBRARY))
            (Path(work) / "whole").write_bytes(archive.read(member))
        slim(Path(work) / "whole", Path(work) / LIBRARY, options.keep)
        with lzma.open(folder / f"{LIBRARY}.xz", "wb", preset=1) as compressed:
            compressed.write((Path(work) / LIBRARY).read_bytes())
    (folder / "go.sh").write_text(GO.format(folder=folder, library=LIBRARY))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"wrote {folder}, {size / 2**20:.0f} MiB; on the machine: bash {folder}/go.sh 9 lease.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
