"""torchrun with a watcher of its ranks: `python -m modeling.training.torchrun ...` takes torchrun's own arguments.

A rank that stands still dumps its own stacks and ends (watchdog.py), unless it cannot: its process is stopped, or what it is
stuck in never gives Python's lock back. Such a one is looked at here, LATE seconds after its time is over: py-spy writes
where it stands to its file in RUN/logs/stacks, and it is ended by SIGALRM, or if need be SIGKILL, so that the attempt ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import psutil
from torch.distributed import run

from modeling.exit_codes import HANG_MESSAGE
from modeling.training import heartbeat
from modeling.training.stragglers import node_name

LATE = 1.5  # seconds that a rank has to begin with its own dump
EVERY = 0.5  # seconds between looks
LONGEST = 10.0  # seconds that a look may take


def main(arguments: list[str] | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="trainshed-") as folder:
        os.environ[heartbeat.FOLDER] = folder
        onlooker = threading.Thread(target=watch, args=(Path(folder),), daemon=True, name="onlooker")
        onlooker.start()
        run.main(arguments)


def watch(folder: Path) -> None:
    """Look at the ranks whose pulses lie in a folder, until it is gone."""
    with contextlib.suppress(FileNotFoundError):
        while True:
            for seen in heartbeat.Seen.all(folder):
                if not _lives(seen.pid):
                    seen.forget(folder)
                elif time.monotonic() > seen.due + LATE:
                    seen.forget(folder)
                    threading.Thread(target=report_and_end, args=(seen,), daemon=True).start()
            time.sleep(EVERY)


def report_and_end(seen: heartbeat.Seen) -> None:
    """A rank that stands still; all of a node may at once."""
    report(seen)
    end(seen.pid)


def report(seen: heartbeat.Seen) -> None:
    """Write down where a process stands."""
    rank = seen.stacks.stem.removeprefix("rank_")
    about = f"rank {rank} on {node_name()}: {HANG_MESSAGE} longer than it may take, and no word of its own"
    stacks = look(seen.pid)
    with contextlib.suppress(OSError):  # a full disk must not keep it from being ended
        seen.stacks.parent.mkdir(parents=True, exist_ok=True)
        with seen.stacks.open("a") as file:
            file.write(f"{about}; seen from outside:\n{stacks}")
    print(f"[rank {rank}] WARNING {about}; its stacks: {seen.stacks}", flush=True)


def end(pid: int) -> None:
    """End a process, by a signal that tells why where it can."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.send_signal(signal.SIGALRM)
        process.resume()  # one that is stopped takes the signal when it goes on
        time.sleep(EVERY)
        process.kill()


def look(pid: int) -> str:
    """The stacks of a process, or why they cannot be had."""
    scripts = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    program = shutil.which("py-spy", path=scripts)
    if program is None:
        return "py-spy is not installed\n"
    command = [program, "dump", "--pid", str(pid)]
    found = ""
    # With the frames of compiled code, for which the process has to be halted; one that is stopped cannot be.
    for option in "--native", "--nonblocking":
        try:
            told = subprocess.run(
                [*command, option], capture_output=True, text=True, errors="replace", timeout=LONGEST
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            found = f"{error}\n"
            continue
        if told.returncode == 0:
            return told.stdout
        found = told.stdout + told.stderr
    return found


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main())
