"""Small state files: written durably, replaced atomically, and never trusted blindly when read.

A machine that loses power may keep a file's name without its contents, and a file that is empty or cut must not stop every later
start. `read_json` takes a damaged file for a missing one, with a warning: for state that is made again. Where that would be
wrong, as for a counter or a decision, `read_text` leaves the judgment to the caller, who names the file.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def write(path: Path, text: str) -> None:
    """Replace a file atomically; its contents are on the disk before its name."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_text(path: Path) -> str | None:
    """Contents of a file; None if it does not exist. Raises OSError if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None, with a warning, if the file is damaged, and None if it does not exist."""
    text = read_text(path)
    if text is None:
        return None
    found = parse(text)
    if found is None:
        log.warning(
            "%s: damaged (%s); ignored", path, "empty" if not text.strip("\0 \n") else "not a JSON object"
        )
    return found


def parse(text: str) -> dict[str, Any] | None:
    """The JSON object of a text; None if there is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
