"""`trainshed gc` on full and read-only disks, and with runs/ on another disk.

A disk is full of bytes or of files.
"""

import json
import subprocess
import sys

from tests import disk

PROGRAM = """
import contextlib, io, json, subprocess, sys
from pathlib import Path
from flows.cli.main import main
from tasks.fleet.fleet import read_fleet
from tasks.store import activities
from tasks.store.store import Store

def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)

def mount(folder, options):
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)

def make(folder, options):
    mount(folder, options)
    write(folder / "runs/tiny/run.json", b'{"identity": "i"}')
    write(folder / "runs/tiny/artifacts.json", b'{"dataset": ["k"], "graphs": []}')
    for key in ("one", "two"):
        write(folder / f"artifacts/evaluation/{key}/data", bytes(9000))

def fill(folder, size):
    with contextlib.suppress(OSError):
        for number in range(10_000):
            write(folder / f"filler/{number}", bytes(size))

def gc(store):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        code = main(["gc", "--yes", "--store", str(store)])
    left = sorted(path.name for path in store.glob("artifacts/evaluation/*"))
    return [code, left, error.getvalue()]

root, found = Path(sys.argv[1]), {}
for name, options, size in (("bytes", "size=128k", 4096), ("files", "nr_inodes=60", 0)):
    make(root / name, options)
    with activities.begin(Store(str(root / name)), "run", "tiny"):
        fill(root / name, size)
        found[f"{name}, active"] = gc(root / name)
        (root / name / "filler/0").unlink()  # to release the lock
    fill(root / name, size)
    found[name] = gc(root / name)
make(root / "read-only", "size=1m")
subprocess.run(["mount", "-o", "remount,ro", root / "read-only"], check=True)
found["read-only"] = gc(root / "read-only")
make(root / "linked", "size=1m")
mount(root / "other", "size=1m")
store = Store(str(root / "linked"))
write(root / "other/runs/tiny~1/run.json", b"{}")
write(root / "other/runs/lost+found/file", b"")
(root / "linked/runs/tiny").rename(root / "linked/tiny")
(root / "linked/runs").rmdir()
(root / "linked/runs").symlink_to(root / "other/runs")
write(root / "linked/staging/x/files/run.json", b"{}")
store.run_folder("tiny")._local.move(str(root / "linked/tiny"), "runs/tiny")  # also across disks
names = sorted(run.name for run in read_fleet(store).runs)
found["linked"] = [*gc(root / "linked"), names, sorted(path.name for path in (root / "other/runs").iterdir())]
(root / "linked/runs").unlink()
(root / "linked/runs").symlink_to(root / "not mounted")
write(root / "linked/artifacts/evaluation/three/data", b"")
found["not mounted"] = gc(root / "linked")
print(json.dumps(found))
"""


def test_gc_frees_full_disks_and_removes_nothing_that_may_be_used(tmp_path):
    command = [*disk.small(tmp_path / "disks", "1m"), sys.executable, "-c", PROGRAM, str(tmp_path / "disks")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("bytes", "files"):
        code, left, error = found[f"{name}, active"]
        assert (code, left) == (2, ["one", "two"])
        assert "run tiny is active in process" in error
        assert found[name][:2] == [0, []], found[name]
    code, left, error = found["read-only"]
    assert (code, left) == (1, ["one", "two"])
    assert f"Read-only file system: '{tmp_path}/disks/read-only/" in error
    code, left, error, names, runs = found["linked"]
    assert (code, left) == (0, [])
    assert names == ["tiny", "tiny~1"]
    assert runs == ["lost+found", "tiny"]
    code, left, error = found["not mounted"]
    assert (code, left) == (1, ["three"])
    assert "which is missing: what runs use is unknown" in error
