"""Reads the file of an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from profiles.errors import ProfileError
from profiles.experiments.experiment import Experiment
from profiles.files import yaml_text
from profiles.validation_errors import profile_error

Kind = TypeVar("Kind", bound=Experiment)


def load_experiment(cls: type[Kind], file: str | Path) -> Kind:
    """Read a file, or a shipped one by name; a path as target becomes relative to the working folder.

    Raises:
        ProfileError: there is no such file, an unknown key, or a value of the wrong type.
    """
    kind = cls.__name__.lower()
    path = Path(file).expanduser()
    if "/" not in str(file) and path.suffix not in (".yaml", ".yml"):
        found = sorted(cls.shipped.glob("*.yml")) if cls.shipped else []
        known = {each.stem: each for each in found}
        if str(file) not in known:
            reason = "no shipped file has this name; names of other files end in .yaml"
            raise ProfileError(kind, str(file), reason, list(known))
        path = known[str(file)]
    try:
        values = yaml_text.read(path)
    except FileNotFoundError:
        raise ProfileError(kind, str(file), "there is no such file") from None
    except ValueError as error:
        raise ProfileError(kind, str(file), str(error)) from error
    if not isinstance(values, dict):
        raise ProfileError(kind, str(file), "is not a mapping of keys")
    values.setdefault("name", f"{path.stem}-{kind}" if path.parent == cls.shipped else path.stem)
    try:
        experiment = cls.model_validate(values)
    except ValidationError as error:
        raise profile_error(error, values, cls) from None
    target = experiment.target
    if "/" in target or target.endswith((".yaml", ".yml")):
        target = str(path.parent / Path(target).expanduser())
        target = target if "/" in target else f"./{target}"
    return experiment.model_copy(update={"target": target})
