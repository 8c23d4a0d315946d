"""Write docs/files.md, the first line of every module's docstring: `python docs/site/files.py`"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "files.md"
FOLDERS = ("flows", "tasks", "modeling", "parallel", "profiles", "benchmarks", "tests")
HEAD = """# Files

Every module with the first line of its docstring, by folder. [Architecture](architecture.md#the-folders) says how the folders
depend on each other and where to start reading. Tests are not listed: those of `tasks/store/locks.py` are in
`tests/tasks/store/test_locks.py` or a file near it; what they share, such as servers to test with, is at the end.
"""


def page() -> str:
    """The page, made from the repository's files."""
    return HEAD + "".join(_sections())


def _sections() -> Iterator[str]:
    """A section per folder that has modules."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"), key=_order)]
    for folder, members in groupby(paths, key=lambda path: path.parent):
        lines = {path.name: _first_line(path) for path in members if not path.name.startswith("test_")}
        about = lines.pop("__init__.py", "")
        if lines:
            rows = "".join(f"- `{name}`: {line}\n" for name, line in lines.items())
            yield f"\n## {folder.relative_to(ROOT)}/\n\n{about}\n\n{rows}".replace("\n\n\n", "\n")


def _order(path: Path) -> tuple[Path, str]:
    return path.parent, path.name


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
