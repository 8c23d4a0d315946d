"""Faults of a machine's C++ toolchain, each told in one phrase that says what to do."""

import os
import sysconfig
from pathlib import Path

import pytest

from modeling.compilation import toolchain
from profiles.files import file_locks


def compiler(folder: Path, script: str) -> Path:
    """A C++ compiler that runs this script."""
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.compiles
def test_a_working_compiler_is_tested_once(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    path = compiler(tmp_path, f'echo . >> "{calls}"; exec g++ "$@"')
    monkeypatch.setenv("CXX", str(path))
    folder = tmp_path / "a folder"
    assert [toolchain.fault(folder) for _ in range(3)] == [None] * 3
    assert calls.read_text() == ".\n"
    assert list(folder.iterdir()) == []


@pytest.fixture
def headers(tmp_path, monkeypatch):
    """Folder with Python's headers, which this machine may lack."""
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return folder


@pytest.mark.parametrize(
    ("script", "phrase"),
    [
        ("echo 'a.cpp:2:10: fatal error: Python.h: No such file or directory' >&2; exit 1", "install python3-dev"),
        ("""echo "g++: error: unrecognized command line option '-std=c++20'" >&2; exit 1""", "install g++ 11 or newer"),
        ("echo \"cc: fatal error: cannot execute 'cc1plus': execvp\" >&2; exit 1", "install g++"),
        ("echo 'a.cpp:4:10: fatal error: concepts: No such file or directory' >&2; exit 1", "install g++ 11 or newer"),
        ("echo 'a.cpp:3:10: fatal error: omp.h: No such file or directory' >&2; exit 1", "install g++, or libomp-dev"),
        ("echo 'a.s: Assembler messages: No space left on device' >&2; exit 1", "no space for compiled code"),
        ("echo 'Cannot create temporary file in /tmp/: Permission denied' >&2; exit 1", "no permission to write"),
        ("echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", "too little memory"),
        ("kill -9 $$", "too little memory"),
        ("echo 'warning: x'; echo 'a.cpp:1: error: something else' >&2; exit 1", "(a.cpp:1: error: something else)"),
        ('while [ "$1" != -o ]; do shift; done; echo text > "$2"', "no working C++ compiler ("),
    ],
)  # fmt: skip
def test_each_fault_is_one_line_with_what_to_do(headers, tmp_path, monkeypatch, script, phrase):
    monkeypatch.setenv("CXX", str(compiler(tmp_path, script)))
    found = toolchain.fault(tmp_path)
    assert phrase in found
    assert "\n" not in found


def test_missing_headers_and_a_folder_without_execution_or_locks_are_named(headers, tmp_path, monkeypatch):
    write_text = compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo text > "$2"')
    monkeypatch.setenv("CXX", str(write_text))
    status = os.statvfs(tmp_path)
    fields = [getattr(status, name) for name in (
        "f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_flag", "f_namemax",
    )]  # fmt: skip
    fields[8] |= os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    assert f"from {tmp_path} (mounted noexec" in toolchain.fault(tmp_path)
    monkeypatch.setattr(file_locks, "supported", lambda _: False)
    assert toolchain.fault(tmp_path / "shared").startswith("no file locks for compiled code (choose")
    (headers / "Python.h").unlink()
    assert toolchain.missing() == "no Python headers (install python3-dev)"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX")
    assert toolchain.missing() == "no C++ compiler (install g++)"
