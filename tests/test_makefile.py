"""Makefile and install.py: what targets install and show, with a pip that downloads nothing."""

import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import install

ROOT = Path(__file__).parents[1]
PYTHON = Path(sys.executable).resolve()  # outside the checkout, whose path may have spaces
NEURON = "NEURON_INDEX=https://example.com/simple"


def commands(folder: Path, *arguments: str) -> str:
    """The commands that `make` would run."""
    make = ["make", "--no-print-directory", "-n", *arguments]
    return subprocess.run(make, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def folder(tmp_path):
    """A folder in which nothing is installed."""
    folder = tmp_path / "a folder, größer"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "install.py", *map(str, ROOT.glob("constraints*.txt"))):
        shutil.copy(ROOT / name, folder)
    return folder


def test_system_packages_have_the_headers_that_python_lacks(folder):
    code = "import sys, sysconfig; sysconfig.get_path = lambda name: '/nowhere'; exec(sys.argv[2])"
    bare = folder / "python"
    bare.write_text(f'#!/bin/sh\nexec {PYTHON} -c "{code}" "$@"\n')
    bare.chmod(0o755)
    complete = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    for python, lacks in (("./python", True), (PYTHON, not complete)):
        assert ("g++ python3-dev" in commands(folder, "test-system", f"PYTHON={python}")) == lacks


PIP = """#!/bin/sh
case "$*" in *importlib*)
  echo "$@ HOME=$HOME USER=$USER" > compiled
  test ! -e unusable || { echo 'ImportError: libgomp.so.1' >&2; exit 1; }
  exit;;
esac
echo "$@" > arguments
test -d "$TMPDIR" && echo "Obtaining file:///checkout"
echo '  Preparing editable metadata (pyproject.toml): started'
sleep 0.3
echo 'Collecting torch==2.13.0'
echo '  Downloading torch-2.13.0-cp313-cp313-manylinux_2_28_x86_64.whl.metadata (32 kB)'
sleep 0.5
echo '  Downloading torch-2.13.0-cp313-cp313-manylinux_2_28_x86_64.whl (526.6 MB)'
mkdir "$TMPDIR/pip-unpack-1"
printf '%3000000s' '' > "$TMPDIR/pip-unpack-1/torch-2.13.0-cp313-cp313-manylinux_2_28_x86_64.whl"
sleep 0.5
echo 'Installing collected packages: torch, trainshed'
sleep 0.5
test ! -e broken || { echo 'ERROR: No space left on device'; exit 1; }
"""


@pytest.fixture
def stub(folder, monkeypatch):
    """A folder whose .venv has a pip that prints what pip prints, without uv and without a GPU."""
    (folder / ".venv/bin").mkdir(parents=True)
    for name in ("python", "pip"):
        (folder / ".venv/bin" / name).write_text(PIP)
        (folder / ".venv/bin" / name).chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(install, "GPU_FILES", ())
    monkeypatch.setitem(install.SECONDS, False, 0.2)
    (folder / ".venv/constraints.txt").write_text("torch==2.14.1\n")  # of an earlier installation
    monkeypatch.setattr(sys, "argv", ["install.py", "--index", "", "--index", "https://example.com/cpu"])
    return folder


def test_install_runs_nothing_else(folder):
    printed = commands(folder, "install")
    assert "install.py" in printed
    assert ".venv/bin/trainshed" not in printed


def test_extra_neuron_is_installed_after_an_installation_without_it(folder):
    (folder / ".venv").mkdir()
    (folder / ".venv/installed").touch()
    assert "install" not in commands(folder, "check-device")
    printed = commands(folder, NEURON, "check-device")
    (line,) = [line for line in printed.splitlines() if "install.py" in line]
    assert '--index "https://example.com/simple"' in line
    assert "--extra neuron" in line  # with torch, so that pip chooses versions that go together
    removal, stamps = "rm -f .venv/installed*", "touch .venv/installed .venv/installed-neuron"
    # An interrupted installation is no complete one.
    assert printed.index(removal) < printed.index("install.py") < printed.index(stamps)
    (folder / ".venv/installed-neuron").touch()
    assert "install" not in commands(folder, NEURON, "check-device")


def test_another_version_of_torch_is_installed_in_place_of_the_default_and_tested_beside_it(folder):
    (folder / ".venv").mkdir()
    (folder / ".venv/installed").touch()
    assert "--pins constraints-torch-2.14.txt" in commands(folder, "install", "TORCH=2.14")
    printed = commands(folder, "test-torch214")
    installs = [line for line in printed.splitlines() if "install.py" in line]
    assert all(
        "--venv .venv-torch214" in line and "--pins constraints-torch-2.14.txt" in line for line in installs
    )
    assert ".venv-torch214/bin/python -m pytest" in printed
    with pytest.raises(subprocess.CalledProcessError) as failed:
        commands(folder, "install", "TORCH=2.15")
    assert "TORCH=2.15: not supported; choose one of: 2.13 2.14." in failed.value.stderr
    (folder / ".venv/installed").rename(folder / ".venv/installed-torch-2.14")
    assert "install" not in commands(folder, "check-device")  # keeps the version
    assert "--pins" not in commands(folder, "install", "TORCH=2.13")


@pytest.mark.parametrize("version", [(3, 10), (3, 15), None])
def test_a_missing_or_unsupported_python_is_one_line(folder, version):
    python = folder.parent / "python3"
    if version:
        python.write_text(f'#!/bin/sh\nexec {PYTHON} -c "import sys; sys.version_info = {version}\n$2"\n')
        python.chmod(0o755)
    made = subprocess.run(["make", "install", f"PYTHON={python}"], cwd=folder, capture_output=True, text=True)
    line, failed = made.stderr.splitlines()
    expected = "needs Python 3.11 to 3.14, and" if version else "not found; as root: apt-get install python3"
    assert expected in line
    assert "Error 1" in failed
    assert not (folder / ".venv").exists()


def test_installation_names_torchs_cuda_build_before_its_download_and_counts_bytes(stub, capsys, monkeypatch):
    install.main()
    printed = capsys.readouterr().out
    arguments = (stub / "arguments").read_text()
    assert "-c .venv/constraints.txt -e . --extra-index-url https://example.com/cpu" in arguments
    assert (stub / ".venv/constraints.txt").read_text() == (stub / "constraints.txt").read_text()
    notice = printed.index(
        "torch: its CUDA build is downloaded, with CUDA's libraries about 3 GB, and this machine has no"
    )
    assert "run the same `make` with TORCH_INDEX=ADDRESS" in printed
    assert notice < printed.index("downloading torch 2.13.0: 3.0 of 526.6 MB, 3 MB in total")
    assert "preparing editable metadata" in printed
    assert "installing package 1 of 2" in printed
    assert not (stub / ".venv/tmp").exists()

    assert "modeling.training.train" in (stub / "compiled").read_text()

    # The user of a container may have no home and no name, without which some modules cannot be imported.
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    install.compile_modules()
    assert f"HOME={stub}/.venv USER={os.geteuid()}" in (stub / "compiled").read_text()

    (stub / "unusable").touch()
    with pytest.raises(
        SystemExit, match=r"ImportError: libgomp\.so\.1\nan installed module cannot be imported"
    ):
        install.main()
    (stub / "broken").touch()
    with pytest.raises(SystemExit, match="ERROR: No space left on device\npip failed; its complete output: "):
        install.main()


UV = """#!/bin/sh
case "$*" in
  *--dry-run) printf ' + torch==2.13.0\n + nvidia-cublas==13.0.0.19\n' >&2;;
  *) echo "uv downloads"; echo "$@" > arguments; test ! -e refused;;
esac
"""


def test_uv_installs_where_it_is_and_the_cuda_build_is_named_before(stub, capfd, monkeypatch):
    uv = stub / "uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(uv) if name == "uv" else None)
    install.main()
    printed = capfd.readouterr().out
    offer = printed.index(
        "for the CPU build (0.2 GB), press Ctrl-C and run the same `make` with UV_TORCH_BACKEND=cpu"
    )
    assert offer < printed.index("uv downloads")
    assert "unsafe-best-match" in (stub / "arguments").read_text()
    monkeypatch.setattr(install, "GPU_FILES", (str(stub),))
    (stub / "refused").touch()
    install.main()
    printed = capfd.readouterr().out
    assert "torch: its CUDA build is downloaded, with CUDA's libraries about 3 GB\n" in printed
    assert (stub / "arguments").read_text().startswith("-m pip install")


def test_other_pins_replace_those_of_the_same_packages(stub, monkeypatch):
    pins = "constraints-torch-2.14.txt"
    monkeypatch.setattr(sys, "argv", ["install.py", "--pins", pins, "--extra", "neuron", "--extra", "test"])
    install.main()
    constraints = stub / ".venv/constraints.txt"
    assert "-c .venv/constraints.txt -e .[neuron,test]" in (stub / "arguments").read_text()
    default, changed = (
        set(path.read_text().splitlines()) for path in (stub / "constraints.txt", constraints)
    )
    replaced = {line.partition(" ")[0] for line in default - changed}
    assert replaced == {"#", "torch==2.13.0", "torch-neuronx==2.13.*"}
    assert {line.partition(" ")[0] for line in changed - default} == {
        "#",
        "torch==2.14.*",
        "torch-neuronx==2.14.*",
    }


def test_pins_can_be_installed_on_the_first_and_the_last_supported_python():
    # Otherwise pip searches for other versions without end: newer packages may need more than Debian 12's 3.11.2.
    pins = set(
        re.findall(r"^([\w.-]+==[\w.]+)", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE)
    )
    ranges = {
        f"{found.metadata['Name']}=={found.version}".lower(): found.metadata.get("Requires-Python") or ""
        for found in distributions()
    }
    assert {"numpy", "pytest"} <= {pin.partition("==")[0] for pin in pins & {*ranges}}
    for python in ("3.11.0", "3.14.0"):
        assert not [pin for pin in pins & {*ranges} if python not in SpecifierSet(ranges[pin])]


def test_python_without_ensurepip_names_the_package_to_install(stub, monkeypatch):
    shutil.rmtree(stub / ".venv")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ensurepip" else find_spec(name)
    )
    with pytest.raises(SystemExit, match="as root: apt-get install python3-venv"):
        install.main()
    assert not (stub / ".venv").exists()
    install.create_venv("uv")  # needs no pip in .venv
    assert (stub / ".venv/bin/python").exists()
    assert not (stub / ".venv/bin/pip").exists()


def test_a_folder_of_another_user_is_named(stub, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        SystemExit, match="größer: cannot be written; its owner has to install first: make install"
    ):
        install.main()


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (99, "  1:44 downloading cudnn: 6.3 of 366.2 MB, 600 MB in total"),
        (50, "  1:44 downloading cudnn: 6.3 of 366.2 MB"),
        (20, "  1:44 downloading c"),
    ],
)
def test_a_progress_line_too_long_for_the_terminal_loses_its_last_parts(width, shown):
    line = "  1:44 downloading cudnn: 6.3 of 366.2 MB, 600 MB in total"
    assert install.shortened(line, width) == shown
