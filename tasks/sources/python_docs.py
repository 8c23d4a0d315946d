"""English text from Python itself: the language reference and stdlib docstrings, about 2 MB.

A document is one topic of `pydoc_data.topics`, or the docstrings of one module in source order; no text appears twice. Modules
are parsed, not imported. Test suites are excluded, since many installations lack them.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

RECIPE = 2  # increment when the same files give different documents or records


def documents() -> Iterator[str]:
    """Topics by name, then modules by path."""
    from pydoc_data.topics import topics

    seen = dict.fromkeys(topics[name] for name in sorted(topics))
    yield from list(seen)
    for path in _modules():
        docstrings = [text for text in dict.fromkeys(_docstrings(path)) if text not in seen]
        seen.update(dict.fromkeys(docstrings))
        if docstrings:
            yield "\n\n".join(docstrings)


def records() -> Iterator[dict[str, str]]:
    """Fine-tuning records: what a class or function does, answered by its docstring's first paragraph.

    The rejected answer ends after half of its words.
    """
    root, before = _root(), None
    for path in _modules():
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for name, text in _named_docstrings(path):
            answer = " ".join(text.partition("\n\n")[0].split())
            if not 20 <= len(answer) <= 400 or answer == before:
                continue
            prompt = f"What does {module}.{name} do?\n"
            words = answer.split()
            half = " ".join(words[: max(1, len(words) // 2)])
            yield {"prompt": prompt, "completion": answer, "chosen": answer, "rejected": half}
            before = answer


def digest() -> str:
    """Hash of the names and contents of the source files."""
    total = hashlib.sha256(f"python-docs {RECIPE}".encode())
    root = _root()
    for path in _modules():
        total.update(path.relative_to(root).as_posix().encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _modules() -> list[Path]:
    """Source files of the standard library, without test suites and site-packages."""
    root = _root()
    tests = {"test", "tests", "idle_test"}
    top = [path for path in root.iterdir() if path.stem in sys.stdlib_module_names]
    files = [file for path in top for file in (path.rglob("*.py") if path.is_dir() else [path])]
    sources = [file for file in files if file.suffix == ".py"]
    return sorted(file for file in sources if not tests & {*file.relative_to(root).parts})


def _docstrings(path: Path) -> Iterator[str]:
    return (text for _, text in _named_docstrings(path))


def _named_docstrings(path: Path) -> Iterator[tuple[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escape sequences in old modules
        yield from _walk(ast.parse(path.read_bytes()), "")


def _walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Docstrings in source order, each with its object's name in the module."""
    name = ".".join(filter(None, (name, getattr(node, "name", ""))))
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if documented and (text := ast.get_docstring(node)):
        yield name, text
    for block in ("body", "handlers", "cases", "orelse", "finalbody"):  # fields with statements
        for statement in getattr(node, block, ()):
            yield from _walk(statement, name)
