"""Read and write the YAML of profiles: PyYAML's safe loader without its YAML 1.1 surprises.

PyYAML follows YAML 1.1, in which 3e-4 is a string (no dot) and 12:30:00 a base-60 number; here they are a number and a string.
Duplicate keys in a mapping, of which PyYAML silently takes the last, and keys that are not scalars are errors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

EXPONENT = re.compile(r"[-+]?\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+$")

CLOCK = re.compile(r"\d+(:\d+)+$")


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 numbers and without duplicate keys."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        # Nodes whose own keys were checked: merging (<<) adds the merged mapping's keys to them.
        self._checked: set[yaml.MappingNode] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if node not in self._checked:
            self._checked.add(node)
            self._check_keys(node)
        super().flatten_mapping(node)

    @staticmethod
    def _check_keys(node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem="a list or a mapping is not a valid key", problem_mark=key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"duplicate key {key.value}", problem_mark=key.start_mark
                )
            seen.add(key.value)


class Dumper(yaml.SafeDumper):
    """Quotes strings that `Loader` would read as numbers."""


for _class in (Loader, Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))
for _first in "123456789":
    Loader.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", CLOCK))


def parse(text: str) -> Any:
    """Parse a YAML document. Raises ValueError, in one line with the position."""
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"is not YAML{position}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # unprintable characters; an impossible date
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error


def read(path: Path) -> Any:
    """Parse a YAML file in UTF-8, with or without a byte order mark. Raises ValueError and OSError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text at byte {error.start}; save it as UTF-8") from error
    return parse(text)


def write(value: Any) -> str:
    """Format a value as YAML that `parse` reads back unchanged, in the order of its keys."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, width=110)
