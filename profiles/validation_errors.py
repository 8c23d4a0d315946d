"""Translate pydantic's errors to one ProfileError: key, reason, choices, also for other tools' words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from profiles.errors import FEW, ProfileError
from profiles.renamed_keys import RENAMED
from profiles.sections.base import FUNCTION, Section, sections_in
from profiles.sections.cluster import LABEL, LINE, OPTION, PATH, QUANTITY, TIME, WORD
from profiles.sections.continual import GATED
from profiles.sections.model import NORM_EPS_ALIASES, Model
from profiles.sections.tracking import TAG, TRACKER

NOT_A_SECTION = "is not a section with keys"
INVALID_NAME = "may have letters, digits, '.', '_' and '-', at most 100, and begins with a letter or digit"
REASONS = {  # by pydantic's error type
    "int_type": "is not a whole number",
    "float_type": "is not a number",
    "bool_type": "is not true or false",
    "string_type": "is not a string",
    "list_type": "is not a list",
    "tuple_type": "is not a list",
    "model_type": NOT_A_SECTION,
    "model_attributes_type": NOT_A_SECTION,
    "finite_number": "is not a finite number",
    "string_too_short": "is empty",
    "too_short": "has too few entries",
    "too_long": "has too many entries",
    "union_tag_not_found": "has no rope_type",
}
PATTERN_REASONS = {  # by the pattern that a value does not match
    FUNCTION: "is not of the form module:function",
    LINE: "is not one line of text",
    TAG: "is not one line of 1 to 64 characters",
    TRACKER: "is neither wandb, mlflow, trackio nor of the form module:Class",
    OPTION: "is not an option of sbatch of the form --name or --name=value",
    LABEL: "is not a Kubernetes name: lower-case letters, digits, '-' and '.'",
    PATH: "is not an absolute path",
    QUANTITY: "is not of the form name=value",
    TIME: "is not a Slurm time limit, such as 90, 12:00:00 or 1-12:00:00",
    GATED: "is neither old, new, first, stand-in, round-N, source:NAME nor task:NAME",
    WORD: "may only have letters, digits and @ . , + - _",
}
LIMITS = {  # by pydantic's error type: the name of the bound in the context, and the reason
    "greater_than_equal": ("ge", "is below {}"),
    "greater_than": ("gt", "is not above {}"),
    "less_than_equal": ("le", "is above {}"),
    "less_than": ("lt", "is not below {}"),
}

SYNONYMS = {"gpu": "cuda", "trainium": "neuron"}  # choices of other tools, and ours


def profile_error(error: ValidationError, given: Mapping[str, Any], root: type[Section]) -> ProfileError:
    """The errors as one ProfileError."""
    errors: dict[str, list[ErrorDetails]] = {}  # by key: a union has one error per member
    for entry in error.errors():
        errors.setdefault(_key(entry, given), []).append(entry)
    # Unknown keys first: a mistyped key is often why another one is missing.
    ordered = sorted(errors, key=lambda key: errors[key][0]["type"] != "extra_forbidden")
    first, *others = (_translate(key, errors[key], root) for key in ordered)
    return first.along_with(others)


def _unknown_key(key: str, value: Any, root: type[Section]) -> ProfileError:
    """The error for a key that its section does not have.

    Choices: similar keys of the section, else keys of this name in other sections, else the section's first keys.
    """
    if key in RENAMED:
        return ProfileError(key, value, f"was renamed; use {RENAMED[key]}")
    *path, name = key.split(".")
    parent = ".".join(path)
    prefix = f"{parent}." if parent else ""
    known = _keys(path, root)
    close = [prefix + each for each in difflib.get_close_matches(name, known, n=3)]
    if not close:
        sections = {each: _keys([each], root) for each in _keys([], root) if each not in (*path, "extends")}
        names = {f"{section}.{each}": each for section, keys in sections.items() for each in keys}
        similar = difflib.get_close_matches(name, names.values(), n=1, cutoff=0.8)
        close = sorted(key for key, each in names.items() if each in similar)
    reason = f"there is no such key {f'in {parent}' if parent else 'at the top level'}"
    if not close:
        close = [prefix + each for each in known[:FEW]]
        reason += f"; {root.page} lists all" if len(known) > FEW else ""
    return ProfileError(key, value, reason, close)


def _key(error: ErrorDetails, given: Any) -> str:
    """Dotted path of an error, without the names that pydantic inserts for members of a union."""
    path = []
    for part in error["loc"]:
        listed = isinstance(given, list) and isinstance(part, int) and part < len(given)
        if listed or (isinstance(given, Mapping) and part in given):
            given = given[part]
        elif error["type"] != "missing" or isinstance(part, int) or part != error["loc"][-1]:
            continue
        path.append(str(part))
    return ".".join(path)


def _translate(key: str, errors: list[ErrorDetails], root: type[Section]) -> ProfileError:
    """The errors of one key as a ProfileError."""
    error = errors[0]
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if isinstance(own := context.get("error"), ProfileError):
        return own.within(key) if key else own
    if kind == "extra_forbidden":
        return _unknown_key(key, None if isinstance(value, Mapping) else value, root)
    if kind == "missing":
        is_entry = isinstance(error["loc"][-1], int)  # of a tuple
        reason = REASONS["too_short"] if is_entry else "is missing"
        return ProfileError(key, value if is_entry else None, reason)
    choices = [choice for member in errors for choice in _choices(member)]
    if choices:
        if isinstance(value, str):
            wanted = SYNONYMS.get(value, value)
            choices.sort(key=lambda each: difflib.SequenceMatcher(None, wanted, each).ratio(), reverse=True)
        also = "" if len(errors) == 1 else ", nor a whole number from 0"
        if any(member["type"].startswith("bool_") for member in errors):
            also, choices = ", nor true or false", [*choices, "true", "false"]
        return ProfileError(key, _brief(value), f"is not one of the choices{also}", choices)
    if kind in LIMITS:
        limit, reason = LIMITS[kind]
        bound = context[limit]
        return ProfileError(key, value, reason.format(bound), [bound] if limit in ("ge", "le") else [])
    if kind == "string_pattern_mismatch":
        return ProfileError(key, value, PATTERN_REASONS.get(context["pattern"], INVALID_NAME))
    message = error["msg"]
    return ProfileError(key, _brief(value), REASONS.get(kind, message[:1].lower() + message[1:]))


def _brief(value: Any) -> Any:
    return "a section" if isinstance(value, Mapping) else value


def _choices(error: ErrorDetails) -> list[str]:
    """The valid values of a literal or of a union's tag, which pydantic only provides as text."""
    context = error.get("ctx", {})
    if error["type"] in ("literal_error", "union_tag_invalid"):
        return re.findall(r"'([^']*)'", context.get("expected") or context["expected_tags"])
    return []


def _keys(path: list[str], root: type[Section]) -> list[str]:
    """The keys of the section at a path, in the order of their definition."""
    sections = [root]
    for part in path:
        fields = [
            field
            for section in sections
            for name, field in section.model_fields.items()
            if part == (field.alias or name)
        ]
        if fields:  # an index into a list is not a field
            sections = [section for field in fields for section in sections_in(field.annotation)]
    names = [field.alias or name for section in sections for name, field in section.model_fields.items()]
    names += ["extends"] if root in sections and root.page == Section.page else []  # only profiles
    names += ["config", *NORM_EPS_ALIASES] if Model in sections else []
    return list(dict.fromkeys(names))
