"""Local paths in a profile, relative to the file that sets them.

Paths in overrides are relative to the working folder.

A resolved profile has paths relative to the working folder, or absolute ones, so that they mean the same wherever it is stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiles.files import run_files, state_files
from profiles.sections.objective import TEMPLATES

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # possible name of one on the hub, org/name
RUN = "run:"  # prefix of a source that is a run's export: run:NAME
SECTIONS = {"model", "tokenizer", "data", "init", "parallel", "train", "compile", "checkpoint", "cluster"}


def local_path(path: str) -> Path:
    """The absolute path of a file or folder."""
    return Path(path).expanduser().absolute()


def searched(path: str) -> str:
    """For an error's end: where a relative path was looked for; empty for an absolute one."""
    return "" if Path(path).is_absolute() else f": {local_path(path)}"


def is_resolved(values: Mapping[str, Any]) -> bool:
    """Whether the program wrote these values: a profile by hand extends another or omits sections."""
    return "extends" not in values and values.keys() >= SECTIONS


def from_folder(values: dict[str, Any], file: Path, folder: Path) -> None:
    """Make paths that a profile's file sets relative to `folder` relative to the working folder.

    Resolved profiles, which the program has written, have paths from the working folder already.
    """
    stored = "extends" not in values and file.name == run_files.PROFILE
    if stored or is_resolved(values) or folder.resolve() == Path.cwd():
        return

    def replace(section: Any, name: str) -> None:
        value = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(value, str) and _is_path(value, name, folder):
            path = folder / value
            section[name] = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

    for name, listed in (("data", "sources"), ("continual", "stand_in")):
        section = values.get(name)
        sources = section.get(listed) if isinstance(section, Mapping) else None
        for source in sources if isinstance(sources, list) else ():
            replace(source, "path")
    keys = (("tokenizer", "source"), ("init", "from"), ("objective", "template"), ("continual", "include"))
    for section, name in keys:
        replace(values.get(section), name)


def _is_path(value: str, name: str, folder: Path) -> bool:
    """Whether a key's value is a relative local path.

    Other values are URLs, runs, repositories and names of templates. The name of a repository is a path only if that is a folder
    beside the profile; a folder of that name in the working folder is a copy of the repository, as it is for transformers.
    """
    if not value or value[0] in "/~" or "://" in value:
        return False
    if name in ("path", "include", "template"):
        return name != "template" or value not in TEMPLATES
    if value == "train" or value.startswith(RUN):
        return False
    if value.startswith(".") or state_files.is_dir(folder / value):
        return True
    return state_files.is_dir(Path(value)) and not REPOSITORY.fullmatch(value)
