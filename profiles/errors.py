"""ProfileError: which key is invalid, its value, why, and the nearest valid choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LONGEST_VALUE = 80  # characters


class ProfileError(ValueError):
    """An invalid profile; its text is one line, `key = value: reason; nearest valid: choices`.

    Attributes:
        key: dotted path, such as `parallel.tensor` or `data.sources.0.path`.
        value: the given value; None if it is missing.
        reason: why it is invalid, phrased to follow the value.
        choices: nearest valid values, best first; empty if there are none to name.
    """

    def __init__(self, key: str, value: Any, reason: str, choices: Sequence[Any] = ()) -> None:
        super().__init__(key, value, reason, choices)
        self.key = key
        self.value = value
        self.reason = reason
        self.choices = tuple(choices)

    def __str__(self) -> str:
        subject = self.key if self.value is None else f"{self.key} = {format_value(self.value)}"
        choices = ", ".join(format_value(choice, longest=None) for choice in self.choices)
        nearest = f"; nearest valid: {choices}" if choices else ""
        return f"{subject}: {self.reason}{nearest}"

    def within(self, section: str) -> ProfileError:
        """The same error with its key prefixed by a section."""
        return ProfileError(f"{section}.{self.key}", self.value, self.reason, self.choices)


def format_value(value: Any, longest: int | None = LONGEST_VALUE) -> str:
    """A value as in YAML, on one line, cut in its middle to `longest` characters if that is given."""
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(str(value).split())
    if longest is None or len(text) <= longest:
        return text
    return f"{text[: longest // 2 - 1]}…{text[-longest // 2 :]}"  # of a path, the end matters most
