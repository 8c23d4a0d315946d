"""The functions of the user's that a profile names, found without running them: where they are, and that they are there."""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from profiles.errors import ProfileError
from profiles.schema import Profile

# Columns of metrics.jsonl that an evaluation's line has.
TAKEN = (
    "step",
    "loss",
    "validation_loss",
    "perplexity",
    "tokens",
    "skipped",
    "rank_seconds",
)  # of the lines of metrics.jsonl


def named(profile: Profile) -> Iterator[tuple[str, str]]:
    """Key and `module:function` of each."""
    if profile.train.loss is not None:
        yield "train.loss", profile.train.loss
    for number, name in enumerate(profile.evaluate.metrics):
        yield f"evaluate.metrics.{number}", name


def check(profile: Profile) -> None:
    """Refuse a function that is not there, and metrics that could not be told apart.

    Raises:
        ProfileError: the first such thing.
    """
    seen: set[str] = set(TAKEN)
    for key, name in named(profile):
        module, _, function = name.partition(":")
        path = source(module)
        if path is None:
            raise ProfileError(
                key, name, f"there is no module {module} in {Path.cwd()} or where Python looks"
            )
        try:
            there = _defined(path)
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            raise ProfileError(key, name, f"{path} cannot be read: {error}") from error
        if function not in there:
            close = [f"{module}:{each}" for each in difflib.get_close_matches(function, there)]
            raise ProfileError(key, name, f"{path.name} has no {function}", close)
        if key != "train.loss":
            if function in seen:
                raise ProfileError(key, name, f"{function} is the name of another number that is recorded")
            seen.add(function)


def source(module: str) -> Path | None:
    """The file of a module, as a program that is started in this folder would find it; no code of it is run."""
    folders: list[str] | None = [*sys.path, str(Path.cwd())]
    for depth in range(module.count(".") + 1):
        spec = PathFinder.find_spec(".".join(module.split(".")[: depth + 1]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec.origin else None


def _defined(path: Path) -> list[str]:
    """Names that a module defines or imports at its top."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            found += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return found
