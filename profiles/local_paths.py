"""Local paths in a profile, relative to the file that sets them.

Paths in overrides are relative to the working folder.

A resolved profile has paths relative to the working folder, or absolute ones, so that they mean the same wherever it is stored.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from profiles.files import state_files
from profiles.sections.objective import TEMPLATES

log = logging.getLogger(__name__)

RUN = "run:"  # prefix of a source that is a run's export: run:NAME
STORED = "profile.yaml"  # a run's resolved profile
SECTIONS = {"model", "tokenizer", "data", "init", "parallel", "train", "compile", "checkpoint", "cluster"}


def local_path(path: str) -> Path:
    """The absolute path of a file or folder."""
    return Path(path).expanduser().absolute()


def searched(path: str) -> str:
    """For an error's end: where a relative path was looked for; empty for an absolute one."""
    return "" if Path(path).is_absolute() else f": {local_path(path)}"


def from_folder(values: dict[str, Any], file: Path, folder: Path) -> None:
    """Make paths that a profile's file sets relative to `folder` relative to the working folder.

    A path that exists only in the working folder, as in earlier versions, is used with a warning. Resolved profiles, which the
    program has written, have paths from the working folder already.
    """
    if is_resolved(values, file) or folder.resolve() == Path.cwd():
        return

    def replace(section: Any, name: str, key: str) -> None:
        value = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(value, str) and _is_path(value, name, folder):
            section[name] = _located(value, key, file, folder)

    for name, listed in (("data", "sources"), ("continual", "stand_in")):
        section = values.get(name)
        sources = section.get(listed) if isinstance(section, Mapping) else None
        for number, source in enumerate(sources if isinstance(sources, list) else ()):
            replace(source, "path", f"{name}.{listed}.{number}.path")
    keys = (("tokenizer", "source"), ("init", "from"), ("objective", "template"), ("continual", "include"))
    for section, name in keys:
        replace(values.get(section), name, f"{section}.{name}")


def is_resolved(values: Mapping[str, Any], file: Path) -> bool:
    """Whether the program has written a profile's file, such as that of a run folder."""
    return "extends" not in values and (file.name == STORED or values.keys() >= SECTIONS)


def _is_path(value: str, name: str, folder: Path) -> bool:
    """Whether a key's value is a relative local path.

    Other values are URLs, runs, repositories and names of templates.
    """
    if not value or value[0] in "/~" or "://" in value:
        return False
    if name in ("path", "include", "template"):
        return name != "template" or value not in TEMPLATES
    if value == "train" or value.startswith(RUN):
        return False
    return value.startswith(".") or (folder / value).is_dir() or Path(value).is_dir()


def _located(value: str, key: str, file: Path, folder: Path) -> str:
    """The path from the working folder of a path from another folder."""
    path = folder / value
    beside, here = _exists(path), _exists(Path(value))
    if here and not beside:
        _warn(
            f"{file}: {key} = {value}: there is no {path}; the one in the working folder, {local_path(value)}, is used: "
            "write this path relative to the profile's folder"
        )
        return value
    if here and beside and path.resolve() != local_path(value).resolve():
        _warn(
            f"{file}: {key} = {value}: {path} is used, not the one in the working folder, {local_path(value)}"
        )
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _exists(path: Path) -> bool:
    """Whether there is a file or folder, a match of a pattern, or a Megatron pair with this prefix."""
    is_path = state_files.exists(path) or state_files.is_file(Path(f"{path}.idx"))
    return is_path or bool(glob.glob(str(path), recursive=True))


@cache
def _warn(message: str) -> None:
    """Log a warning once, however often the profile is loaded."""
    log.warning("%s", message)
