"""Values of `train.recompute`: the activation checkpointing of each layer, by pipeline stage.

full                    all layers full
full 3                  the first 3 layers of each stage full, the others none
full 3 + selective      the first 3 layers of each stage full, the others selective
[full 3, none]          with two stages: full 3 in the first, none in the second
auto                    the planner chooses, layer by layer
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from parallel.constraints import RECOMPUTE_MODES

MODES = RECOMPUTE_MODES
AUTO: Final = "auto"
Recompute = str | list[str]
_PART = re.compile(rf"({'|'.join(MODES)})(?: ([1-9]\d{{0,5}}))?")


def invalid(value: Recompute) -> str | None:
    """Why a value is invalid; None if it is valid."""
    if value == AUTO:
        return None
    for text in _stages(value):
        names = text.split(" + ")
        parts = [match for name in names if (match := _PART.fullmatch(name))]
        if len(parts) < len(names):
            where = "" if isinstance(value, str) else f"{text!r} "
            return f"{where}is neither a mode nor of the form full 3 + selective 2, where the numbers count layers of a stage"
        if any(part[2] is None for part in parts[:-1]):
            return "has a mode without a number of layers before another mode"
    return None if value else "is empty"


def layer_modes(value: Recompute, stages: Sequence[int]) -> list[str]:
    """The mode of each layer of a model.

    Args:
        value: valid, and not AUTO.
        stages: number of layers of each pipeline stage.
    """
    texts = [value] * len(stages) if isinstance(value, str) else value
    return [mode for text, layers in zip(texts, stages, strict=True) for mode in _expand(text, layers)]


def from_layer_modes(stages: Sequence[Sequence[str]]) -> Recompute:
    """The value that gives the layers of each stage these modes, in its shortest form."""
    texts = [_compress(modes) for modes in stages]
    for candidate in dict.fromkeys(texts):
        if all(_expand(candidate, len(modes)) == list(modes) for modes in stages):
            return candidate
    return texts


def modes_of(value: Recompute) -> set[str]:
    """The modes that a valid value names."""
    return {part.split()[0] for text in _stages(value) for part in text.split(" + ")}


def describe(value: Recompute) -> str:
    """A value in one line: `full 3`, or for several stages `full 3, 2 × full 2, none`."""
    if isinstance(value, str):
        return value
    runs = ((text, len(list(run))) for text, run in groupby(value))
    return ", ".join(text if count == 1 else f"{count} × {text}" for text, count in runs)


def _stages(value: Recompute) -> Iterable[str]:
    return [value] if isinstance(value, str) else value


def _expand(text: str, layers: int) -> list[str]:
    modes: list[str] = []
    for part in text.split(" + "):
        mode, _, count = part.partition(" ")
        modes += [mode] * (int(count) if count else layers)
    return (modes + ["none"] * layers)[:layers]


def _compress(modes: Sequence[str]) -> str:
    runs = [(mode, len(list(run))) for mode, run in groupby(modes)]
    if len(runs) > 1 and runs[-1][0] == "none":
        return " + ".join(f"{mode} {count}" for mode, count in runs[:-1])
    *first, (last, _) = runs
    return " + ".join([*(f"{mode} {count}" for mode, count in first), last])
