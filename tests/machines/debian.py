"""Builds a machine: Debian by debootstrap with a writable layer, in which commands run as a user."""

from __future__ import annotations

import ast
import ctypes
import fcntl
import os
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.machines import denied_locks
from tests.machines.machines import Machine

ROOT = Path(__file__).parents[2]
BASE = ("ca-certificates", "make", "python3")
NAMED, NUMBERED = 1000, 12345  # user ids with and without an entry in /etc/passwd
SETTINGS = re.compile(r"(PIP|UV)_.*|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|.*_proxy", re.IGNORECASE)
CACHE = Path("/var/cache/packages")
PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PRELOADED = Path("/usr/local/lib/denied_locks.so")
CLONE_NEWNET, SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x40000000, 0x8914, 0x8916, 1
UNUSED = "192.0.2.1"  # an address reserved for documentation


def base(release: str, folder: Path) -> Path:
    """The folder with a Debian release, made by debootstrap if it is not there.

    All machines of the release share it.
    """
    path = folder / f"debian-{release}"
    if not path.exists():
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        _run("debootstrap", "--variant=minbase", f"--include={','.join(BASE)}", release, partial)
        partial.rename(path)
    return path


class Debian:
    """A machine that exists as long as this process, in its own mount and process namespaces.

    Attributes:
        checkout: path of the checkout inside the machine.
        environment: of its commands.
    """

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.root = folder / machine.name / "root"
        self.user = 0 if machine.root else NAMED if machine.user else NUMBERED
        self.checkout = Path("/srv") / machine.folder  # where denied_locks.py denies locks
        lower = base(machine.release, folder)
        layers = {
            "lowerdir": lower,
            "upperdir": self.root.with_name("upper"),
            "workdir": self.root.with_name("work"),
        }
        for path in (self.root, layers["upperdir"], layers["workdir"]):
            path.mkdir(parents=True)
        _run(
            "mount",
            "-t",
            "overlay",
            "-o",
            ",".join(f"{k}={v}" for k, v in layers.items()),
            "overlay",
            self.root,
        )
        for name in ("dev", "sys"):
            _run("mount", "--rbind", f"/{name}", self.root / name)
        _run("mount", "-t", "proc", "proc", self.root / "proc")
        settings = package_settings()
        for path in ("/etc/resolv.conf", *local_paths(settings)):
            self._bind(Path(path), Path(path))
        cache = folder / "cache"
        cache.mkdir(exist_ok=True)
        _run("chmod", "-R", "a+rwX", cache)  # of machines with other users, too
        self._bind(cache, CACHE)
        prefix = python_prefix(machine.python) if machine.python != "python3" else None
        if prefix:
            self._bind(prefix, prefix)
        self.environment = {
            "PATH": f"{prefix}/bin:{PATH}" if prefix else PATH,
            "PYTHON": machine.python,  # read by the Makefile
            "LANG": machine.locale,
            **({"TERM": "xterm"} if machine.terminal else {}),
            **({"HOME": "/root" if machine.root else "/home/user"} if machine.user else {}),
            **({} if machine.locks else {"LD_PRELOAD": str(PRELOADED)}),
            **settings,
            **{f"{tool}_CACHE_DIR": str(CACHE / tool.lower()) for tool in ("PIP", "UV")},
        }
        if not machine.locks:
            denied_locks.build(self.root / PRELOADED.relative_to("/"))
        self._install(folder)

    def command(self, *arguments: str, user: int | None = None, folder: Path | None = None) -> list[str]:
        """The command line that runs a command in the machine as its user, in the checkout."""
        user = self.user if user is None else user
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        place = ["env", "-i", "-C", str(folder or self.checkout), *variables]
        return ["chroot", f"--userspec={user}:{user}", "--groups=", str(self.root), *place, *arguments]

    def restrict(self) -> None:
        """Called in the child before a command: the machine's cores and memory, and Ctrl-C ends it.

        A script ignores Ctrl-C in what it starts in the background, such as `make test-machines &`.
        """
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.machine.cores:
            os.sched_setaffinity(0, list(os.sched_getaffinity(0))[: self.machine.cores])
        if self.machine.gigabytes:
            _limit_memory(self.machine.name, self.machine.gigabytes * 2**30)

    def make_read_only(self) -> None:
        """Make the checkout read-only, with its installation, but not its store."""
        checkout = self.root / self.checkout.relative_to("/")
        store = checkout / "store"
        store.mkdir(exist_ok=True)
        os.chown(store, self.user, self.user)
        _run("mount", "--bind", checkout, checkout)
        _run("mount", "--bind", store, store)
        _run("mount", "-o", "remount,bind,ro", checkout)

    def disconnect(self) -> None:
        """Leave this process and its later commands only the loopback interface.

        It gets a second address: without one outside of 127.0.0.0/8, Slurm's daemons find no address to listen on.
        """
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
            address = struct.pack("H2x4s8x", socket.AF_INET, socket.inet_aton(UNUSED))
            fcntl.ioctl(any_socket, SIOCSIFADDR, struct.pack("16s16s8x", b"lo:1", address))

    def _install(self, folder: Path) -> None:
        """Install the machine's packages, its name's address, its user and the checkout of HEAD."""
        root = Path("/")
        if self.machine.user:
            hosts = f"127.0.0.1 localhost\n127.0.1.1 {platform.node()}\n"  # as Debian's installer writes it
            (self.root / "etc/hosts").write_text(hosts)
        if self.machine.packages:
            # A mirror may be behind by weeks: then testing's index, which is still signed, has expired.
            options = ("APT::Sandbox::User=root", "Acquire::Check-Valid-Until=false")
            apt = ("apt-get", *(f"-o{option}" for option in options), "-qq")
            install = ("install", "-y", "--no-install-recommends", *self.machine.packages)
            for arguments in (("update",), install):
                _run(
                    *self.command(
                        "env", "DEBIAN_FRONTEND=noninteractive", *apt, *arguments, user=0, folder=root
                    )
                )
        _run(*self.command("useradd", "--create-home", "user", user=0, folder=root))
        if self.machine.uv:
            tool = folder / "uv"
            _run(sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", tool, "uv")
            shutil.copy(tool / "bin/uv", self.root / "usr/local/bin")
        checkout = self.root / self.checkout.relative_to("/")
        _run("git", "clone", "-q", "--no-hardlinks", ROOT, checkout)
        if not self.machine.git:
            shutil.rmtree(checkout / ".git")
        _run("chown", "-R", f"{self.user}:{self.user}", checkout)

    def _bind(self, source: Path, target: Path) -> None:
        """Show a file or folder of this machine in the other one."""
        inside = self.root / target.relative_to("/")
        if source.is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        elif not inside.exists():
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
        _run("mount", "--bind", source, inside)


def python_prefix(python: str) -> Path:
    """The folder in which a Python of this machine is installed."""
    command = [python, "-c", "import sys; print(sys.base_prefix)"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def package_settings() -> dict[str, str]:
    """This machine's settings of pip and uv, such as a package index, as environment variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    settings = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings[f"PIP_{name.rpartition('.')[2].upper().replace('-', '_')}"] = ast.literal_eval(value)
    return settings | {name: value for name, value in os.environ.items() if SETTINGS.fullmatch(name)}


def local_paths(settings: Mapping[str, str]) -> list[str]:
    """Files and folders that exist on this machine and that settings of pip and uv name."""
    found = set()
    for value in settings.values():
        for scheme, name in re.findall(r"(?<!\S)(file://)?(/\S+)", value):
            path = Path(name).parent if scheme else Path(name)  # an index links to files beside its folder
            if path.exists():
                found.add(str(path))
    return sorted(found)


def _limit_memory(name: str, limit: int) -> None:
    """Move this process to a control group with this much memory."""
    old = Path("/sys/fs/cgroup/memory")
    group = (old if old.exists() else old.parent) / f"trainshed-{name}"
    group.mkdir(exist_ok=True)
    (group / ("memory.limit_in_bytes" if old.exists() else "memory.max")).write_text(str(limit))
    (group / "cgroup.procs").write_text("0")


def _run(*command: Any) -> None:
    subprocess.run(
        [str(each) for each in command], check=True, stdout=sys.stderr
    )  # standard output is for the row
