"""`trainshed tensorboard [RUN]`: serve TensorBoard on loopback for one run or all runs, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import signal
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from flows.cli.exit_codes import DONE, FAILED
from flows.ui.console import print_stderr, waiting
from profiles.errors import ProfileError
from profiles.files import folders, run_files, state_files
from tasks.store.runs import unknown_local_run
from tasks.store.store import Store

# TensorBoard shows groups of tags by alphabet; these are above them.
PINNED = [{"plugin": "scalars", "tag": tag} for tag in ("loss/loss", "loss/validation_loss")]
LINK_SECONDS = 5.0  # until a new run is shown


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    folder, every = log_folder(options.run, options.store), options.run is None
    with waiting(lambda: "loading TensorBoard"):
        from tensorboard import program
        from tensorboard.program import TensorBoardServerException

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    board = program.TensorBoard()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="trainshed-tensorboard-") as links:
        _link(folder, every, Path(links))
        board.configure(argv=[None, "--logdir", links, "--host", "127.0.0.1", "--port", str(options.port)])
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # TensorBoard's notices about its data loader
                address = board.launch()
        except TensorBoardServerException:
            advice = "perhaps by another TensorBoard; choose one with --port"
            print_stderr(f"trainshed: port {options.port} is taken, {advice}")
            return FAILED
        pinned = quote(json.dumps(PINNED, separators=(",", ":")), safe=":,")
        print_stderr(f"TensorBoard: {address}?pinnedCards={pinned}\nCtrl-C stops it")
        try:
            while True:
                time.sleep(LINK_SECONDS)
                _link(folder, every, Path(links))
        except KeyboardInterrupt:
            print_stderr("stopping")
    return DONE


def _link(folder: Path, every: bool, links: Path) -> None:
    """Link the TensorBoard folder of a run, or of each run in a folder, under the run's name."""
    for run in folder.iterdir() if every else [folder]:
        source, link = (run / run_files.TENSORBOARD).absolute(), links / run.resolve().name
        if state_files.is_dir(source) and not state_files.is_link(link):
            link.symlink_to(source)


def log_folder(run: str | None, store: str) -> Path:
    """The folder of a run (a name or a path), or of all runs. Raises ProfileError if there is no such run."""
    runs = Path(store) / "runs"
    if "://" in store:
        reason = "TensorBoard reads local run folders; give the profile's cluster.work_dir"
        raise ProfileError("store", store, reason)
    if run is None or "/" not in run:
        Store(store).existing()
    if run is None:
        if not any(folders.find(runs, f"*/{run_files.PROFILE}")):
            raise ProfileError("store", store, f"there are no runs in {runs.absolute()}")
        return runs
    folder = Path(run) if "/" in run else runs / run
    if not state_files.is_dir(folder):
        raise unknown_local_run(run, runs)
    return folder
