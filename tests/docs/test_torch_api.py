"""Private names of torch are used through a single module, and exist in the installed torch."""

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import torch

from parallel import torch_internals

ROOT = Path(__file__).parents[2]
FOLDERS = ("flows", "tasks", "modeling", "parallel", "profiles")
DOTTED = re.compile(r"(?<![\w.])torch(?:\.\w+)+")
INTERNALS = re.compile(r"from parallel\.torch_internals import (\([^)]*|[^\n]*)")
IMPORTED = re.compile(r"^\s*from (torch[\w.]*) import ([\w, ]+)", re.MULTILINE)


def test_supported_versions_of_torch_are_those_of_the_installation():
    first, last = torch_internals.VERSIONS[0], torch_internals.VERSIONS[-1]
    below = f"2.{int(last.split('.')[1]) + 1}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={first},<{below}" in project["dependencies"]
    assert project["optional-dependencies"]["neuron"] == [f"torch-neuronx>={first},<{below}"]
    assert f"\ntorch=={first}." in (ROOT / "constraints.txt").read_text()
    pins = {path.stem.removeprefix("constraints-torch-") for path in ROOT.glob("constraints-torch-*.txt")}
    assert pins == set(torch_internals.VERSIONS[1:])
    assert torch.__version__.startswith(torch_internals.VERSIONS)


def private_names(text: str) -> set[str]:
    """Dotted names in torch that have a private part."""
    names = set(DOTTED.findall(text))
    names |= {
        f"{module}.{name.split()[0]}"
        for module, imported in IMPORTED.findall(text)
        for name in imported.split(",")
    }
    return {name for name in names if re.search(r"\._(?!_)", name)}


def foreign_attributes(trees: list[ast.Module]) -> Iterator[str]:
    """Private attributes, undefined in our code or used through `super()`, in modules that import torch."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    ours |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for tree in trees:
        if not any(re.match(r"(from|import) torch\b", ast.unparse(node)) for node in tree.body):
            continue
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        private = [node for node in attributes if re.match(r"_[^_]", node.attr)]
        for node in private:
            if node.attr not in ours or ast.unparse(node.value) == "super()":
                yield node.attr


def test_private_attributes_of_torch_are_listed_and_exist():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    used = set(foreign_attributes([ast.parse(path.read_text()) for path in files]))
    used.discard("_exit")  # of os
    assert used <= set(torch_internals.ATTRIBUTES)
    # `_parameters` is also the name of an attribute of ours.
    assert set(torch_internals.ATTRIBUTES) - used == {"_parameters"}
    for name, owner in torch_internals.ATTRIBUTES.items():
        found = torch_internals.find(owner)
        assert hasattr(found, name) or name in inspect.getsource(found), f"{owner} has no {name}"


def test_private_names_of_torch_are_in_one_module():
    used = {
        str(path.relative_to(ROOT)): names
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (names := private_names(path.read_text()))
    }
    used.pop("parallel/torch_internals.py")
    assert used == {}


def test_private_names_exist_and_are_used():
    """All in one test: each reading of the sources takes a second."""
    sources = (path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    used = {
        name for text in sources for group in INTERNALS.findall(text) for name in re.findall(r"\w+", group)
    }
    assert set(torch_internals.NAMES) - used == set()
    assert None not in [getattr(torch_internals, name) for name in torch_internals.NAMES]


def test_operators_import_dynamo_only_where_something_else_has(monkeypatch):
    """Its import takes each process that trains half a second, and one that plans a second."""
    calls = []

    @torch_internals.custom_op("trainshed_tests::twice")
    def twice(x: torch.Tensor) -> torch.Tensor:
        calls.append("torch._dynamo" in sys.modules)
        return x * 2

    importlib.import_module("torch._dynamo")
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch._dynamo")
        assert twice(torch.ones(1)).item() == 2
        torch_internals.defer_dynamo_on_meta()
        assert (torch.ones(1, dtype=torch.int32, device="meta") >> 1).is_meta
        assert "torch._dynamo" not in sys.modules
    assert (torch.ones(1, dtype=torch.int32, device="meta") >> 1).is_meta
    assert twice(torch.ones(1)).item() == 2
    assert calls == [False, True]
