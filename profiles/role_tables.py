"""Generate the tables of keys in docs/caching.md: `python -m profiles.role_tables docs/caching.md`."""

from __future__ import annotations

import sys
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from profiles.schema import Profile
from profiles.sections.base import Section, sections_in
from profiles.sections.roles import Role, own_role, roles

MARK = "<!-- {edge} of the table that `python -m profiles.role_tables docs/caching.md` writes: {name} -->"
NAMES = ("same run", "another run")
LISTED = 12  # keys of a section to list rather than "other keys"
# What a change of a key's part runs again; the steps that need its result are not repeated.
STEPS = {
    "tokenizer": "tokenizer",
    "tokens": "dataset (the shards that it affects)",
    "dataset": "dataset (tokenized text is reused)",
    "checkpoint": "checkpoint",
    "graphs": "graphs",
    "reference": "reference",
    "schedule": "train from the latest checkpoint, evaluate, export",
    "evaluate": "evaluate",
}


def table(another_run: bool) -> str:
    """The keys whose change makes another run, or the others, with the steps that it runs again."""
    rows = [row for section in _sections(Profile, "") for row in _rows(*section, another_run)]
    before = " before train" if another_run else ""
    return "\n".join((f"| change of | steps that run again{before} |", "|---|---|", *rows))


def with_tables(page: str) -> str:
    """The page with both tables between their marks. Raises ValueError if it lacks a mark."""
    for another_run, name in enumerate(NAMES):
        begin, end = (MARK.format(edge=edge, name=name) for edge in ("begin", "end"))
        head, _, rest = page.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"the page has no line {begin} or {end}")
        page = f"{head}{begin}\n\n{table(bool(another_run))}\n\n{end}{tail}"
    return page


def _sections(section: type[Section], path: str) -> Iterator[tuple[str, dict[str, Role]]]:
    """Each section's path and roles; kinds of a section that are alternatives are one."""
    inner: dict[str, tuple[list[type[Section]], Role | None]] = {}
    known = roles(section)
    for name, field in section.model_fields.items():
        key = field.alias or name
        if found := sections_in(field.annotation):
            del known[key]
            is_list = typing.get_origin(field.annotation) is list
            inner[f"{path}{key}.*." if is_list else f"{path}{key}."] = found, own_role(field)
    yield path, known
    for key, (found, own) in inner.items():
        if own:
            yield key, {"": own}
            continue
        kinds = [list(_sections(kind, key)) for kind in found]
        yield key, {name: role for kind in kinds for name, role in kind[0][1].items()}
        yield from kinds[0][1:]


def _rows(path: str, known: dict[str, Role], another_run: bool) -> Iterator[str]:
    """A section's rows: its keys by what a change of them runs again, the largest group last."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, role in known.items():
        groups[f"{role.makes_another_run}{_steps(role)}"].append(name)
    for steps, names in sorted(groups.items(), key=lambda group: len(group[1])):
        if not steps.startswith(str(another_run)):
            continue
        section = f"`{path.removesuffix('.')}`"
        if not path:
            keys = ", ".join(f"`{name}`" for name in names)
        elif len(groups) == 1:
            keys = f"all keys of {section}"
        elif len(names) > LISTED:
            keys = f"other keys of {section}"
        else:
            keys = ", ".join(f"`{path}{name}`" for name in names)
        yield f"| {keys} | {steps.removeprefix(str(another_run)) or 'none'} |"


def _steps(role: Role) -> str:
    """The steps that a change of the key runs again, each with the conditions of which one must hold."""
    found = []
    for part, conditions in role.parts:
        if part in STEPS:
            found.append(" ".join((STEPS[part], " or ".join(each.text for each in conditions))).strip())
    return ", ".join(found)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_tables(page.read_text()))
