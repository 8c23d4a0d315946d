"""Uploads a run folder to a remote store: when an attempt starts, once a minute and at the end.

Checkpoints are excluded: training writes them to the store directly, and the metrics up to each of them. A file that fails to
upload is retried with the next sync; training neither waits for it nor fails.

Newer data in the store is never overwritten: nothing is uploaded if the store has files of a later training attempt (from
another machine) or of another run of that name, and a log or metrics file does not replace a longer copy of the same attempt. A
new attempt does replace metrics.jsonl, which it has truncated to the step that it resumes from.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Self

from profiles.files import run_files, state_files
from tasks.store.backends.backend import Backend
from tasks.store.backends.folder import FolderBackend
from tasks.store.backends.objects import ObjectBackend

log = logging.getLogger(__name__)

INTERVAL = 60.0  # seconds
POLL = 5.0  # seconds
# Changes of these are uploaded at once: a machine that takes over the run must know them.
DECISIONS = (run_files.ATTEMPT, run_files.RESUMED)
LARGE = 8 << 20  # bytes; S3 has no append, so a larger file, such as a log after days, is uploaded less often
LARGE_INTERVAL = 600.0  # seconds
# Written to the store directly; a copy of an artifact; written only by a promotion (continual.py).
EXCLUDED = {run_files.CHECKPOINTS, run_files.GRAPHS, run_files.PROMOTED}
# Written to the store directly, also from other machines; downloaded with the folder.
DIRECT = {run_files.EVALUATIONS, run_files.ARTIFACTS}
APPENDED = (".jsonl", ".log")  # suffixes of files that only grow during an attempt; TensorBoard's do too


def is_excluded(name: str) -> bool:
    """Whether a run folder's file is not synced with the store: a part in EXCLUDED, or in progress."""
    part, *inner = name.split("/")
    hidden = any(component.startswith(".") for component in (part, *inner))
    return part.partition("~")[0] in EXCLUDED or part.endswith(".partial") or hidden


def is_append_only(name: str) -> bool:
    """Whether a run folder's file only grows during an attempt, so that its longer copy is the newer one."""
    return name.endswith(APPENDED) or ".tfevents." in PurePosixPath(name).name


def attempt_in(backend: Backend, folder: str) -> int:
    """Number of the training attempt of a copy of a run folder; 0 before the first."""
    name = f"{folder}/{run_files.ATTEMPT}".lstrip("/")
    data = backend.read(name)
    try:
        return 0 if data is None else int(data)
    except ValueError:
        reason = "corrupted (not a number); restore the file"
        raise ValueError(f"{backend.location(name)}: {reason}") from None


class RunSync:
    """Context manager: uploads a folder in the background and at its end; does nothing without `remote`.

    Args:
        name: the folder's name in the remote store.
    """

    def __init__(
        self, folder: Path, remote: ObjectBackend | None, name: str, interval: float = INTERVAL
    ) -> None:
        self._folder, self._remote, self._name, self._interval = folder, remote, name, interval
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and mtime of each file when it was uploaded
        self._times: dict[str, float] = {}  # when each file was uploaded
        self._stored: dict[str, int] | None = None  # sizes of the store's files before this sync
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-sync", daemon=True)

    def upload(self, *, postpone_large: bool = False) -> None:
        """Upload files changed since the last call; `postpone_large`: large ones at most every LARGE_INTERVAL."""
        if self._remote is None:
            return
        stored_record = self._remote.read(f"{self._name}/{run_files.IDENTITY}")
        records = FolderBackend(self._folder).read(run_files.IDENTITY), stored_record
        ours, theirs = (state_files.parse(record or b"") or {} for record in records)
        if theirs.get("identity") not in (None, ours.get("identity")) or run_files.is_other_run(theirs, ours):
            message = "%s: not uploaded: the store has another run of this name, which replaced this one"
            log.warning(message, self._name)
            return
        here = attempt_in(FolderBackend(self._folder), "")
        stored = attempt_in(self._remote, self._name)
        if stored > here:
            message = "%s: not uploaded: the store has attempt %d, this folder attempt %d"
            log.warning(message, self._name, stored, here)
            return
        if stored < here:
            self._stored = {}  # the store's files are of an earlier attempt: replace all
        elif self._stored is None:
            self._stored = self._remote.files(self._name)
        states = self._states()
        names = []
        for name, state in states.items():
            since = time.monotonic() - self._times.get(name, float("-inf"))
            postponed = postpone_large and state[0] > LARGE and since < LARGE_INTERVAL
            if self._uploaded.get(name) != state and not postponed and not self._is_shorter(name, state[0]):
                names.append(name)
        # The attempt's number is uploaded last, so that an interrupted upload still counts as the earlier attempt.
        for is_attempt in (False, True):
            if batch := [name for name in names if (name == run_files.ATTEMPT) is is_attempt]:
                self._remote.upload(self._folder, batch, self._name)
                self._uploaded |= {name: states[name] for name in batch}
                self._times |= dict.fromkeys(batch, time.monotonic())

    def _states(self) -> dict[str, tuple[int, int]]:
        """Size and mtime of every file to upload."""
        states = {}
        for name in FolderBackend(self._folder).files(""):
            with suppress(FileNotFoundError):  # removed since it was listed
                if not is_excluded(name) and name not in DIRECT:
                    stat = (self._folder / name).stat()
                    states[name] = (stat.st_size, stat.st_mtime_ns)
        return states

    def _is_shorter(self, name: str, size: int) -> bool:
        """Whether another machine has uploaded a longer copy of an append-only file."""
        there = (self._stored or {}).get(name, 0)
        if not is_append_only(name) or name in self._uploaded or size >= there:
            return False
        message = "%s/%s: has %d bytes here, %d in the store; not replaced"
        log.warning(message, self._name, name, size, there)
        return True

    def _try_upload(self, *, postpone_large: bool) -> None:
        try:
            self.upload(postpone_large=postpone_large)
        except Exception as error:
            what_next = "start the run again to upload it" if self._stopped.is_set() else "retrying"
            log.warning("%s: cannot sync with the store: %s; %s", self._name, error, what_next)

    def _run(self) -> None:
        due, seen = time.monotonic() + self._interval, None
        while not self._stopped.wait(min(POLL, self._interval)):
            decisions = [self._mtime(name) for name in DECISIONS]
            if decisions != seen or time.monotonic() >= due:
                self._try_upload(postpone_large=True)
                due, seen = time.monotonic() + self._interval, decisions

    def _mtime(self, name: str) -> int | None:
        try:
            return (self._folder / name).stat().st_mtime_ns
        except OSError:
            return None

    def __enter__(self) -> Self:
        if self._remote is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._try_upload(postpone_large=False)
