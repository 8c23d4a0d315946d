"""Folders that work is done in until it is finished: removed with the block, or by others once their process is gone."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from tasks.store.lock_owner import Owner

log = logging.getLogger(__name__)

ABANDONED = (
    7 * 24 * 3600.0
)  # seconds after which a folder whose owner cannot be asked is taken for left behind


@contextmanager
def staging(root: Path, name: str) -> Iterator[Path]:
    """A new empty folder below `root`, on its file system, for the block; what was moved out of there by then stays."""
    sweep(root)
    outer = root / f"{name}-{uuid4().hex}"
    folder = outer / "files"
    folder.mkdir(parents=True)
    try:
        (outer / "owner.json").write_text(json.dumps(Owner.current().to_json()))
        yield folder
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what processes that are gone have left below `root`."""
    for outer in root.iterdir() if root.is_dir() else ():
        try:
            owner = Owner.from_json(json.loads((outer / "owner.json").read_text()))
            left = owner.gone if owner.local else _age(outer) > ABANDONED
        except (OSError, ValueError, KeyError):  # made or removed just now, or half made by a killed process
            left = _age(outer) > ABANDONED
        if left:
            log.info("removing %s, which an interrupted process left behind", outer)
            shutil.rmtree(outer, ignore_errors=True)


def _age(path: Path) -> float:
    """Seconds since a folder was changed; 0 where it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
