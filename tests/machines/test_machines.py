"""What builds machines without a machine: lines of the table, settings of package tools, denied locks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines import denied_locks
from tests.machines.__main__ import table_line
from tests.machines.debian import local_paths, package_settings
from tests.machines.machines import COMPILER, MACHINES
from tests.machines.quickstart import Row, counts

ROOT = Path(__file__).parents[2]


def test_each_circumstance_is_on_some_machine_and_in_the_table():
    facts = ", ".join(machine.circumstances for machine in MACHINES)
    for fact in (
        "uv",
        "PYTHON=python3.12",
        "git history",
        "non-ASCII",
        "without name and HOME",
        "root",
        "LANG=POSIX",
        "terminal",
        "1 core",
    ):
        assert fact in facts
    for fact in (
        "3 GB",
        "no file locks",
        "read-only checkout",
        "network",
        "make test",
        "no python3-venv",
        "no g++",
        "no python3-dev",
    ):
        assert fact in facts
    assert {machine.release for machine in MACHINES} == {"bookworm", "trixie", "testing"}
    assert len({machine.name for machine in MACHINES}) == len(MACHINES)
    assert any({*COMPILER} <= {*machine.packages} for machine in MACHINES)
    row = Row("trixie", "3.13.5", "terminal", "", "280 (89)", "79 (36)", "9 (4)")
    line = "| trixie | 3.13.5 | terminal | passes | 280 (89) | 79 (36) | 9 (4) | 2026-11-29 |"
    assert table_line(row, "2026-11-29") == line
    in_color = "\x1b[31m\x1b[1m2 failed\x1b[0m, \x1b[32m9 passed\x1b[0m\x1b[31m in 65.18s (0:01:05)\x1b[0m"
    assert counts(in_color) == "2 failed, 9 passed"


def test_package_settings_and_the_files_they_name_are_shown_to_the_machine(monkeypatch, tmp_path):
    for name in os.environ:
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    (tmp_path / "index/simple").mkdir(parents=True)
    (tmp_path / "pip.conf").write_text(
        f"[global]\nextra-index-url = https://example.com/simple file://{tmp_path}/index/simple\ntimeout = 7\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://example.com/uv")
    settings = package_settings()
    assert settings["PIP_TIMEOUT"] == "7"
    assert settings["UV_DEFAULT_INDEX"] == "https://example.com/uv"
    assert local_paths({"index": settings["PIP_EXTRA_INDEX_URL"]}) == [str(tmp_path / "index")]


@pytest.mark.compiles
def test_denied_locks_fail_with_enolck_only_below_the_checkouts(tmp_path, monkeypatch):
    monkeypatch.setattr(
        denied_locks, "SOURCE", denied_locks.SOURCE.replace('"/srv/"', f'"/{tmp_path.parts[1]}/"')
    )
    denied_locks.build(tmp_path / "denied.so")
    code = (
        "import fcntl, sys\n"
        "for path in sys.argv[1:]:\n"
        "    for lock in fcntl.flock, fcntl.lockf:\n"
        "        try:\n"
        "            lock(open(path, 'a'), fcntl.LOCK_EX); print('locked')\n"
        "        except OSError as error: print(error.errno)\n"
    )
    environment = {**os.environ, "LD_PRELOAD": str(tmp_path / "denied.so")}
    elsewhere = Path("/dev/shm") / f"trainshed-{os.getpid()}"
    command = [sys.executable, "-c", code, str(tmp_path / "lock"), str(elsewhere)]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    elsewhere.unlink()
    assert printed == ["37", "37", "locked", "locked"]
