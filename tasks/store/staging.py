"""Staging folders for unfinished work, removed at block end or, after a kill, by the next process."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

from profiles.files import state_files
from profiles.files.state_files import retried
from tasks.store.locks import LockOwner

log = logging.getLogger(__name__)

MAX_AGE = 7 * 24 * 3600.0  # seconds; an older folder of another host counts as abandoned


@contextmanager
def staging_folder(root: Path, name: str) -> Iterator[Path]:
    """New empty folder below `root`, removed after the block; keep files by renaming on its file system."""
    for left in abandoned_folders(root):
        log.info("removing %s, left behind by an interrupted process", left)
        shutil.rmtree(left, ignore_errors=True)
    outer = root / f"{name}-{uuid4().hex}"
    folder = outer / "files"
    try:
        retried(lambda: state_files.make_folder(folder))
        owner = json.dumps(asdict(LockOwner.current())).encode()
        state_files.write(outer / "owner.json", owner, durable=False)
        yield folder
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def abandoned_folders(root: Path) -> Iterator[Path]:
    """The staging folders below `root` whose processes are gone."""
    try:
        folders = list(root.iterdir())
    except OSError:  # does not exist yet, or cannot be listed now: a later call cleans up
        return
    for outer in folders:
        try:
            owner = LockOwner(**json.loads((outer / "owner.json").read_text()))
            abandoned = owner.is_gone if owner.is_local else _age(outer) > MAX_AGE
        except (OSError, ValueError, TypeError):  # being created or removed, or its process was killed
            abandoned = _age(outer) > MAX_AGE
        if abandoned:
            yield outer


def _age(path: Path) -> float:
    """Seconds since a folder was modified; 0 if it does not exist."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
