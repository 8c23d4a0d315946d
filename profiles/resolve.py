"""Resolve a profile: from a name or file and overrides to a validated Profile, and back to YAML.

    shipped or user's file, over what it `extends`  →  overrides  →  defaults from model.config  →  Profile

Sections merge key by key; lists are replaced. A `model.config` replaces the model that the profile extends or overrides; keys of
`model` beside it take precedence over the config.json. Paths are relative to the file that contains them (local_paths.py),
those in overrides to the working folder. `model.config` may be a hub repository, org/name or org/name@revision, whose config.json
is fetched.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from profiles import local_paths, renamed_keys
from profiles.check import check, check_start
from profiles.errors import OVERRIDE_SYNTAX, ProfileError, closest_files
from profiles.files import folders, state_files, yaml_text
from profiles.huggingface.config import read_config_json
from profiles.huggingface.hub import REPOSITORY, config_json
from profiles.schema import Profile
from profiles.sections.base import Section, sections_in
from profiles.sections.model import canonical
from profiles.validation_errors import profile_error

__all__ = ["check", "check_start", "dump", "load", "names"]

SHIPPED = Path(__file__).parent / "shipped"
HARDWARE = SHIPPED / "hardware"  # overlays, which make profiles for other hardware
KIND = "rope_type"


def load(
    name_or_path: str, overrides: Sequence[str] = (), name: str | None = None, folder: Path | None = None
) -> Profile:
    """Resolve a shipped profile by name, or a YAML file by path (with a slash or ending in .yaml or .yml).

    Args:
        overrides: `key.path=value` in YAML; later ones win; list entries are addressed by number.
        name: name of the run; None: the profile's.
        folder: that paths in the file are relative to; None: its own.

    Raises:
        ProfileError: no such profile or file, an unknown key, or a value of the wrong type. `check` has the rules
            between sections and for files.
    """
    values = _load_chain(_find(str(name_or_path), Path(), "profile"), (), folder)
    sources = [text for key, _, text in map(_parts, overrides) if key == "tokenizer.source"]
    if sources and isinstance(values.get("tokenizer"), Mapping):
        values["tokenizer"] = _merged_tokenizer(values["tokenizer"], {"source": sources[-1]})
    for override in sorted(overrides, key=_configures_model, reverse=True):
        _apply(values, override)
    if name is not None:
        values["name"] = name
    model = values.get("model")
    if isinstance(model, Mapping):
        values["model"] = _with_config(_canonical(model))
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise profile_error(error, values, Profile) from None


def dump(profile: Profile) -> str:
    """Format a profile as YAML that loads back to an equal profile."""
    return yaml_text.write(profile.model_dump(mode="json"))


def names() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(shipped_files())


@cache
def shipped_files() -> dict[str, Path]:
    """The shipped profiles' files by name; folders are families and not part of the name.

    Those made from an overlay (`_on_hardware`) have a path within it, at which there is no file.
    """
    files = {path.stem: path for path in folders.find(SHIPPED, "**/*.yaml")}
    for overlay in folders.matches(HARDWARE, "*.yml"):
        for model in yaml_text.read(overlay)["models"]:
            name = f"{model}-{overlay.stem}"
            files[name] = overlay / f"{name}.yaml"
    return files


def _find(name_or_path: str, folder: Path, key: str) -> Path:
    """The file of a profile, by name or by path relative to a folder."""
    path = folder / Path(name_or_path).expanduser()
    names_file = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
    if names_file and state_files.is_file(path):
        return path
    if not names_file and name_or_path in shipped_files():
        return shipped_files()[name_or_path]
    if name_or_path and state_files.is_dir(path):
        reason = "is a folder; a profile is a name (see `trainshed profiles`) or the path of a YAML file"
        found = [str(Path(name_or_path) / each.name) for each in folders.matches(path, "*.y*ml")]
        raise ProfileError(key, name_or_path, reason, found[:5])
    if names_file:
        close = closest_files(name_or_path, "*.y*ml", folder)
        raise ProfileError(key, name_or_path, "there is no such file", close)
    reason = "there is no such profile"
    if not (close := difflib.get_close_matches(name_or_path, names())):
        reason += "; `trainshed profiles` lists them, and a file's path has a / or ends in .yaml"
    raise ProfileError(key, name_or_path, reason, close)


def _load_chain(path: Path, extended_by: tuple[Path, ...], folder: Path | None = None) -> dict[str, Any]:
    """The values of a file, merged over those of the profile it extends."""
    path = path.resolve()
    if path in extended_by:
        cycle = " → ".join(step.stem for step in (*extended_by[extended_by.index(path) :], path))
        raise ProfileError("extends", path.stem, f"is circular: {cycle}")
    values = _read(path)
    local_paths.from_folder(values, path, (folder or path.parent).absolute())
    model = values.get("model")
    if isinstance(model, Mapping):
        values["model"] = model = _canonical(model)
        if isinstance(config := model.get("config"), str):
            location = path.parent / Path(config).expanduser()
            if state_files.exists(location) or not _is_repository(config):
                model["config"] = str(location)
    base = values.pop("extends", None)
    if base is not None:
        if not isinstance(base, str):
            raise ProfileError("extends", base, "is not the name or path of a profile", names())
        inherited = _load_chain(_find(base, path.parent, "extends"), (*extended_by, path))
        inherited.pop("description", None)
        if isinstance(model, Mapping) and model.get("config") is not None:
            inherited.pop("model", None)
        tokenizer, theirs = values.get("tokenizer"), inherited.get("tokenizer")
        if isinstance(tokenizer, Mapping) and isinstance(theirs, Mapping):
            inherited["tokenizer"] = _merged_tokenizer(theirs, tokenizer)
        values = _merged(inherited, {"name": path.stem, **values})
    values.setdefault("name", path.stem)
    return values


def _on_hardware(path: Path) -> dict[str, Any]:
    """The values of a profile for other hardware, from an overlay's cluster and what it has for the model."""
    overlay, hardware = yaml_text.read(path.parent), path.parent.stem
    model, replaced = path.stem.removesuffix(f"-{hardware}"), overlay["in_place_of"]
    base = f"{model}-{replaced}"
    description = _read(shipped_files()[base])["description"].replace(replaced.upper(), hardware.upper())
    made = {"description": description, "extends": base, "cluster": overlay["cluster"]}
    return _merged(made, overlay["models"][model])


def _read(path: Path) -> dict[str, Any]:
    if state_files.is_file(path.parent):
        return _on_hardware(path)
    try:
        values = yaml_text.read(path)
    except (ValueError, FileNotFoundError) as error:
        raise ProfileError("profile", str(path), str(error)) from error
    if not isinstance(values, dict):
        raise ProfileError("profile", str(path), "is not a mapping of sections")
    if "trainer" in values and "distributed_strategy" in values:
        reason = "is a config of NxD Training; `trainshed import-config` makes a profile of it"
        raise ProfileError("profile", str(path), reason)
    if "target" in values:
        command = "ladder" if "rungs" in values else "branches" if "branches" in values else "mixture"
        reason = (
            f"is no profile but names one as its target; `trainshed {command} --help` shows how to run it"
        )
        raise ProfileError("profile", str(path), reason)
    return renamed_keys.current(values) if local_paths.is_resolved(values) else values


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            result[key] = value
        else:  # another kind of RoPE scaling has other keys, so it replaces the section
            result[key] = _merged(old, value) if value.get(KIND, old.get(KIND)) == old.get(KIND) else value
    return result


def _merged_tokenizer(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer section, without its source's size and revision if another section sets the source."""
    same = over.get("source", base.get("source")) == base.get("source")
    return dict(base) if same else {"source": base.get("source")}


def _parts(override: str) -> tuple[str, str, str]:
    """Key, equals sign and value of an override."""
    key, equals, value = override.partition("=")
    return key.strip(), equals, value.strip()


def _configures_model(override: str) -> bool:
    """Whether an override names another config.json, beside which the other overrides count."""
    return _parts(override)[0] == "model.config"


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one key; unknown keys are left to the schema, which suggests similar ones."""
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ProfileError(f"--set {override}", None, OVERRIDE_SYNTAX)
    if parts == ["extends"]:
        reason = "cannot be overridden; set it in a profile file, or run that profile"
        raise ProfileError("extends", text, reason)
    try:
        value = yaml_text.parse(text)
    except ValueError as error:
        raise ProfileError(path, text, str(error)) from error
    if _configures_model(override) and value is not None:
        values["model"] = {"config": value}
        return
    if parts[0] == "model":
        parts[-1] = next(iter(_canonical({parts[-1]: value})))
    target: Any = values
    for depth, part in enumerate(parts[:-1]):
        if isinstance(target, dict) and target.get(part) is None:
            target[part] = _default_entries(parts[: depth + 1]) if parts[depth + 1].isdigit() else {}
        target = _entry(target, parts[: depth + 1], override)
    if isinstance(target, list):
        _entry(target, parts, override)
        target[int(parts[-1])] = value
    elif isinstance(target, dict):
        target[parts[-1]] = value
    else:
        raise ProfileError(path, value, f"{'.'.join(parts[:-1])} is a value and has no keys")


def _default_entries(path: Sequence[str]) -> Any:
    """The list that a key has by default, for an override of an entry; {} if it is not a list."""
    sections: list[type[Section]] = [Profile]
    field = None
    for part in path:
        fields = [each.model_fields[part] for each in sections if part in each.model_fields]
        field = fields[0] if fields else None
        sections = sections_in(field.annotation) if field else []
    default = field.get_default(call_default_factory=True) if field else None
    if not isinstance(default, list | tuple):
        return {}
    return [each.model_dump(exclude_unset=True) if isinstance(each, Section) else each for each in default]


def _entry(target: Any, path: Sequence[str], override: str) -> Any:
    if isinstance(target, dict):
        return target[path[-1]]
    parent = ".".join(path[:-1])
    if not isinstance(target, list):
        raise ProfileError(f"--set {override}", None, f"{parent} is a value and has no keys")
    if not path[-1].isdigit() or int(path[-1]) >= len(target):
        if not target:
            reason = f"{parent} is an empty list; set all of it, {parent}=[...]"
            raise ProfileError(f"--set {override}", None, reason)
        reason = f"{parent} is a list of {len(target)}; address its entries by number"
        raise ProfileError(f"--set {override}", None, reason, [f"{parent}.{i}" for i in range(len(target))])
    return target[int(path[-1])]


def _is_repository(config: str) -> bool:
    """Whether a config is a hub repository, org/name or org/name@revision, unless there is such a path."""
    return bool(REPOSITORY.fullmatch(config.partition("@")[0])) and not config.endswith(".json")


def _with_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model section merged over the config.json that its `config` names."""
    model = dict(model)
    config = model.pop("config", None)
    if config is None:
        return model
    if not isinstance(config, str):
        reason = "is neither the path of a config.json nor a hub repository"
        raise ProfileError("model.config", config, reason)
    path = Path(config).expanduser()
    if not state_files.exists(path) and _is_repository(config):
        path = config_json(config, "model.config")
    return read_config_json(path, "model.config", config) | model


def _canonical(model: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return canonical(model)
    except ProfileError as error:
        raise error.within("model") from None
