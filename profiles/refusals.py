"""From pydantic's list of complaints to one ProfileError that a person can act upon."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from profiles.errors import ProfileError
from profiles.model import NORM_EPS_ALIASES, Model
from profiles.schema import FUNCTION, LINE, OPTION, TIME, WORD

NO_SECTION = "is not a section with keys of its own"
NAMING = "is not made of letters, digits, '.', '_' and '-' alone, at most 100, the first a letter or digit"
WORDS = {  # by pydantic's type of error
    "int_type": "is not a whole number",
    "float_type": "is not a number",
    "bool_type": "is not true or false",
    "string_type": "is not text",
    "list_type": "is not a list",
    "tuple_type": "is not a list",
    "model_type": NO_SECTION,
    "model_attributes_type": NO_SECTION,
    "finite_number": "is not a finite number",
    "string_too_short": "is empty",
    "too_short": "has too few entries",
    "too_long": "has too many entries",
    "union_tag_not_found": "has no rope_type",
}
FORMS = {  # by the pattern that a value does not match
    FUNCTION: "is not of the form module:function",
    LINE: "is not one line of text",
    OPTION: "is not an option of sbatch of the form --name or --name=value",
    TIME: "is not a time as Slurm writes it, such as 90, 12:00:00 or 1-12:00:00",
    WORD: "is not made of letters, digits and @ . , + - _ alone",
}
LIMITS = {
    "greater_than_equal": ("ge", "is below {}"),
    "greater_than": ("gt", "is not above {}"),
    "less_than_equal": ("le", "is above {}"),
    "less_than": ("lt", "is not below {}"),
}


def refusal(error: ValidationError, given: Mapping[str, Any], root: type[BaseModel]) -> ProfileError:
    """The first complaint about a profile's values as a ProfileError, which also says how many more there are."""
    complaints: dict[str, list[dict[str, Any]]] = {}  # by key: a union complains once for each of its members
    for complaint in error.errors():
        complaints.setdefault(_key(complaint, given), []).append(complaint)
    # A mistyped key is often the reason why another one is missing.
    first, *others = sorted(complaints, key=lambda key: complaints[key][0]["type"] != "extra_forbidden")
    refused = _translate(first, complaints[first], root)
    if others:
        refused.reason += f" ({len(others)} more: {', '.join(others[:3])}{', …' if len(others) > 3 else ''})"
    return refused


def unknown_key(key: str, value: Any, known: Iterable[str]) -> ProfileError:
    """A key that its section does not have, with the ones that it resembles, else all that there are."""
    parent, _, name = key.rpartition(".")
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3)
    where = f"in {parent}" if parent else "at the top of a profile"
    return ProfileError(key, value, f"there is no such key {where}", close or known)


def _key(complaint: dict[str, Any], given: Any) -> str:
    """Dotted path of a complaint. What pydantic puts in to name a union's member is no key of what was given."""
    path = []
    for part in complaint["loc"]:
        listed = isinstance(given, list) and isinstance(part, int) and part < len(given)
        if listed or (isinstance(given, Mapping) and part in given):
            given = given[part]
        elif complaint["type"] != "missing" or isinstance(part, int) or part != complaint["loc"][-1]:
            continue
        path.append(str(part))
    return ".".join(path)


def _translate(key: str, complaints: list[dict[str, Any]], root: type[BaseModel]) -> ProfileError:
    complaint = complaints[0]
    kind, value, context = complaint["type"], complaint["input"], complaint.get("ctx", {})
    if isinstance(context.get("error"), ProfileError):
        return context["error"].within(key) if key else context["error"]
    if kind == "extra_forbidden":
        return unknown_key(
            key, None if isinstance(value, Mapping) else value, _keys(key.split(".")[:-1], root)
        )
    if kind == "missing":
        entry = isinstance(complaint["loc"][-1], int)
        return ProfileError(key, value if entry else None, WORDS["too_short"] if entry else "is missing")
    choices = [choice for each in complaints for choice in _choices(each)]
    if choices:
        also = "" if len(complaints) == 1 else ", nor a whole number from 0"
        return ProfileError(key, _brief(value), f"is not one of the choices{also}", choices)
    if kind in LIMITS:
        limit, words = LIMITS[kind]
        bound = context[limit]
        return ProfileError(key, value, words.format(bound), [bound] if limit in ("ge", "le") else [])
    if kind == "string_pattern_mismatch":
        return ProfileError(key, value, FORMS.get(context["pattern"], NAMING))
    message = complaint["msg"]
    return ProfileError(key, _brief(value), WORDS.get(kind, message[:1].lower() + message[1:]))


def _brief(value: Any) -> Any:
    return "a section" if isinstance(value, Mapping) else value


def _choices(complaint: dict[str, Any]) -> list[str]:
    context = complaint.get("ctx", {})
    if complaint["type"] in ("literal_error", "union_tag_invalid"):
        return re.findall(r"'([^']*)'", context.get("expected") or context["expected_tags"])
    return []


def _keys(path: list[str], root: type[BaseModel]) -> set[str]:
    """The keys of the section at this path."""
    sections = [root]
    for part in path:
        fields = [
            field
            for section in sections
            for name, field in section.model_fields.items()
            if part == (field.alias or name)
        ]
        if fields:  # the number of a list's entry is no field
            sections = [section for field in fields for section in _sections(field.annotation)]
    names = {field.alias or name for section in sections for name, field in section.model_fields.items()}
    if root in sections:
        names |= {"extends"}
    return names | {"config", *NORM_EPS_ALIASES} if Model in sections else names


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The classes of sections in a type: itself, a list's entries, a union's members."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for member in get_args(annotation) for section in _sections(member)]
