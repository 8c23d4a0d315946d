"""The machines: Debian releases, packages and circumstances, combined into few machines."""

from __future__ import annotations

from dataclasses import dataclass

COMPILER = ("g++", "python3-dev")
PLAIN = "trainshed"  # name of the checkout's folder
UNUSUAL = "a folder, größer & 漢字"
READY = r"validation loss"  # what `make run` prints at its end
NO_VENV = r"as root: apt-get install python3-venv"


@dataclass(frozen=True)
class Machine:
    """One machine, and what is missing or unusual there.

    Attributes:
        name: row of the table.
        release: Debian's release, as debootstrap names it.
        packages: Debian packages besides python3 and make.
        python: another Python, which is found on this machine's PATH and shown to the other one.
        uv: whether uv is installed.
        git: whether the checkout has its history.
        folder: name of the checkout's folder.
        user: has a name, a home and HOME; otherwise it is a number, as in a container, and the machine's own name has no address.
        root: commands run as root.
        locale: of LANG.
        terminal: the output is a terminal of 80 columns.
        cores: that commands may use; None: all.
        gigabytes: of memory that commands may use; None: all.
        locks: whether file systems have file locks.
        read_only: only the store is writable once the installation is complete.
        network: commands after the installation have this machine's network.
        tests: also run `make test`, with a cheap part of the tests.
        prints: regular expression that the output of `make run` contains.
        starts: whether `make run` succeeds.
    """

    name: str
    release: str
    packages: tuple[str, ...] = ("python3-venv", *COMPILER)
    python: str = "python3"
    uv: bool = False
    git: bool = False
    folder: str = PLAIN
    user: bool = True
    root: bool = False
    locale: str = "C.UTF-8"
    terminal: bool = False
    cores: int | None = None
    gigabytes: int | None = None
    locks: bool = True
    read_only: bool = False
    network: bool = False
    tests: bool = False
    prints: str = READY
    starts: bool = True

    @property
    def circumstances(self) -> str:
        """What differs from a complete machine, for the table."""
        missing = [f"no {package}" for package in ("python3-venv", *COMPILER) if package not in self.packages]
        facts = {
            f"PYTHON={self.python}": self.python != "python3",
            "uv": self.uv,
            "git history": self.git,
            "spaces and non-ASCII in the path": self.folder != PLAIN,
            "a user without name and HOME": not self.user,
            "root": self.root,
            f"LANG={self.locale}": self.locale != "C.UTF-8",
            "terminal": self.terminal,
            f"{self.cores} core": self.cores,
            f"{self.gigabytes} GB": self.gigabytes,
            "no file locks": not self.locks,
            "read-only checkout": self.read_only,
            "network": self.network,
            "make test": self.tests,
        }
        return ", ".join([*missing, *(name for name, applies in facts.items() if applies)]) or "complete"


MACHINES = (
    Machine("trixie", "trixie", terminal=True, git=True, tests=True),
    Machine(
        "trixie-container",
        "trixie",
        ("python3-venv",),
        folder=UNUSUAL,
        user=False,
        locale="POSIX",
        cores=1,
        gigabytes=3,
        locks=False,
        read_only=True,
        prints=r"install g\+\+",
    ),
    Machine("trixie-bare", "trixie", (), prints=NO_VENV, starts=False),
    Machine("bookworm", "bookworm", tests=True, locks=False),
    Machine(
        "bookworm-uv",
        "bookworm",
        COMPILER,
        python="python3.12",
        uv=True,
        folder=UNUSUAL,
        root=True,
        gigabytes=3,
        locale="C",
    ),
    Machine("testing", "testing", terminal=True, network=True, tests=True),
    Machine("testing-uv", "testing", ("g++",), uv=True, user=False, cores=1, read_only=True),
)
