"""Install Trainshed into a virtual environment, for the Makefile; shows downloads and progress.

With uv, which downloads and unpacks in parallel; without it, or if it fails, with pip. It needs only Python's standard library,
runs before anything is installed, and writes nothing elsewhere, except the caches of pip and uv and Trainshed's egg-info.
"""

from __future__ import annotations

import argparse
import getpass
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

VENV = Path(".venv")
CONSTRAINTS = Path("constraints.txt")
SECONDS = {True: 0.5, False: 20.0}  # between two lines of progress, if the output is a terminal or not
WHEEL = re.compile(
    r"\s*(Downloading|Using cached) (?:\S*/)?([^-\s/]+)-([^-\s]+)-\S*?\.whl(?: \(([\d.]+ ?\w+)\))?$"
)
# CUDA's libraries, which torch requires only if it is built for CUDA; nvidia-ml-py only reads a GPU's telemetry.
CUDA = re.compile(r"(?:nvidia-(?!ml-py)|cuda-toolkit|.*\btorch-[\d.]+-cp\S+_x86_64\.whl)")
BUILD = re.compile(r"\s+((?:Installing build|Getting requirements|Preparing)[^:]*): started")
# What a run imports in its processes. Their bytecode is written now: later, each run of another user would compile it again.
IMPORTED = (
    "flows.pretrain",
    "prefect.server.api.server",
    "modeling.training.train",
    "torch._inductor.compile_fx",
    "tasks.report",
)
GPU_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one in WSL


class PipLog:
    """What pip is doing, read from its log line by line.

    Attributes:
        lines: all lines so far.
        cuda: whether torch's CUDA build is going to be downloaded, or is being downloaded.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cuda = False
        self._doing, self._size, self._collected, self._total = "preparing", "", 0, 0

    def read(self, line: str) -> None:
        """Take in one line of the log."""
        self.lines.append(line)
        words = line.split()
        if len(words) > 1 and words[0] in ("Collecting", "Downloading"):
            self.cuda = self.cuda or CUDA.match(words[1]) is not None
        if line.startswith("Collecting "):
            self._collected += 1
            self._doing, self._size = (
                f"resolving package {self._collected}, {re.split('[^-._a-zA-Z0-9]', words[1])[0]}",
                "",
            )
        elif found := BUILD.match(line):
            self._doing, self._size = found[1].lower(), ""
        elif found := WHEEL.match(line):
            _, name, version, self._size = found.groups(default="")
            self._doing = f"downloading {name} {version}"
        elif line.startswith("Installing collected packages: "):
            self._total = line.count(",") + 1

    def progress(self, downloaded: Sequence[int], installed: int) -> str:
        """One line: what pip is doing.

        Args:
            downloaded: bytes of the files downloaded so far, the current one last.
            installed: number of packages installed so far.
        """
        if self._total:
            return f"installing package {min(installed + 1, self._total)} of {self._total}"
        if not downloaded:
            return self._doing
        current = f": {downloaded[-1] / 1e6:.1f} of {self._size}" if self._size.endswith("MB") else ""
        return f"{self._doing}{current}, {sum(downloaded) / 1e6:.0f} MB in total"


def cuda_notice(gpu: bool, uv: bool) -> str:
    """What to say before torch's CUDA build is downloaded."""
    if gpu:
        return "torch: its CUDA build is downloaded, with CUDA's libraries about 3 GB"
    if uv:
        choice = "UV_TORCH_BACKEND=cpu"
    else:
        choice = "TORCH_INDEX=ADDRESS, the address that pytorch.org/get-started/locally shows for pip and CPU"
    return (
        "torch: its CUDA build is downloaded, with CUDA's libraries about 3 GB, and this machine has no NVIDIA GPU; "
        f"for the CPU build (0.2 GB), press Ctrl-C and run the same `make` with {choice}"
    )


def with_other_pins(constraints: str, pins: str) -> str:
    """The constraints with other pins in place of those of the same packages."""

    def by_name(text: str) -> dict[str, str]:
        return {re.split(r"[^-.\w]", line, maxsplit=1)[0].lower(): line for line in text.splitlines()}

    return "\n".join([*(by_name(constraints) | by_name(pins)).values(), ""])


def create_venv(uv: str | None) -> None:
    """Create the environment unless it is there; raises SystemExit with the name of a missing package."""
    if (VENV / "bin/python").exists() and (uv or (VENV / "bin/pip").exists()):
        return
    pip = importlib.util.find_spec("ensurepip") is not None
    if importlib.util.find_spec("venv") is None or not (pip or uv):
        version = "{}.{}".format(*sys.version_info)
        sys.exit(
            f"Python {version} cannot create {VENV}, since it lacks ensurepip; as root: apt-get install python3-venv "
            f"(for a second Python: python{version}-venv); or install uv, which needs neither"
        )
    options = [] if pip else ["--without-pip"]
    made = subprocess.run([sys.executable, "-m", "venv", *options, str(VENV)], capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"{VENV}: cannot be created: {(made.stderr or made.stdout).strip()}")


def install_with_uv(uv: str, arguments: Sequence[str]) -> bool:
    """Install with uv, which shows its progress itself; whether that succeeded."""
    command = [uv, "pip", "install", "--python", str(VENV / "bin/python"), *arguments]
    if "--extra-index-url" in arguments:
        command += ["--index-strategy", "unsafe-best-match"]  # as pip does
    planned = subprocess.run([*command, "--dry-run"], capture_output=True, text=True).stderr
    if re.search(r"^ \+ (nvidia-(?!ml-py)|cuda-toolkit)", planned, re.MULTILINE):
        print(cuda_notice(has_gpu(), uv=True), flush=True)
    return subprocess.run(command).returncode == 0


def install_with_pip(arguments: Sequence[str]) -> None:
    """Install with pip, and show its progress. Raises SystemExit with the end of its log if it fails."""
    # Not in /tmp, which is often in memory and too small for torch. Modules are compiled on their first import, and most are
    # never imported.
    temporary = VENV / "tmp"
    temporary.mkdir(exist_ok=True)
    command = [str(VENV / "bin/python"), "-m", "pip", "install", "--no-compile", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", *arguments]
    environment = {
        **os.environ,
        "TMPDIR": str(temporary.absolute()),
        "PYTHONUNBUFFERED": "1",
        "LC_MESSAGES": "C",
    }
    log = PipLog()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment}
    with subprocess.Popen(command, text=True, errors="replace", **streams) as pip:
        try:
            reader = threading.Thread(target=_follow, args=(pip.stdout, log), daemon=True)
            reader.start()
            _show(log, reader, temporary)
        except KeyboardInterrupt:
            pip.terminate()
            raise
    shutil.rmtree(temporary, ignore_errors=True)
    if pip.returncode:
        sys.exit("\n".join([*log.lines[-20:], f"pip failed; its complete output: {VENV / 'install.log'}"]))


def compile_modules() -> None:
    """Import what a run imports, which writes its bytecode.

    Raises SystemExit if a module cannot be imported.
    """
    print("compiling the modules that a run imports", flush=True)
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    command = [str(VENV / "bin/python"), "-c", code, *IMPORTED]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    imported = subprocess.run(command, text=True, errors="replace", env=_with_home(), **streams)
    if imported.returncode:
        sys.exit(f"{imported.stderr.rstrip()}\nan installed module cannot be imported")


def _with_home() -> dict[str, str]:
    """The environment, with a home and a name for a user who has neither.

    Imports need them; users in containers may have neither.
    """
    environment = dict(os.environ)
    try:
        Path.home()
    except RuntimeError:
        environment["HOME"] = str(VENV.absolute())
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environment["USER"] = str(os.geteuid())
    return environment


def _follow(lines: Iterable[str], log: PipLog) -> None:
    """Read pip's output, and write it to .venv/install.log."""
    with (VENV / "install.log").open("w", encoding="utf-8", errors="replace") as file:
        for line in lines:
            file.write(line)
            file.flush()
            log.read(line.rstrip("\n"))


def _show(log: PipLog, reader: threading.Thread, temporary: Path) -> None:
    """Print the progress until pip has ended: over one line of a terminal, otherwise in lines."""
    terminal = sys.stdout.isatty()
    started, before, noticed = time.monotonic(), _installed(), False
    while reader.is_alive():
        reader.join(SECONDS[terminal])
        if log.cuda and not noticed:
            noticed = True
            print(("\r\033[K" if terminal else "") + cuda_notice(has_gpu(), uv=False), flush=True)
        minutes, seconds = divmod(int(time.monotonic() - started), 60)
        line = f"  {minutes}:{seconds:02} {log.progress(_downloaded(temporary), _installed() - before)}"
        width = shutil.get_terminal_size().columns - 1
        print(
            f"\r\033[K{shortened(line, width)}" if terminal else line,
            end="" if terminal else "\n",
            flush=True,
        )
    if terminal:
        print("\r\033[K", end="")


def shortened(line: str, width: int) -> str:
    """The line, without its last parts if they do not fit: a cut number would be another one."""
    while len(line) > width and ", " in line:
        line = line.rpartition(", ")[0]
    return line[:width]


def _downloaded(temporary: Path) -> list[int]:
    """Bytes of each downloaded file, in the order of their last change."""
    files = []
    for file in temporary.glob("pip-*/*.whl"):
        try:
            files.append((file.stat().st_mtime, file.stat().st_size))
        except FileNotFoundError:  # pip has just moved it
            continue
    return [size for _, size in sorted(files)]


def _installed() -> int:
    return sum(1 for _ in VENV.glob("lib/python*/site-packages/*.dist-info"))


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU and its driver."""
    return any(map(os.path.exists, GPU_FILES)) or shutil.which("nvidia-smi") is not None


def main() -> None:
    global VENV
    parser = argparse.ArgumentParser(description="Install Trainshed into a virtual environment.")
    parser.add_argument("--venv", type=Path, default=VENV, help="folder of the environment (default: .venv)")
    parser.add_argument("--pins", type=Path, help="constraints that replace those of constraints.txt")
    parser.add_argument("--extra", action="append", default=[], help="extra of pyproject.toml to install too")
    parser.add_argument("--index", action="append", default=[], help="address of a further package index")
    options = parser.parse_args()
    VENV = options.venv
    constraints = VENV / CONSTRAINTS  # also for packages that a user adds later
    arguments = ["-c", str(constraints), "-e", f".[{','.join(options.extra)}]" if options.extra else "."]
    for index in filter(None, options.index):
        arguments += ["--extra-index-url", index]
    for folder in (Path(), VENV):
        if folder.exists() and not os.access(folder, os.W_OK):
            sys.exit(f"{folder.absolute()}: cannot be written; its owner has to install first: make install")
    uv = shutil.which("uv")
    create_venv(uv)
    pins = options.pins.read_text() if options.pins else ""
    constraints.write_text(with_other_pins(CONSTRAINTS.read_text(), pins))
    print(f"installing into {VENV}, which takes some minutes the first time", flush=True)
    started = time.monotonic()
    if not (uv and install_with_uv(uv, arguments)):
        if not (VENV / "bin/pip").exists():
            sys.exit(
                "uv failed, and without ensurepip there is no pip; as root: apt-get install python3-venv"
            )
        install_with_pip(arguments)
    compile_modules()
    minutes, seconds = divmod(int(time.monotonic() - started), 60)
    print(f"installed {_installed()} packages in {minutes}:{seconds:02}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command continues")
