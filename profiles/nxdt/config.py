"""Read NxD Training configs: YAML with OmegaConf's references, which are resolved.

`${a.b}` refers to another key or a whole section, `${.b}` to one in the same section, `${..b}` to one in the section above;
`${multiply:x, y}` is a product, `${oc.env:NAME,default}` an environment variable, `${oc.decode:text}` text read as YAML, and
`${now:format}` the time. A number or a boolean in quotes, or from an environment variable, is a number or a boolean.

HyperPod merges a recipe into the config of its launcher, as the section `recipes`: `${recipes.a.b}` refers to the recipe itself,
and what only the launcher defines, such as `${base_results_dir}`, cannot be resolved. Such a value is `Unresolved`.
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

from profiles.errors import ProfileError, closest_files, format_value
from profiles.files import yaml_text

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
SECTIONS = {"trainer", "distributed_strategy"}  # that only a config has
MAX_DEPTH = 20  # nested references


class Unresolved(str):
    """A value with a reference that cannot be resolved, as written.

    Attributes:
        reason: why not, to follow the value in a message.
    """

    reason: str


def read(path: Path) -> dict[str, Any]:
    """Values by dotted key, references resolved. Raises ProfileError for an invalid file."""
    try:
        values = yaml_text.read(path)
    except FileNotFoundError:
        nearest = closest_files(str(path), "*.y*ml")
        raise ProfileError("config", str(path), "there is no such file", nearest) from None
    except UnicodeDecodeError:
        raise ProfileError("config", str(path), "is not a text file") from None
    except ValueError as error:
        raise ProfileError("config", str(path), str(error)) from error
    if not isinstance(values, Mapping):
        raise ProfileError("config", str(path), "is not a mapping of sections")
    if not values.keys() & SECTIONS:
        raise ProfileError("config", str(path), f"is {_kind(values, path)}")
    try:
        return dict(_flatten(_resolved("", values, values), ""))
    except RecursionError:
        raise ProfileError("config", str(path), "a section or a list contains itself") from None


def _scalars(value: Any) -> Any:
    """A value, or the entries of a list or section, as by `_scalar`."""
    if isinstance(value, Mapping):
        return {name: _scalars(entry) for name, entry in value.items()}
    return [_scalars(entry) for entry in value] if isinstance(value, list) else _scalar(value)


def _kind(values: Mapping[str, Any], path: Path) -> str:
    """What a file is that has none of the sections of a config, and what to do with it."""
    if values.keys() >= {"train", "cluster"} or "extends" in values:
        return f"a profile of Trainshed already; plan it: trainshed plan {path}"
    if values.keys() & {"architectures", "model_type"}:
        return "a model's config.json; name the NxD Training config, and this file with --config"
    return f"not a config of NxD Training, which has the sections {' and '.join(sorted(SECTIONS))}"


def _scalar(value: Any) -> Any:
    """The number or boolean that a text states; other values unchanged."""
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


def _resolved(key: str, value: Any, root: Mapping[str, Any]) -> Any:
    """A value or section with its references replaced; each value with one that cannot be is `Unresolved`."""
    if isinstance(value, Mapping):
        prefix = f"{key}." if key else ""
        return {name: _resolved(f"{prefix}{name}", entry, root) for name, entry in value.items()}
    try:
        return _scalars(_resolve(key, value, root, ()))
    except ProfileError as error:
        unresolved = Unresolved(value)
        nearest = f"; nearest: ${{{error.choices[0]}}}" if error.choices else ""
        unresolved.reason = f"{format_value(error.value)} {error.reason}{nearest}"
        return unresolved


def _resolve(key: str, value: Any, root: Mapping[str, Any], users: tuple[str, ...]) -> Any:
    """A value, list or section with its references replaced.

    Args:
        key: where the value is; relative references start there.
        root: the complete config.
        users: keys whose references are being replaced, each of which needs the next.
    """
    if isinstance(value, Mapping):
        prefix = f"{key}." if key else ""
        return {name: _resolve(f"{prefix}{name}", entry, root, users) for name, entry in value.items()}
    if isinstance(value, list):
        return [_resolve(key, entry, root, users) for entry in value]
    given = value
    for _ in range(MAX_DEPTH):
        if not isinstance(value, str) or (found := REFERENCE.search(value)) is None:
            return value
        if key in users:
            break
        referenced = _lookup(key, found[1], root, (*users, key))
        value = referenced if found[0] == value else value.replace(found[0], str(referenced))
    raise ProfileError(key, given, "refers to itself")


def _lookup(key: str, reference: str, root: Mapping[str, Any], users: tuple[str, ...]) -> Any:
    """What a reference in a key's value refers to, resolved."""
    name, colon, arguments = reference.partition(":")
    if colon:
        return _function(key, name.strip(), arguments)
    name = reference.strip()
    up = len(name) - len(name.lstrip("."))  # each leading dot goes up one section
    if up:
        name = ".".join([*key.split(".")[:-up], name.lstrip(".")])
    if "recipes" not in root:
        name = name.removeprefix("recipes.")
    found, path = root, ""
    for part in name.split("."):
        if isinstance(found, str):  # refers to a section itself
            found = _resolve(path, found, root, users)
        section = {str(each): entry for each, entry in found.items()} if isinstance(found, Mapping) else {}
        if part not in section:
            known = [each for each, _ in _flatten(root, "")]
            raise ProfileError(
                key, f"${{{reference}}}", "refers to an undefined key", get_close_matches(name, known, 1)
            )
        found, path = section[part], f"{path}.{part}".lstrip(".")
    return _resolve(path, found, root, users)


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
