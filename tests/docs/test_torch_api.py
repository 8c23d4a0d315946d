"""Private names of torch are used through one module, and exist in the installed torch."""

import re
from pathlib import Path

import pytest

from parallel import torch_internals

ROOT = Path(__file__).parents[2]
FOLDERS = ("flows", "tasks", "modeling", "parallel", "profiles")
DOTTED = re.compile(r"(?<![\w.])torch(?:\.\w+)+")
IMPORTED = re.compile(r"^\s*from (torch[\w.]*) import ([\w, ]+)", re.MULTILINE)


def private_names(text: str) -> set[str]:
    """Dotted names of torch with a private part."""
    names = set(DOTTED.findall(text))
    names |= {
        f"{module}.{name.split()[0]}"
        for module, imported in IMPORTED.findall(text)
        for name in imported.split(",")
    }
    return {name for name in names if re.search(r"\._(?!_)", name)}


def test_private_names_of_torch_are_in_one_module():
    used = {
        str(path.relative_to(ROOT)): names
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (names := private_names(path.read_text()))
    }
    # What pickles of torch's checkpoints name is read as text.
    used.pop("parallel/torch_internals.py")
    assert used == {}


@pytest.mark.parametrize("name", torch_internals.NAMES)
def test_private_name_exists_and_is_used(name):
    assert getattr(torch_internals, name) is not None
    sources = (path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    pattern = re.compile(rf"(?s)from parallel\.torch_internals import (?:\([^)]*|[^\n]*)\b{name}\b")
    assert any(pattern.search(text) for text in sources)
