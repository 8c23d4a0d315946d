"""Imports of packages: their docstrings list those of this project; `parallel` only needs torch."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("flows", "tasks", "modeling", "parallel", "profiles")


def is_package(name: str) -> bool:
    return (ROOT / name.replace(".", "/") / "__init__.py").exists()


def is_module(name: str) -> bool:
    return is_package(name) or (ROOT / name.replace(".", "/")).with_suffix(".py").exists()


def imported_modules(path: Path) -> Iterator[str]:
    """Modules that a file imports when it runs, in functions too."""
    tree = ast.parse(path.read_text())
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    for_types = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {inner for block in for_types for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if is_module(name) else node.module for name in full)


def imported_packages(package: str) -> list[str]:
    """Imported top folders; in the package's own one, its folders, or itself for its modules.

    A top folder's imports include those of its folders.
    """
    top, found = package.split(".")[0], set()
    for path in (ROOT / package.replace(".", "/")).glob("**/*.py" if package == top else "*.py"):
        for module in imported_modules(path):
            first, *rest = module.split(".")
            if first not in FOLDERS or f"{module}.".startswith(f"{package}."):
                continue
            inner = f"{first}.{rest[0]}" if first == top and rest else first
            found.add(inner if is_package(inner) else first)
    return sorted(found - {package})


def test_package_docstrings_end_with_what_the_package_imports():
    wrong = {}
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")]
    for path in paths:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        *others, last = [f"`{name}`" for name in imported_packages(package)] or [
            "nothing else of this project"
        ]
        sentence = f"Imports {', '.join(others)}{' and ' if others else ''}{last}."
        if re.findall(r"\bImports [^.]*(?:\.\w[^.]*)*\.", text) != [sentence]:
            wrong[package] = sentence
    assert not wrong
    assert len(paths) > 30


def test_parallel_imports_only_torch_and_what_torch_requires():
    imported = {
        module.split(".")[0]
        for path in (ROOT / "parallel").rglob("*.py")
        for module in imported_modules(path)
    }
    assert imported - sys.stdlib_module_names == {"parallel", "torch", "numpy", "fsspec", "triton"}
