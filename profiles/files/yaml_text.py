"""Read and write the YAML of profiles: PyYAML's safe loader without its YAML 1.1 surprises.

PyYAML follows YAML 1.1, in which 3e-4 is a string (no dot), 12:30:00 a base-60 number and the key `on` is true; here they are a
number, a string and "on".
Duplicate keys in a mapping, of which PyYAML silently takes the last, and keys that are not scalars are errors.

A document is read within two seconds or rejected: its size, its depth and its values, with each alias counted as what it stands
for, are limited before anything is made of them. libyaml, if PyYAML has it, parses seven times as fast.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from profiles.files import state_files

EXPONENT = re.compile(r"[-+]?\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+$")

BOOLEAN = "tag:yaml.org,2002:bool"
CLOCK = re.compile(r"\d+(:\d+)+$")

KEY = re.compile(rb"^([A-Za-z_]\w*):(?=\s)", re.MULTILINE)  # of the document's own mapping
MAX_BYTES = 1_000_000  # of a document; shipped profiles have less than 5,000
MAX_DEPTH = 50  # of lists and mappings in each other
MAX_VALUES = 100_000  # scalars, lists and mappings
if TYPE_CHECKING:
    from yaml import SafeLoader as BASE
else:
    BASE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(BASE):
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
            if key.tag == BOOLEAN:  # in YAML 1.1, also on, off, yes and no
                key.tag = "tag:yaml.org,2002:str"


class Dumper(yaml.SafeDumper):
    """Quotes strings that `Loader` would read as numbers."""


for _class in (Loader, Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))
for _first in "123456789":
    Loader.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", CLOCK))


def read_bytes(path: Path, limit: int) -> bytes:
    """Contents of a regular file.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is of another kind, or larger, or may not be read.
        OSError: it cannot be read for now.
    """
    try:
        data = state_files.retried(lambda: state_files.read_once(path, limit + 1), _is_outage)
    except state_files.NotRegularFile as error:  # a device or a pipe may never end
        raise ValueError(error.strerror) from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) or _is_outage(error):
            raise
        raise ValueError(error.strerror or str(error)) from error
    if len(data) > limit:
        raise ValueError(f"has more than {limit:,} bytes, which is not supported")
    return data


def _is_outage(error: OSError) -> bool:
    """Whether a retry may succeed; a file of the user that may not be read is rejected at once."""
    return state_files.is_temporary(error) and not isinstance(error, PermissionError)


def parse(text: str | bytes) -> Any:
    """Parse a YAML document. Raises ValueError, in one line with the position."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES:,} bytes, which is not supported")
    try:
        _check_size(text)
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"is not YAML{position}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # unprintable characters; an impossible date
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error


def parse_sections(text: bytes, names: Sequence[str]) -> dict[str, Any]:
    """The entries of some keys of a document such as `Dumper` writes, whose other keys are not parsed.

    Any other document is parsed completely. Raises ValueError as `parse`, also if it is not a mapping.
    """
    starts = [*KEY.finditer(text)]
    ends = [*(start.start() for start in starts[1:]), len(text)]
    found = {
        name: text[start.start() : end]
        for start, end in zip(starts, ends, strict=False)
        if (name := start[1].decode()) in names
    }
    try:
        if not found or starts[0].start():
            raise ValueError
        parsed = {key: value for part in found.values() for key, value in _parse_section(part).items()}
    except ValueError:  # such as of an alias, whose anchor is elsewhere
        parsed = parse(text) or {}
    if not isinstance(parsed, dict):
        raise ValueError("is not a mapping")
    return parsed


@lru_cache(maxsize=1024)  # runs of a store have many sections in common
def _parse_section(text: bytes) -> dict[str, Any]:
    section: dict[str, Any] = parse(text)
    return section


def read(path: Path) -> Any:
    """Parse a YAML file in UTF-8, with or without a byte order mark. Raises as `read_bytes`."""
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text at byte {error.start}; save it as UTF-8") from error
    return parse(text)


def _check_size(text: str | bytes) -> None:
    """Raise ConstructorError for a document that is too deep, has too many values or contains itself."""
    sizes: dict[str | None, int] = {}  # of complete values with an anchor, by its name
    nested: list[tuple[str | None, int]] = []  # anchor and size of the collections around the current event
    total = 0
    for event in yaml.parse(text, BASE):
        size, problem = 0, None
        if isinstance(event, yaml.CollectionStartEvent):
            nested.append((event.anchor, 0))
            if len(nested) > MAX_DEPTH:
                problem = f"lists and mappings are nested more than {MAX_DEPTH} deep"
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, inner = nested.pop()
            size = inner + 1
            if anchor is not None:
                sizes[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor is not None:
                sizes[event.anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 1)  # an unknown one is the parser's error
            if any(anchor == event.anchor for anchor, _ in nested):
                problem = f"*{event.anchor} contains itself"
        if nested:
            anchor, inner = nested[-1]
            nested[-1] = anchor, inner + size
            total = max(total, inner + size)
        if total > MAX_VALUES:
            problem = (
                f"there are more than {MAX_VALUES:,} values, with aliases replaced by what they stand for"
            )
        if problem:
            mark: Any = event.start_mark  # libyaml's class or PyYAML's, of which the stubs accept one
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=mark)


def write(value: Any) -> str:
    """Format a value as YAML that `parse` reads back unchanged, in the order of its keys."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, width=110)
