"""Uploads metrics, and what a machine needs to take over a run, to a remote store before a checkpoint.

So the store has all rows up to a checkpoint. The flow uploads the entire run folder too (tasks/store/sync.py), but large files
rarely, and nothing while no flow follows the job. A machine that takes over the run has only what is in the store: by the
attempt, it finds that its own copy of the run is outdated, and counts its own attempts from there.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from parallel.checkpoint.locations import Location, filesystem
from parallel.checkpoint.object_stores import explained
from profiles.files import run_files, state_files

# The attempt is last, as in a sync: until it is uploaded, the others count as the earlier attempt's.
FILES = (run_files.METRICS, run_files.EVENTS, run_files.RESUMED, run_files.ATTEMPT)
log = logging.getLogger(__name__)


class RowUpload:
    """Uploads FILES of a run folder in the background while a checkpoint is written.

    Args:
        checkpoints: where they are; FILES are uploaded beside it if it is remote.
    """

    def __init__(self, run: Path, checkpoints: Location) -> None:
        self._run = run
        self._target = str(checkpoints).rstrip("/").rpartition("/")[0] if "://" in str(checkpoints) else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="row-upload")
        self._pending: Future[None] | None = None

    def begin(self) -> None:
        """Begin an upload; the rows of all steps so far must be in the files."""
        if self._target is not None:
            self._pending = self._pool.submit(self._upload, self._target)

    def wait(self) -> None:
        """Wait for the upload; a failure is a warning, since the flow uploads the files later."""
        if self._pending is None:
            return
        try:
            self._pending.result()
        except Exception as error:  # of any storage
            log.warning(f"{self._target}: metrics cannot be uploaded: {error!r}; uploading them later")
        self._pending = None

    def close(self) -> None:
        self._pool.shutdown()

    @explained()
    def _upload(self, target: str) -> None:
        files, root = filesystem(target)
        for name in FILES:
            if state_files.exists(self._run / name):
                files.put_file(str(self._run / name), f"{root}/{name}")
