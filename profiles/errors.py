"""The one error that a user's profile can cause: which key, which value, why not, and what would do instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LONGEST_VALUE = 80


class ProfileError(ValueError):
    """A profile that is refused; as text, one line.

    Attributes:
        key: dotted path of the key, as `parallel.tensor` or `data.sources.0.path`.
        value: what it was given as; None where it is missing.
        reason: why it is refused, to be read after the value.
        choices: the nearest values that would do, best first; empty where none can be named.
    """

    def __init__(self, key: str, value: Any, reason: str, choices: Sequence[Any] = ()) -> None:
        super().__init__(key, value, reason, choices)
        self.key = key
        self.value = value
        self.reason = reason
        self.choices = tuple(choices)

    def __str__(self) -> str:
        subject = self.key if self.value is None else f"{self.key} = {shown(self.value)}"
        nearest = f"; nearest valid: {', '.join(map(shown, self.choices))}" if self.choices else ""
        return f"{subject}: {self.reason}{nearest}"

    def within(self, section: str) -> ProfileError:
        """The same error as seen from outside of a section."""
        return ProfileError(f"{section}.{self.key}", self.value, self.reason, self.choices)


def shown(value: Any) -> str:
    """A value as YAML would have it, in one line and not too long."""
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
