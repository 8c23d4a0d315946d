"""Progress of a conversion on disk: a journal while it runs, a record once it is complete.

`conversion.jsonl` begins with the inputs, followed by a line with size and sha256 of each written file; a later attempt with the
same inputs keeps the files whose hash still matches. `conversion.json` is written last and replaces the journal.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from modeling.conversion.tensor_files import File, file_sha256
from profiles.errors import ProfileError
from profiles.files import state_files

JOURNAL, RECORD = "conversion.jsonl", "conversion.json"
log = logging.getLogger(__name__)


class Journal:
    """The journal of one conversion in its destination folder.

    Args:
        folder: existing destination folder.
        inputs: everything that determines the result, as JSON.
        replace: whether to empty a folder that contains anything else.

    Attributes:
        files: size, sha256 and format note of each complete file, by name.
        finished: the record, or None while the conversion is incomplete.
    """

    def __init__(self, folder: Path, inputs: dict[str, Any], replace: bool) -> None:
        self.folder, self.inputs = folder, inputs
        self.files: dict[str, dict[str, Any]] = {}
        self.finished: dict[str, Any] | None = None
        self._lock = Lock()
        record = state_files.parse(state_files.read(folder / RECORD) or b"")
        if record and record.get("job") == inputs and all(map(self._has_size, record["files"].items())):
            log.info("%s: already converted", folder)
            self.finished = record
            return
        lines = _lines(folder / JOURNAL)
        if any(folder.iterdir()) and (not lines or lines[0] != {"job": inputs}):
            if not replace:
                reason = "is not empty and holds something else; name a new or empty folder"
                raise ProfileError("DESTINATION", str(folder), reason)
            shutil.rmtree(folder)
            folder.mkdir()
            lines = []
        for line in lines[1:]:
            name = line["file"]
            if self._has_size((name, line)) and file_sha256(folder / name) == line["sha256"]:
                self.files[name] = line
        rows = ({"job": inputs}, *self.files.values())
        state_files.write(folder / JOURNAL, "".join(json.dumps(line) + "\n" for line in rows))

    def _has_size(self, entry: tuple[str, dict[str, Any]]) -> bool:
        """Whether a file exists with its recorded size."""
        path = self.folder / entry[0]
        return state_files.is_file(path) and path.stat().st_size == entry[1]["size"]

    def add(self, name: str, path: Path, note: Any, sha256: str) -> None:
        """Record that file `name` is complete, before the temporary `path` is renamed to it."""
        line = {"file": name, "size": path.stat().st_size, "sha256": sha256, "note": note}
        with self._lock, (self.folder / JOURNAL).open("a") as file:
            file.write(json.dumps(line) + "\n")
            self.files[name] = line

    def finish(self, files: Sequence[File], facts: dict[str, Any]) -> dict[str, Any]:
        """Replace the journal with the record of all files and `facts`; returns the record."""
        lines = {file.name: self.files[file.name] for file in files}
        described = {name: {key: line[key] for key in ("size", "sha256")} for name, line in lines.items()}
        self.finished = {**facts, "files": described, "job": self.inputs}
        state_files.write(self.folder / RECORD, json.dumps(self.finished, indent=1))
        (self.folder / JOURNAL).unlink()
        return self.finished


@contextmanager
def open_journal(folder: Path, inputs: dict[str, Any], size: int, replace: bool = False) -> Iterator[Journal]:
    """Open or create the journal of a conversion; creates `folder`, unless the conversion is rejected.

    Args:
        size: bytes that the conversion writes.
        replace: whether to empty a folder that contains anything else.

    Raises:
        ProfileError: the folder contains something else, or its disk has too little space.
    """
    existed = state_files.is_dir(folder)
    try:
        state_files.make_folder(folder)
    except NotADirectoryError as error:
        raise ProfileError("DESTINATION", str(error.filename), "is no folder; name another one") from None
    except OSError as error:
        raise ProfileError("DESTINATION", str(folder), f"cannot be written: {error.strerror}") from error
    journal = Journal(folder, inputs, replace)
    missing = 0 if journal.finished else size - sum(line["size"] for line in journal.files.values())
    free = shutil.disk_usage(folder).free
    if missing > free:
        if not existed:
            shutil.rmtree(folder)
        reason = f"its disk has {free / 1e9:.1f} GB free, the conversion needs {missing / 1e9:.1f} GB"
        raise ProfileError("DESTINATION", str(folder), reason)
    yield journal


class Stopped(RuntimeError):
    """The conversion was stopped: another file failed, or the user interrupted it."""


class Progress:
    """Logs progress and throughput at every tenth of `total` bytes; safe to use from several threads."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._begun = total, 0, time.monotonic()
        self._stopped = False
        self._lock = Lock()

    def add(self, count: int) -> None:
        """Count bytes written or compared. Raises Stopped after an error in the block of `workers`."""
        if self._stopped:
            raise Stopped
        with self._lock:
            before, self._done = self._done, self._done + count
            done, total = self._done, self._total
        if total > 10**9 and before * 10 // total < done * 10 // total:
            speed = done / 1e6 / (time.monotonic() - self._begun)
            log.info("%3.0f %% of %.1f GB, %.0f MB/s", 100 * done / total, total / 1e9, speed)

    @contextmanager
    def workers(self, count: int) -> Iterator[ThreadPoolExecutor]:
        """Threads that call `add`; after an error in the block, running calls end at their next `add`."""
        with ThreadPoolExecutor(count) as pool:
            try:
                yield pool
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _lines(path: Path) -> list[Any]:
    """The lines of a journal before the first incomplete one, which a killed process was writing."""
    lines = []
    for line in (state_files.read_text(path) or "").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines
