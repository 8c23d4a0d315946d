"""From a name and overrides to the one resolved profile, and from that back to text.

    shipped or user's file, and what it `extends`  →  overrides  →  model.config's defaults  →  Profile

Sections merge key by key, lists are replaced whole. A relative path of `extends` or `model.config` counts from the file
that says so; one of an override, and all other paths, from the working directory. `model.config` may be a hub repository,
org/name or org/name@revision, whose config.json is fetched.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from profiles import text
from profiles.check import check, check_start
from profiles.errors import ProfileError
from profiles.hub import REPOSITORY, config_json
from profiles.model import canonical, from_config_json
from profiles.refusals import refusal
from profiles.schema import Profile

__all__ = ["check", "check_start", "dump", "load", "names"]

SHIPPED = Path(__file__).parent


def load(name_or_path: str, overrides: Sequence[str] = (), name: str | None = None) -> Profile:
    """Resolve a shipped profile, by name, or the YAML file at a path (which ends in .yaml or .yml or has a slash).

    Args:
        overrides: `key.path=value` each, values in YAML, later ones over earlier ones; entries of lists go by number.
        name: the run's own name, in place of the profile's.

    Raises:
        ProfileError: no such profile or file, an unknown key, a value of a wrong type. Rules between sections, and
            files that the profile names, are `check`'s.
    """
    values = _chain(_find(str(name_or_path), Path(), "profile"), ())
    for override in overrides:
        _apply(values, override)
    if name is not None:
        values["name"] = name
    model = values.get("model")
    if isinstance(model, Mapping):
        values["model"] = _with_config(_canonical(model))
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise refusal(error, values, Profile) from None


def dump(profile: Profile) -> str:
    """YAML that loads back to an equal profile."""
    return text.write(profile.model_dump(mode="json"))


def names() -> list[str]:
    """The shipped profiles."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def _find(wanted: str, folder: Path, key: str) -> Path:
    """The file of a profile that is named, or whose path is given from this folder."""
    if "/" in wanted or wanted.endswith((".yaml", ".yml")):
        path = folder / Path(wanted).expanduser()
        if path.is_file():
            return path
        siblings = [str(Path(wanted).with_name(found.name)) for found in path.parent.glob("*.y*ml")]
        raise ProfileError(key, wanted, "there is no such file", difflib.get_close_matches(wanted, siblings))
    path = SHIPPED / f"{wanted}.yaml"
    if wanted in names():
        return path
    close = difflib.get_close_matches(wanted, names())
    raise ProfileError(key, wanted, "there is no profile of this name", close or names())


def _chain(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a file over those of what it extends."""
    path = path.resolve()
    if path in below:
        circle = " → ".join(step.stem for step in (*below[below.index(path) :], path))
        raise ProfileError("extends", path.stem, f"goes in a circle: {circle}")
    values = _read(path)
    model = values.get("model")
    if isinstance(model, Mapping):
        values["model"] = model = _canonical(model)
        if isinstance(model.get("config"), str):
            model["config"] = _config_place(model["config"], path.parent)
    base = values.pop("extends", None)
    if base is not None:
        if not isinstance(base, str):
            raise ProfileError("extends", base, "is not the name or path of a profile", names())
        inherited = _chain(_find(base, path.parent, "extends"), (*below, path))
        inherited.pop("description", None)
        values = _merged(inherited, {"name": path.stem, **values})
    values.setdefault("name", path.stem)
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        values = text.parse(path.read_text())
    except (ValueError, OSError) as error:
        raise ProfileError("profile", str(path), str(error)) from error
    if not isinstance(values, dict):
        raise ProfileError("profile", str(path), "is no mapping of sections")
    return values


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(result.get(key), Mapping) and isinstance(value, Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one key. Whether there is such a key is for the schema to say, which knows what it resembles."""
    path, equals, written = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ProfileError(
            f"--set {override}", None, "is not of the form key.path=value", ["train.steps=100"]
        )
    if parts == ["extends"]:
        raise ProfileError("extends", written, "belongs in a profile's file; run that profile instead")
    try:
        value = text.parse(written)
    except ValueError as error:
        raise ProfileError(path, written, str(error)) from error
    if parts[0] == "model":
        parts[-1] = next(iter(_canonical({parts[-1]: value})))
    target: Any = values
    for depth, part in enumerate(parts[:-1]):
        if isinstance(target, dict) and target.get(part) is None:
            target[part] = {}
        target = _entry(target, parts[: depth + 1], override)
    if isinstance(target, list):
        _entry(target, parts, override)
        target[int(parts[-1])] = value
    elif isinstance(target, dict):
        target[parts[-1]] = value
    else:
        raise ProfileError(path, value, f"{'.'.join(parts[:-1])} is a value, which has no keys")


def _entry(target: Any, path: Sequence[str], override: str) -> Any:
    if isinstance(target, dict):
        return target[path[-1]]
    where = ".".join(path[:-1])
    if not isinstance(target, list):
        raise ProfileError(f"--set {override}", None, f"{where} is a value, which has no keys")
    if not path[-1].isdigit() or int(path[-1]) >= len(target):
        reason = f"{where} is a list, whose entries go by number"
        raise ProfileError(f"--set {override}", None, reason, [f"{where}.{i}" for i in range(len(target))])
    return target[int(path[-1])]


def _config_place(config: str, folder: Path) -> str:
    """A path as seen from a folder; a hub repository (org/name, or org/name@revision) as it stands."""
    path = folder / Path(config).expanduser()
    return config if not path.exists() and _repository(config) else str(path)


def _repository(config: str) -> bool:
    return bool(REPOSITORY.fullmatch(config.partition("@")[0])) and not config.endswith(".json")


def _with_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model section over the config.json that it names."""
    model = dict(model)
    config = model.pop("config", None)
    if config is None:
        return model
    if not isinstance(config, str):
        raise ProfileError("model.config", config, "is no path of a config.json and no hub repository")
    path = Path(config).expanduser()
    if not path.exists() and _repository(config):
        path = config_json(config, "model.config")
    elif path.is_dir():
        path /= "config.json"
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError:
        raise ProfileError("model.config", config, f"there is no file {path}") from None
    except (ValueError, OSError) as error:
        raise ProfileError("model.config", config, f"cannot be read: {error}") from error
    try:
        return from_config_json(values) | model
    except ProfileError as error:
        raise ProfileError("model.config", config, f"cannot be used: {error}") from error


def _canonical(model: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return canonical(model)
    except ProfileError as error:
        raise error.within("model") from None
