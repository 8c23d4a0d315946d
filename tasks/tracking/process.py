"""The flow's side of trackers: starts their processes and sends them the run's final state.

Nothing here waits for a tracker during the run. At its end, all trackers together have FINISH_SECONDS to send what is left, then
they are killed. Only the first error of each tracker is logged.

A process for each, although wandb sends from one of its own and MLflow can send from a thread: their clients still run code in
the caller, which may hang or crash, and a user's tracker may do anything. Ours can be killed, and the next one resumes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from profiles.errors import ProfileError
from profiles.files import run_files, state_files
from profiles.resolve import load
from profiles.schema import Profile
from tasks.launchers.base import SAFE_PATH
from tasks.reporting import comparison_page, html
from tasks.reporting.comparison_page import flat_profile, load_runs
from tasks.reporting.outcome import is_finished
from tasks.store.run_folder import Parent
from tasks.store.runs import last_training_row
from tasks.store.store import Store

log = logging.getLogger(__name__)

FINISH_SECONDS = 60.0
LAST_WORDS_SECONDS = 5.0  # for the errors of a process that has ended to be read
# Disable the telemetry of the trackers' vendors.
QUIET = {"DO_NOT_TRACK": "1", "WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


@dataclass
class FinalState:
    """Final state of a run, and the files to attach to it."""

    state: str = "finished"
    files: list[tuple[Path, str]] = field(default_factory=list)  # path and kind


@contextlib.contextmanager
def tracking(profile: Profile, folder: Path, labels: Mapping[str, str]) -> Iterator[FinalState]:
    """Send the run to the profile's trackers during the block, which may add files to the final state."""
    final_state = FinalState(files=[(folder / run_files.PROFILE, "profile")])
    processes = [TrackerProcess(name, profile, folder, labels) for name in profile.tracking.trackers]
    try:
        yield final_state
    except Exception:
        final_state.state = "failed"
        raise
    except BaseException:
        final_state.state = "stopped"
        raise
    finally:
        _finish(processes, final_state)


def catch_up(folder: Path) -> None:
    """Send late evaluations of a run that has ended to the trackers that followed it."""
    profile = load(str(folder / run_files.PROFILE))
    if profile.tracking.trackers and state_files.is_dir(folder / run_files.TRACKERS):
        with tracking(profile, folder, labels_of(profile, profile.name, None)) as final_state:
            files = run_files.REPORT_JSON, run_files.ALERTS
            report, alerts = (state_files.read_json(folder / file) for file in files)
            row = last_training_row(folder)
            finished = is_finished(report, alerts, row["step"] if row else None, profile.train.steps)
            final_state.state = "finished" if finished else "stopped"


class TrackerProcess:
    """The process of one tracker; failing to start it is only a warning."""

    def __init__(self, name: str, profile: Profile, folder: Path, labels: Mapping[str, str]) -> None:
        self.name = name
        self._warned = False
        self._child: subprocess.Popen[str] | None = None
        self._listener = threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True)
        run = {
            "name": profile.name,
            "project": profile.tracking.project,
            "config": flat_profile(profile),
            "labels": dict(labels),
            "tags": profile.tracking.tags,
        }
        first = json.dumps({"tracker": name, "folder": str(folder.absolute()), "run": run})
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        log_file = folder / run_files.LOGS / f"tracker-{name.replace(':', '.')}.log"
        try:
            state_files.make_folder(log_file.parent)
            with log_file.open("ab") as output:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "tasks.tracking.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env={**QUIET, **environment, **SAFE_PATH},
                    text=True,
                    start_new_session=True,  # Ctrl-C reaches the flow only, which then sends the final state
                )
            self._listener.start()
            self._send(first)
        except OSError as error:
            self._warn(str(error))

    def end(self, final_state: FinalState) -> None:
        files = [(str(path.absolute()), kind) for path, kind in final_state.files]
        with contextlib.suppress(OSError):  # the process has ended already
            self._send(json.dumps({"state": final_state.state, "files": files}))

    def wait(self, deadline: float) -> None:
        """Wait for the process until `deadline` (time.monotonic), then kill it."""
        if self._child is None:
            return
        try:
            code = self._child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            self._warn(f"did not finish within {FINISH_SECONDS:.0f} s")
        else:
            if code:
                self._listener.join(LAST_WORDS_SECONDS)  # the reason, if it gave one, says more than the code
                self._warn(f"ended with exit code {code}")

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _send(self, line: str) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.write(f"{line}\n")
            self._child.stdin.flush()

    def _listen(self) -> None:
        """Log the first error that the process reports."""
        assert self._child is not None
        for line in self._child.stdout or ():
            self._warn(line.strip())

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            advice = "the run continues, and metrics.jsonl and TensorBoard have all metrics"
            log.warning("tracker %s: %s; %s", self.name, reason, advice)


def _finish(processes: Sequence[TrackerProcess], final_state: FinalState) -> None:
    try:
        for process in processes:
            process.end(final_state)
        deadline = time.monotonic() + FINISH_SECONDS
        for process in processes:
            process.wait(deadline)
    finally:  # also if Ctrl-C interrupts the wait
        for process in processes:
            process.kill()


def results(store: Store, folder: Path, parent: Parent | None) -> list[tuple[Path, str]]:
    """Files of a finished run for its trackers: the report, and for a fork the comparison with its parent."""
    found = [(folder / run_files.REPORT, "report")]
    if parent is not None:
        try:
            page = comparison_page.render(*load_runs(store, [parent.run, folder.name]))
            found.append((html.write(folder / "compare.html", page), "comparison"))
        except (ProfileError, OSError) as error:  # the parent may have been removed
            log.warning("cannot compare with the parent run %s: %s", parent.run, error)
    return found


def labels_of(profile: Profile, source: str, parent: str | None) -> dict[str, str]:
    """Tags that every run gets: its profile, its parent if it is a fork, and the cluster.

    Args:
        source: name or path of the profile.
        parent: RUN@STEP; None if the run is not a fork.
    """
    cluster = profile.cluster
    devices = f"{cluster.nodes} x {cluster.devices_per_node} {cluster.accelerator or cluster.device}"
    path = Path(source)
    if path.match(f"runs/*/{run_files.PROFILE}"):  # the parent's, of a fork: its profile has its name
        name = path.parent.name
    else:
        name = path.stem if path.suffix in (".yaml", ".yml") else source
    labels = {"profile": name, "cluster": f"{cluster.launcher} {devices}"}
    return {**labels, "parent": parent} if parent else labels
