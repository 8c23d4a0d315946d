"""Generate the reference of all keys: `python -m profiles.documentation > docs/profiles.md`."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Iterator
from itertools import pairwise

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from profiles.errors import format_value
from profiles.schema import Profile
from profiles.sections import families
from profiles.sections.base import Section, sections_in

HEAD = """# Profiles

A profile is one YAML file that describes a run completely. To write one, extend a shipped profile and override what differs:

```sh
cat > shorter.yaml <<'END'
extends: tiny
train: {steps: 100, learning_rate: 1e-3}
END
trainshed plan shorter.yaml --set train.seed=7
trainshed profiles
```

`extends` takes the name of a shipped profile or a path. Mappings merge key by key; lists are replaced. `--set KEY=VALUE`
overrides one key. `trainshed profiles` lists the shipped profiles:

```
profile                   parameters    nodes × devices  status
tiny                      1.09 million  1 × 1 cpu        runs here
  Llama with 1.1 million parameters on the Python documentation, one CPU process on this machine
…
llama3-70b                70.6 billion  8 × 64 trn2      submits to Slurm
  Llama 3 70B from scratch on English Wikipedia, on 8 trn2.48xlarge
…
```

Paths are relative to the file that sets them, as in `extends`, and those of `--set` and `cluster.work_dir` to the working folder.

`model.config` names a config.json, its folder or a Hugging Face repository whose architecture to train, instead of the model that
the profile extends; keys of `model` beside it take precedence: `trainshed plan llama3-8b --set model.config=Qwen/Qwen3-8B`.

Every model but `tiny` has a profile for trn2 under its plain name, and two that end in `-h200` and `-h100`: the same run with a
topology for that hardware. Profiles that fine-tune are for trn2 only, except those of `tiny`.

Unknown keys, wrong types and impossible combinations are errors that name the key, its value, the reason and the nearest choices
with which the profile is valid, one line for each error:

```
trainshed: parallel.tensor = 3: does not divide 8 query heads; nearest valid: 2
```

The run folder has the resolved profile, `profile.yaml`.

In the tables, `required` keys have no default, and `derived` ones a default that follows from other keys.

This page is generated from the schema: `python -m profiles.documentation > docs/profiles.md`.
"""

NAMES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}  # of types in YAML


def page() -> str:
    """The reference page, in Markdown."""
    return "\n".join((HEAD, *_section("Top level", Profile, ""), *_architectures()))


def _architectures() -> Iterator[str]:
    """A table of the architectures with their sources."""
    yield "## Architectures\n"
    yield "| `model.architecture` | class in transformers | source |\n|---|---|---|"
    for name, family in families.OWN.items():
        yield f"| `{name}` | {family.huggingface} | {family.source} |"
    yield ""


def _section(title: str, section: type[Section], path: str) -> Iterator[str]:
    """A table of a section's keys, followed by the sections within it."""
    subsections: list[tuple[str, type[Section]]] = []
    yield f"## {title}\n"
    if section is not Profile:
        yield f"{(section.__doc__ or '').strip().splitlines()[0]}\n"
    yield "| key | type | default | description |\n|---|---|---|---|"
    described = descriptions(section)
    for name, field in section.model_fields.items():
        key, description = f"{path}{field.alias or name}", field.description or described[name]
        sections = sections_in(field.annotation)
        is_list = typing.get_origin(field.annotation) is list
        subsections += [(f"{key}.0" if is_list else key, subsection) for subsection in sections]
        kind = _cell(_type_name(field.annotation))
        if sections:
            kind = "list of sections" if is_list else "section"
        yield f"| `{key}` | {kind} | {_default(field, description)} | {_cell(description)} |"
    yield ""
    for key, subsection in subsections:
        variants = sum(key == other for other, _ in subsections)
        title = f"`{key}`: {subsection.__name__}" if variants > 1 else f"`{key}`"
        yield from _section(title, subsection, f"{key}.")


def _type_name(annotation: typing.Any) -> str:
    """A type in YAML terms."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin in (list, tuple):
        entry = _type_name(arguments[0])
        entries = f"{entry}s" if entry in NAMES.values() else entry
        is_pair = origin is tuple and len(arguments) == 2 and arguments[1] is not Ellipsis
        return f"two {entries}" if is_pair else f"list of {entries}"
    return NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def descriptions(section: type[Section]) -> dict[str, str]:
    """The docstring below each key of a section, in one line."""
    (defined,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(defined, ast.ClassDef)
    return {
        key.target.id: " ".join(ast.literal_eval(text.value).split())
        for key, text in pairwise(defined.body)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(text, ast.Expr)
    }


def _default(field: FieldInfo, description: str) -> str:
    """The default value; "derived" from other keys if only the description says how."""
    if field.default is PydanticUndefined and field.default_factory is None:
        return "derived" if "(default: " in description else "required"
    if field.default is PydanticUndefined:
        return "empty"
    if field.default is None:
        return "null"
    if isinstance(field.default, Section):
        return "its keys' defaults"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    if isinstance(value, list) and value and isinstance(value[0], Section):
        value = str([each.model_dump(exclude_none=True) for each in value]).replace("'", "")
        return f"`{value}`"
    return f"`{format_value(value)}`" if value != "" else "empty"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
