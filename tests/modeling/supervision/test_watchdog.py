"""Hang watchdog: a hung rank leaves its stacks and ends, even if stopped or blocked in native code."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from modeling.supervision import watchdog
from modeling.supervision.watchdog import COMPILE, PHASES, REPORT, STEP, Timeouts
from profiles.files import exit_codes
from tests.forkserver import forkserver
from tests.slurm.conftest import until

pytestmark = pytest.mark.slow

HOME = Path(__file__).parents[3]
# Ends with 143 on SIGUSR1, for which it has no handler until FOLDER/handle exists.
STOPPABLE = """
import os, pathlib, signal, sys, time

folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]

def stop(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    (folder / f"{rank}.stopped").touch()
    while not (folder / "0.stopped").exists() or not (folder / "1.stopped").exists():
        time.sleep(0.05)
    sys.exit(143)

(folder / f"{rank}.started").touch()
while not (folder / "handle").exists():
    time.sleep(0.05)
signal.signal(signal.SIGUSR1, stop)
(folder / f"{rank}.handles").touch()
time.sleep(20)
"""
# Three steps, which set the hang timeout; then rank 1 hangs and rank 0 waits for it.
PROGRAM = """
import ctypes, os, pathlib, signal, sys, time
from modeling.supervision.watchdog import Timeouts, Watchdog

folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda *_: None)  # as training does

def wait_for_the_other():
    if rank == 1 and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # by itself: another process might be late, after this rank's own dump
    time.sleep(300)

def hold_the_gil():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second never returns, whatever signals arrive
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

# Before the steps: a slow disk between them and the hang would let the rank dump its own stacks.
(folder / f"{rank}.pid").write_text(str(os.getpid()))
while len([*folder.glob("?.pid")]) < 2:
    time.sleep(0.05)
with Watchdog(folder / "stacks", rank, Timeouts(1.0, 4.0)) as watchdog:
    for step in 1, 2, 3:
        watchdog.beat(step, 0.1)
    hold_the_gil() if rank == 1 and how == "holds" else wait_for_the_other()
"""


def start_torchrun(folder, program, *arguments):
    """Start two ranks of a program, whose first argument is the folder."""
    (folder / "program.py").write_text(program)
    torchrun = ["modeling.supervision.torchrun", "--standalone", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", "2"]
    return subprocess.Popen(
        [sys.executable, "-m", *torchrun, "program.py", str(folder), *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(HOME),
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("how", ["holds", "stopped"])
def test_hung_ranks_leave_their_stacks(how, tmp_path):
    """Rank 0, which waits, dumps its own; rank 1 cannot."""
    output, _ = start_torchrun(tmp_path, PROGRAM, how).communicate(timeout=180)
    assert not any(psutil.pid_exists(int((tmp_path / f"{rank}.pid").read_text())) for rank in (0, 1))
    first, second = ((tmp_path / f"stacks/rank_{rank}.txt").read_text() for rank in (0, 1))
    assert exit_codes.HANG_MESSAGE in first
    assert "wait_for_the_other" in first
    assert exit_codes.HANG_MESSAGE in second
    assert ("hold_the_gil" if how == "holds" else "wait_for_the_other") in second
    assert "captured externally" in second
    code = int(re.search(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", output, re.DOTALL)[1])
    assert code in (exit_codes.HUNG, -signal.SIGALRM), output


def test_stop_signal_that_only_torchrun_gets_stops_the_ranks(tmp_path):
    """As from Slurm with proctrack/cgroup; a rank without its handler misses the signal."""
    process = start_torchrun(tmp_path, STOPPABLE)
    until(lambda: len([*tmp_path.glob("?.started")]) == 2)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    (tmp_path / "handle").touch()
    until(lambda: len([*tmp_path.glob("?.handles")]) == 2)
    for _ in range(3):
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
    output, _ = process.communicate(timeout=120)
    assert len([*tmp_path.glob("?.stopped")]) == 2, output
    assert re.search(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", output, re.DOTALL)[1] == "143"
    assert process.returncode == 1


@pytest.mark.parametrize("phase", ["data", REPORT])
def test_rank_waiting_for_another_ranks_storage_is_not_hung(tmp_path, phase):
    process = forkserver().Process(target=wait_for_storage_then_hang, args=(tmp_path, phase))
    process.start()
    process.join(180)
    assert process.exitcode == exit_codes.HUNG
    assert (tmp_path / "read").exists()
    stacks = (tmp_path / "rank_0.txt").read_text()
    assert re.search(r"no step for \S+ s after step 3; the timeout of the phase 'step' is 1.1 s", stacks)


def test_faulthandler_waits_for_a_long_report(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(
        watchdog.faulthandler, "dump_traceback_later", lambda seconds, exit: waits.append(seconds)
    )
    with watchdog.Watchdog(tmp_path, 0, Timeouts(1.0, 1.0)) as watching:
        for step in 1, 2, 3:
            watching.beat(step, 0.1)
        with watching.phase(REPORT):
            until(lambda: waits[-1] > PHASES[REPORT])
        assert waits[-1] < 60


def test_progress_restarts_the_timeout_of_the_phase(tmp_path):
    with watchdog.Watchdog(tmp_path, 0, Timeouts(1.0, 1.0)) as watching, watching.phase("evaluate"):
        deadline = watching._deadline
        watching.progress()
        assert watching._deadline > deadline
        assert watching._phase == "evaluate"


def wait_for_storage_then_hang(folder: Path, phase: str) -> None:
    """Two ranks: one reads data or writes metrics for longer than a step may take, then both hang."""
    store, timeouts = dist.HashStore(), Timeouts(1.0, 1.0)
    watchdog.EXIT_DELAY = 0
    with (
        watchdog.Watchdog(folder, 0, timeouts, store) as waiting,
        watchdog.Watchdog(folder, 1, timeouts, store) as reading,
    ):
        for step in 1, 2, 3:
            waiting.beat(step, 0.1)
            reading.beat(step, 0.1)
        with reading.phase(phase):
            time.sleep(2.5)
        (folder / "read").touch()
        reading._finished = True
        time.sleep(300)


def test_ranks_are_not_hung_while_one_of_them_compiles(tmp_path):
    """For three times the timeout, in a child process of rank 0; then both hang, whatever other ranks did."""
    ranks = [forkserver().Process(target=compile_then_hang, args=(tmp_path, rank)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(180)
    assert (tmp_path / "0.compiled").exists()
    assert (tmp_path / "1.compiled").exists()
    assert [rank.exitcode for rank in ranks] == [exit_codes.HUNG] * 2
    assert "the timeout of the phase 'compile' is 2.0 s" in (tmp_path / "rank_1.txt").read_text()


def compile_then_hang(folder: Path, rank: int) -> None:
    watchdog.POLL, watchdog.RECENT = 0.5, 1.0
    PHASES[COMPILE] = 2.0
    store = dist.FileStore(str(folder / "store"), 2)
    if rank == 0:
        store.add(watchdog.COMPILING, 3)  # by ranks that have died
    with watchdog.Watchdog(folder, rank, Timeouts(1.0, 1.0), store):
        if rank == 0:
            work = "import time; begun = time.monotonic()\nwhile time.monotonic() < begun + 6: pass"
            subprocess.run([sys.executable, "-c", work], check=True)
            (folder / "0.compiled").touch()
        else:
            until((folder / "0.compiled").exists)
            (folder / "1.compiled").touch()
        time.sleep(300)


def test_a_phase_ends_although_a_child_process_computes_for_ever(tmp_path):
    process = forkserver().Process(target=compute_for_ever, args=(tmp_path,))
    process.start()
    process.join(180)
    assert process.exitcode == exit_codes.HUNG


def compute_for_ever(folder: Path) -> None:
    watchdog.POLL, watchdog.EXIT_DELAY, watchdog.MAX_EXTENSION = 0.2, 0, 3.0
    PHASES[COMPILE] = 1.0
    work = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    subprocess.Popen([sys.executable, "-c", work])
    with watchdog.Watchdog(folder, 0, Timeouts(1.0, 1.0)):
        time.sleep(300)


@pytest.mark.parametrize("grace", [20.0, 9000.0])
def test_process_group_times_out_after_every_phase(grace):
    timeouts = Timeouts(5.0, grace)
    longest = max(timeouts.of(phase, [3000.0] * 3) for phase in (STEP, *PHASES))
    assert longest < timeouts.process_group.total_seconds()
