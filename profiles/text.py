"""YAML as profiles are written in it: safe loading, with some traps of PyYAML closed.

PyYAML follows YAML 1.1, where 3e-4 is text for want of a dot, and 12:30:00 a number to the base of 60; here it is the other
way round. And a key that stands twice in one mapping is refused, where PyYAML lets the last one win without a word, and so is
a key that is no word.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

EXPONENT = re.compile(r"[-+]?\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+")

CLOCK = re.compile(r"\d+(:\d+)+")


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the traps closed."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem="a list or a mapping stands here as a key", problem_mark=key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value} stands here a second time", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Its counterpart, which quotes text that the loader would take for a number."""


for _class in (Loader, Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))
for _first in "123456789":
    Loader.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", CLOCK))


def parse(text: str) -> Any:
    """The value of a YAML document.

    Raises:
        ValueError: it is none; one line says what and where.
    """
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"is not YAML{place}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # unprintable characters; a date that is none
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error


def write(value: Any) -> str:
    """A value as YAML that `parse` reads back as it was, keys in their own order."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, width=110)
