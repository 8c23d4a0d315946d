"""The reference of all keys, from the schema itself: `python -m profiles.reference > docs/profiles.md`"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from profiles.errors import shown
from profiles.model import Section
from profiles.schema import Profile

HEAD = """# Profiles

A profile is one YAML file that says everything about a run. It may extend another one (`extends: tiny`, a shipped profile's
name or a path), and single keys can be overridden on the command line:

```sh
trainshed plan tiny --set train.steps=100 --set parallel.tensor=1
```

A mapping is merged key by key with what it extends; a list replaces the other one. Unknown keys, wrong types and impossible
combinations are refused with the key, its value, the reason and the nearest valid choices. `trainshed profiles` lists the
profiles that come with Trainshed; a run's folder holds the resolved one that it ran with, `profile.yaml`.

This page is made from the schema: `python -m profiles.reference > docs/profiles.md`.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join((HEAD, *_section("The whole", Profile, "")))


def _section(title: str, section: type[Section], path: str) -> Iterator[str]:
    """A table of a section's own keys, then the sections within it."""
    inner: list[tuple[str, type[Section]]] = []
    yield f"## {title}\n"
    if section is not Profile:
        yield f"{(section.__doc__ or '').strip().splitlines()[0]}\n"
    yield "| key | type | default | |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        key = f"{path}{field.alias or name}"
        sections = list(_sections(field.annotation))
        many = typing.get_origin(field.annotation) is list
        inner += [(f"{key}.0" if many else key, each) for each in sections]
        kind = "a list of sections" if sections and many else "a section" if sections else _type(field)
        yield f"| `{key}` | {kind} | {_default(field)} | {_cell(field.description or '')} |"
    yield ""
    for key, each in inner:
        title = f"`{key}`: {each.__name__}" if sum(key == other for other, _ in inner) > 1 else f"`{key}`"
        yield from _section(title, each, f"{key}.")


def _sections(annotation: typing.Any) -> Iterator[type[Section]]:
    """The sections that a key's type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _sections(part)


def _type(field: FieldInfo) -> str:
    return _cell(_words(field.annotation))


def _words(annotation: typing.Any) -> str:
    """A type as a reader of YAML would name it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin in (list, tuple):
        each = " and ".join(_words(argument) for argument in arguments if argument is not Ellipsis)
        return f"list of {each}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "" if field.default_factory is None else "empty"
    if field.default is None:
        return "null"
    if isinstance(field.default, Section):
        return ""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{shown(value)}`" if value != "" else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
