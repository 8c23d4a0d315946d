"""Read NxD Training configs: YAML with OmegaConf's references, which are resolved.

`${a.b}` refers to another key, `${.b}` to one in the same section, `${..b}` to one in the section above; `${multiply:x, y}` is a
product, `${oc.env:NAME,default}` an environment variable, `${oc.decode:text}` text read as YAML, and `${now:format}` the time.
A number or a boolean in quotes, or from an environment variable, is a number or a boolean.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from profiles import yaml_text
from profiles.errors import ProfileError

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_DEPTH = 20  # nested references


def read(path: Path) -> dict[str, Any]:
    """Values by dotted key, references resolved. Raises ProfileError for an invalid file or reference."""
    try:
        values = yaml_text.parse(path.read_text())
    except FileNotFoundError:
        raise ProfileError("config", str(path), "there is no such file") from None
    except UnicodeDecodeError:
        raise ProfileError("config", str(path), "is not a text file") from None
    except OSError as error:
        raise ProfileError("config", str(path), error.strerror or str(error)) from error
    except ValueError as error:
        raise ProfileError("config", str(path), str(error)) from error
    if not isinstance(values, Mapping):
        raise ProfileError("config", str(path), "is not a mapping of sections")
    try:
        flat = dict(_flatten(values, ""))
        return {key: _scalar(_resolve(key, value, flat)) for key, value in flat.items()}
    except RecursionError:
        raise ProfileError("config", str(path), "a section or a list contains itself") from None


def _scalar(value: Any) -> Any:
    """The number or boolean that a text states; other values unchanged."""
    if isinstance(value, list):
        return [_scalar(entry) for entry in value]
    if not isinstance(value, str):
        return value
    try:
        stated = yaml_text.parse(value)
    except ValueError:
        return value
    return stated if isinstance(stated, bool | int | float) else value


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _resolve(key: str, value: Any, flat: Mapping[str, Any]) -> Any:
    """A value with its references replaced."""
    if isinstance(value, list):
        return [_resolve(key, entry, flat) for entry in value]
    given = value
    for _ in range(MAX_DEPTH):
        if not isinstance(value, str) or (found := REFERENCE.search(value)) is None:
            return value
        referenced = _lookup(key, found[1], flat)
        value = referenced if found[0] == value else value.replace(found[0], str(referenced))
    raise ProfileError(key, given, "refers to itself")


def _lookup(key: str, reference: str, flat: Mapping[str, Any]) -> Any:
    """The value of a reference in a key's value."""
    name, colon, arguments = reference.partition(":")
    if colon:
        return _function(key, name.strip(), arguments)
    name = reference.strip()
    up = len(name) - len(name.lstrip("."))  # each leading dot goes up one section
    if up:
        name = ".".join([*key.split(".")[:-up], name.lstrip(".")])
    if name not in flat:
        raise ProfileError(
            key, f"${{{reference}}}", "refers to an undefined key", get_close_matches(name, flat, 1)
        )
    return flat[name]


def _function(key: str, name: str, arguments: str) -> Any:
    """The value of `${name:arguments}`; references within the arguments are replaced already."""
    written = f"${{{name}:{arguments}}}"
    if name == "multiply":
        factors = [_scalar(argument.strip()) for argument in arguments.split(",")]
        if not all(isinstance(factor, int | float) for factor in factors):
            raise ProfileError(key, written, "multiplies what is not a number")
        return math.prod(factors)
    if name == "oc.env":
        variable, comma, default = arguments.partition(",")
        if (found := os.environ.get(variable.strip(), default.strip() if comma else None)) is None:
            raise ProfileError(key, written, "refers to an environment variable that is not set")
        return found
    if name == "oc.decode":
        try:
            return yaml_text.parse(arguments)
        except ValueError as error:
            raise ProfileError(key, written, str(error)) from error
    if name == "now":
        return datetime.now().strftime(arguments)
    known = [f"${{{each}:…}}" for each in ("multiply", "oc.env", "oc.decode", "now")]
    raise ProfileError(key, written, "calls an unknown function", known)
