"""Identify the published model whose dimensions a config states, if its config.json is not local.

The numbers are those of the shipped profiles. hidden_size, rope_theta, widths and heads must match; num_layers and
max_position_embeddings override those of the config.json, so they only decide between models that are equal otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from profiles import resolve
from profiles.sections.model import Model

HARDWARE = ("-h100", "-h200", "-b200")  # suffixes of profiles of the same model
OVERRIDES = ("num_hidden_layers", "max_position_embeddings")


@dataclass(frozen=True)
class Published:
    """A published model, and its tokenizer on the hub."""

    name: str
    model: Model
    tokenizer: str


@dataclass(frozen=True)
class Match:
    """A published model, and the stated dimensions that it matches and does not match."""

    published: Published
    equal: tuple[str, ...]
    different: tuple[str, ...]


@cache
def models() -> tuple[Published, ...]:
    """The published models, each once."""
    names = [name for name in resolve.names() if not name.startswith("tiny") and not name.endswith(HARDWARE)]
    found: dict[Model, Published] = {}
    for name in sorted(names, key=len):
        profile = resolve.load(name)
        if profile.objective.kind == "pretrain":
            found.setdefault(profile.model, Published(name, profile.model, profile.tokenizer.source))
    return tuple(sorted(found.values(), key=lambda published: (len(published.name), published.name)))


def find(stated: Mapping[str, Any], hint: str = "") -> list[Match]:
    """The published models that best match dimensions (names of the model section); several if tied.

    Args:
        hint: text that may contain the name of one of several models that match equally.
    """
    matches = []
    for published in models():
        values = published.model.model_dump()
        equal = tuple(name for name, value in stated.items() if values.get(name) == value)
        different = tuple(name for name in stated if name not in equal)
        if set(different) <= set(OVERRIDES):
            matches.append(Match(published, equal, different))
    fewest = min((len(match.different) for match in matches), default=0)
    best = [match for match in matches if len(match.different) == fewest]
    text = hint.lower().replace("_", "-")
    named = [match for match in best if match.published.name.rpartition("-")[0] in text]
    return named if len(best) > 1 and named else best
