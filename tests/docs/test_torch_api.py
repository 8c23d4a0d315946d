"""CONTRIBUTING.md lists every private name of torch that the code uses, for a move to another version of torch."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("flows", "tasks", "modeling", "parallel", "profiles")
SHORT = {
    "_aten": "torch.ops.aten",
    "_ops": "torch.ops._c10d_functional",
    "_c10d": "torch.ops._c10d_functional",
}
DOTTED = re.compile(r"(?<![\w.])(torch|_aten|_ops|_c10d)((?:\.\w+)+)")
IMPORTED = re.compile(r"^\s*from (torch[\w.]*) import ([\w, ]+)", re.MULTILINE)


def private_names() -> set[str]:
    """Dotted names with a private part; of a module and names in it, the names."""
    found = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        names = {SHORT.get(first, first) + rest for first, rest in DOTTED.findall(text)}
        names |= {
            f"{module}.{name.split()[0]}"
            for module, imported in IMPORTED.findall(text)
            for name in imported.split(",")
        }
        found |= {name for name in names if re.search(r"\._(?!_)", name)}
    found = {name.removesuffix(".default") for name in found}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def documented() -> set[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return set(
        re.findall(r"`(torch[\w.]+)`", text.partition("<!-- torch -->")[2].partition("<!-- /torch -->")[0])
    )


def test_private_names_of_torch_are_listed():
    assert documented() == private_names()


@pytest.mark.parametrize("name", sorted(documented()))
def test_private_name_exists(name):
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
            break
        except ImportError:
            continue
    for part in parts[end:]:
        found = getattr(found, part)
