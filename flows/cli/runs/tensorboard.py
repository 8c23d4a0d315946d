"""`trainshed tensorboard [RUN]`: serve TensorBoard on loopback for one run or all runs, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import signal
from pathlib import Path

from flows.cli.exit_codes import DONE, FAILED
from flows.ui.console import print_stderr
from modeling import run_files
from profiles.errors import ProfileError
from tasks.store.runs import unknown_local_run
from tasks.store.store import Store


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    folder = log_folder(options.run, options.store)
    from tensorboard import program
    from tensorboard.program import TensorBoardServerException

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    board = program.TensorBoard()
    board.configure(argv=[None, "--logdir", str(folder), "--host", "127.0.0.1", "--port", str(options.port)])
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # TensorBoard's notices about its data loader
            address = board.launch()
    except TensorBoardServerException:
        advice = "perhaps by another TensorBoard; choose one with --port"
        print_stderr(f"trainshed: port {options.port} is taken, {advice}")
        return FAILED
    print_stderr(f"TensorBoard: {address}\nCtrl-C stops it")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        print_stderr("stopping")
    return DONE


def log_folder(run: str | None, store: str) -> Path:
    """The folder of a run (a name or a path), or of all runs. Raises ProfileError if there is no such run."""
    runs = Path(store) / "runs"
    if "://" in store:
        reason = "TensorBoard reads local run folders; give the profile's cluster.work_dir"
        raise ProfileError("store", store, reason)
    if run is None or "/" not in run:
        Store(store).existing()
    if run is None:
        if not any(runs.glob(f"*/{run_files.PROFILE}")):
            raise ProfileError("store", store, f"there are no runs in {runs.absolute()}")
        return runs
    folder = Path(run) if "/" in run else runs / run
    if not folder.is_dir():
        raise unknown_local_run("run", run, runs)
    return folder
