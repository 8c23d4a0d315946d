"""`trainshed tensorboard [RUN]`: TensorBoard over one run, or all runs of a store, on loopback, until Ctrl-C."""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
import signal
from pathlib import Path

from flows.ui.console import say
from profiles.errors import ProfileError


def tensorboard(run: str | None, store: str, port: int) -> int:
    """Serve until Ctrl-C; returns the exit code. ProfileError where there is no such run."""
    folder = logs(run, store)
    from tensorboard import program
    from tensorboard.program import TensorBoardServerException

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    board = program.TensorBoard()
    board.configure(argv=[None, "--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port)])
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # what it says of its reader each time
            address = board.launch()
    except TensorBoardServerException:
        say(f"trainshed: port {port} is taken, perhaps by another TensorBoard; choose one with --port")
        return 1
    say(f"TensorBoard: {address}\nCtrl-C stops it")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        signal.pause()
    except KeyboardInterrupt:
        say("stopping")
    return 0


def logs(run: str | None, store: str) -> Path:
    """The folder that TensorBoard is to read: a run's, or that of all runs."""
    runs = Path(store) / "runs"
    if "://" in store:
        reason = "TensorBoard reads the runs' folders here: name the work_dir of the runs"
        raise ProfileError("store", store, reason)
    known = sorted(path.parent.name for path in runs.glob("*/profile.yaml"))
    if run is None:
        if not known:
            raise ProfileError("store", store, f"there are no runs in {runs}")
        return runs
    folder = Path(run) if "/" in run else runs / run
    if not folder.is_dir():
        near = difflib.get_close_matches(run, known) or known[:3]
        raise ProfileError("run", run, f"there is no such run in {runs}", near)
    return folder
