"""What is done of a conversion: its journal while it is under way, its record afterwards.

`conversion.jsonl` begins with the job and gains a line with size and sha256 for each file that is written; a later attempt at
the same job takes the files whose hash still holds. `conversion.json` is written last, in place of the journal.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from modeling.conversion.tensor_files import File, digest
from profiles.errors import ProfileError

JOURNAL, RECORD = "conversion.jsonl", "conversion.json"
log = logging.getLogger("trainshed")


class Journal:
    """See the module's text.

    Attributes:
        files: of each file that is done, by name: size, sha256 and its format's note.
        finished: the record, once there is one.
    """

    def __init__(self, folder: Path, job: dict[str, Any], replace: bool) -> None:
        self.folder, self.job = folder, job
        self.files: dict[str, dict[str, Any]] = {}
        self.finished: dict[str, Any] | None = None
        self._lock = Lock()
        record = _json(folder / RECORD)
        if record and record.get("job") == job and all(map(self._there, record["files"].items())):
            log.info("%s: this conversion was done before", folder)
            self.finished = record
            return
        lines = _lines(folder / JOURNAL)
        if any(folder.iterdir()) and (not lines or lines[0] != {"job": job}):
            if not replace:
                reason = "has something else in it; name a new folder, or an empty one"
                raise ProfileError("DESTINATION", str(folder), reason)
            shutil.rmtree(folder)
            folder.mkdir()
            lines = []
        for line in lines[1:]:
            name = line["file"]
            if self._there((name, line)) and digest(folder / name) == line["sha256"]:
                self.files[name] = line
        with (folder / JOURNAL).open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in ({"job": job}, *self.files.values()))

    def _there(self, described: tuple[str, dict[str, Any]]) -> bool:
        path = self.folder / described[0]
        return path.is_file() and path.stat().st_size == described[1]["size"]

    def note(self, name: str, path: Path, note: Any, sha256: str) -> None:
        """A file is written; it still lies at `path`, under another name."""
        line = {"file": name, "size": path.stat().st_size, "sha256": sha256, "note": note}
        with self._lock, (self.folder / JOURNAL).open("a") as file:
            file.write(json.dumps(line) + "\n")
            self.files[name] = line

    def finish(self, files: Sequence[File], facts: dict[str, Any]) -> dict[str, Any]:
        """Everything is written; returns the record."""
        described = {
            file.name: {key: self.files[file.name][key] for key in ("size", "sha256")} for file in files
        }
        self.finished = {**facts, "files": described, "job": self.job}
        temporary = self.folder / f".{RECORD}"
        temporary.write_text(json.dumps(self.finished, indent=1))
        temporary.replace(self.folder / RECORD)
        (self.folder / JOURNAL).unlink()
        return self.finished


@contextmanager
def opened(folder: Path, job: dict[str, Any], size: int, replace: bool = False) -> Iterator[Journal]:
    """The journal of a job in a folder, made where there is none; leaves no empty folder behind.

    Args:
        size: bytes that the job writes.
        replace: remove something else that is in the folder, rather than refuse it.

    Raises:
        ProfileError: something else is in the folder, or its disk is too full.
    """
    existed = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ProfileError("DESTINATION", str(folder), "is a file; name a folder") from None
    done = Journal(folder, job, replace)
    left = 0 if done.finished else size - sum(line["size"] for line in done.files.values())
    free = shutil.disk_usage(folder).free
    if left > free:
        if not existed:
            shutil.rmtree(folder)
        reason = f"its disk has {free / 1e9:.1f} GB left, and {left / 1e9:.1f} GB are to be written"
        raise ProfileError("DESTINATION", str(folder), reason)
    yield done


class Stopped(RuntimeError):
    """Another file could not be written, or the user has had enough."""


class Progress:
    """A line in the log for every tenth of so many bytes."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._begun = total, 0, time.monotonic()
        self._stopped = False
        self._lock = Lock()

    def add(self, count: int) -> None:
        """So many bytes more are written.

        Raises:
            Stopped: after `stop`.
        """
        if self._stopped:
            raise Stopped
        with self._lock:
            before, self._done = self._done, self._done + count
            done, total = self._done, self._total
        if total > 10**9 and before * 10 // total < done * 10 // total:
            speed = done / 1e6 / (time.monotonic() - self._begun)
            log.info("%3.0f %% of %.1f GB, %.0f MB/s", 100 * done / total, total / 1e9, speed)

    def stop(self) -> None:
        """Make everybody stop who adds."""
        self._stopped = True


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[Any]:
    """What a journal says; a line that was being written when the process ended does not count."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
