"""Test of the C++ toolchain: builds and loads a small Python extension, as inductor does on a CPU.

A fault is reported in one phrase that says what to install or change, instead of pages of the compiler's output.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from profiles.files import file_locks, state_files

COMPILERS = ("g++", "clang++")
# What inductor's code needs: Python's and OpenMP's headers, and C++20.
SOURCE = """
#include <Python.h>
#include <omp.h>
#include <concepts>
template <std::integral T> constexpr T twice(T x) { return 2 * x; }
static PyModuleDef probe = {PyModuleDef_HEAD_INIT, "probe", nullptr, twice(-1), nullptr};
extern "C" PyObject* PyInit_probe() { return PyModule_Create(&probe); }
"""
OPTIONS = ("-std=c++20", "-shared", "-fPIC")
TIMEOUT = 120.0  # seconds, on a machine that swaps; usually it takes half a second
NO_HEADERS = "no Python headers (install python3-dev)"
NO_LOCKS = "no file locks for compiled code (choose a --store whose file system has them)"
# What a compiler prints, or how a process that compiles fails, if the machine is at fault and not the code.
FAULTS = (
    (r"Python\.h.*(not found|No such file)", NO_HEADERS),
    (r"omp\.h.*(not found|No such file)", "no OpenMP headers (install g++, or libomp-dev for clang++)"),
    (r"cannot execute .*cc1plus|cc1plus.*No such file", "only a part of g++ (install g++)"),
    (
        r"No space left|Disk quota exceeded",
        "no space for compiled code (free some in the store and in {temporary})",
    ),
    (
        r"Read-only file system|Permission denied",
        "no permission to write compiled code (to the store and to {temporary})",
    ),
    (
        r"\b[Kk]illed\b|SIGKILL|Cannot allocate memory|[Oo]ut of memory|virtual memory exhausted|MemoryError|bad_alloc",
        "too little memory for the C++ compiler (free some, or set compile.processes=1)",
    ),
    (
        r"std=c\+\+20|concepts.*(not found|No such file)|std::integral|invalid value 'c\+\+20'",
        "no compiler for C++20 (install g++ 11 or newer)",
    ),
)


def cpp_compiler() -> str | None:
    """Path of the C++ compiler that inductor uses; None if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", COMPILERS[0]), *COMPILERS))), None)


def missing() -> str | None:
    """What is not installed for compiling, as a phrase that says what to install; None if nothing."""
    if cpp_compiler() is None:
        return "no C++ compiler (install g++)"
    return None if state_files.exists(Path(sysconfig.get_path("include")) / "Python.h") else NO_HEADERS


def fault(folder: Path) -> str | None:
    """Why code cannot be compiled, or loaded from a folder, as such a phrase; or None. Tests once."""
    return missing() or _fault(cpp_compiler(), folder.absolute())


@cache
def _fault(compiler: str, folder: Path) -> str | None:
    try:
        state_files.make_folder(folder)
        with tempfile.TemporaryDirectory(prefix=".toolchain-", dir=folder) as work:
            if not file_locks.supported(Path(work, "lock")):  # inductor locks each file that it compiles
                return NO_LOCKS
            source, library = Path(work, "probe.cpp"), Path(work, "probe.so")
            source.write_text(SOURCE)
            headers = f"-I{sysconfig.get_path('include')}"
            command = [compiler, *OPTIONS, headers, str(source), "-o", str(library)]
            built = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
            if built.returncode:
                killed = "killed\n" if built.returncode < 0 else ""
                reason = of_machine(killed + built.stderr)
                return reason or f"no working C++ compiler ({_first_error(built.stderr)})"
            ctypes.CDLL(str(library))
    except subprocess.TimeoutExpired:
        return f"no C++ compiler that ends within {TIMEOUT:.0f} s ({compiler})"
    except OSError as error:
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return (
                f"no permission to load compiled code from {folder} (mounted noexec; choose another --store)"
            )
        return of_machine(str(error)) or f"no working C++ compiler ({error})"
    return None


def of_machine(output: str) -> str | None:
    """The fault of this machine that caused an error, as such a phrase; None if it may be the code's."""
    found = (phrase for pattern, phrase in FAULTS if re.search(pattern, output))
    return next(found, "").format(temporary=tempfile.gettempdir()) or None


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), (lines or ["it says nothing"])[0])[:200]
