"""User functions (`module:function` in a profile): finding and checking them without running them.

Modules are searched on sys.path, then in the working folder, even if Python runs with a safe path (-P, PYTHONSAFEPATH). The
working folder is last so that a user's own tasks.py, profiles/ or modeling/ never replaces Trainshed's packages; a function in a
module of one of those names is rejected.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.schema import Profile
from trainshed import PACKAGES

# Names in rows of metrics.jsonl that a user metric may not have.
RESERVED_METRICS = ("step", "loss", "validation_loss", "perplexity", "tokens", "skipped", "rank_seconds")


def search_path() -> list[str]:
    """Folders in which user modules are searched: sys.path with the working folder last."""
    folder = str(Path.cwd())
    return [*(entry for entry in sys.path if entry not in ("", folder)), folder]


def reject_reserved(module: str) -> None:
    """Raise ValueError if a module's name is taken by one of Trainshed's packages."""
    if module.partition(".")[0] in PACKAGES:
        raise ValueError(f"{module} is a module of Trainshed; rename the file")


def module_file(module: str) -> Path | None:
    """The file of a user module, found without running any of its code; None if there is none."""
    folders: list[str] | None = search_path()
    spec = None
    for depth in range(module.count(".") + 1):
        spec = PathFinder.find_spec(".".join(module.split(".")[: depth + 1]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin else None


def imported_files(path: Path, root: Path) -> list[Path]:
    """Modules below a folder that a file imports, directly or not; found without running them."""
    found, waiting = {path}, [path]
    while waiting:
        try:
            tree = ast.parse(waiting.pop().read_text())
        except (SyntaxError, UnicodeDecodeError):  # importing it fails anyway
            continue
        for module in _imported_names(tree):
            file = root.joinpath(*module.split("."))
            for each in (file.with_suffix(".py"), file / "__init__.py"):
                if each not in found and state_files.is_file(each):
                    found.add(each)
                    waiting.append(each)
    return sorted(found - {path})


def _imported_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names of the modules, or of objects in them, that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def check(profile: Profile) -> None:
    """Check that the functions a profile names exist, with distinct metric names. Raises ProfileError."""
    metrics: set[str] = set(RESERVED_METRICS)
    for key, name in _named_functions(profile):
        module, _, function = name.partition(":")
        try:
            reject_reserved(module)
        except ValueError as error:
            raise ProfileError(key, name, str(error)) from None
        path = module_file(module)
        if path is None:
            raise ProfileError(key, name, f"there is no module {module} in {Path.cwd()} or on Python's path")
        try:
            defined = _defined_names(path)
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            raise ProfileError(key, name, f"{path} cannot be read: {error}") from error
        if function not in defined:
            close = [f"{module}:{match}" for match in difflib.get_close_matches(function, defined)]
            raise ProfileError(key, name, f"{path.name} has no {function}", close)
        if key.startswith("evaluate."):
            if function in metrics:
                raise ProfileError(key, name, f"{function} is already the name of another metric; rename it")
            metrics.add(function)


def _named_functions(profile: Profile) -> Iterator[tuple[str, str]]:
    """Profile key and `module:function` of each user function."""
    if profile.train.loss is not None:
        yield "train.loss", profile.train.loss
    for number, name in enumerate(profile.evaluate.metrics):
        yield f"evaluate.metrics.{number}", name
    for number, name in enumerate(profile.tracking.trackers):
        if ":" in name:
            yield f"tracking.trackers.{number}", name


def _defined_names(path: Path) -> list[str]:
    """Names that a module defines or imports at its top level."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names
