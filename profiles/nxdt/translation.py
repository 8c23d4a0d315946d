"""Collects a translation: the profile's values so far, and a line for each key of the config."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from profiles.errors import ProfileError, format_value
from profiles.nxdt.config import Unresolved

NO_MATHEMATICS = "exp_manager."  # beginning of keys that only say what is saved


class Effect(StrEnum):
    """What the import does with a key, in ascending order of severity."""

    HARMLESS = "no effect"  # needs no equivalent: no effect on the mathematics, or always done
    TRANSLATED = "translated"  # to keys of the profile, with the same meaning
    DIFFERS = "differs"  # Trainshed behaves differently, as the note explains
    TO_DO = "to do"  # the user has to act before a run starts
    ERROR = "error"  # changes the mathematics and has no equivalent: nothing is imported


@dataclass(frozen=True)
class Line:
    """The result for one key: the effect, the profile keys that it sets, and a note."""

    key: str
    value: Any
    effect: Effect
    ours: str | None = None
    note: str = ""

    @property
    def subject(self) -> str:
        """The key, its value and the profile keys: `key = value -> ours`."""
        arrow = f" -> {self.ours}" if self.ours else ""
        return f"{self.key} = {format_value(self.value)}{arrow}"

    @property
    def error(self) -> ProfileError:
        return ProfileError(self.key, self.value, self.note)


@dataclass
class Translation:
    """The results of the rules so far.

    Attributes:
        theirs: values of the config by dotted key.
        folder: the config's folder, which the path of a config.json is relative to.
        ours: values of the profile by dotted key.
        lines: one for each key that has been read.
        known: keys that were looked for, in the config or not.
    """

    theirs: Mapping[str, Any]
    folder: Path
    ours: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default if it is missing or null."""
        self.known.add(key)
        value = self.theirs.get(key)
        return default if value is None or value == "None" else value

    def number(self, key: str, default: float) -> float:
        """The value of a key that must be a finite number; reports an error for another.

        After an error, these readers return the default, so that the other keys are read too.
        """
        value = self._get_or_note(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.report(key, Effect.ERROR, "is not a number")
            return default
        return value

    def integer(self, key: str, default: int, least: int = 1) -> int:
        """The value of a key that must be an integer of at least `least`; others like `number`."""
        value = self._get_or_note(key, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (isinstance(value, float) and value.is_integer())) or value < least:
            self.report(key, Effect.ERROR, f"is not an integer of {least} or more")
            return default
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        """The value of a key that must be true or false; others like `number`."""
        value = self._get_or_note(key, default)
        if value not in (True, False):  # 1 and 0 too
            self.report(key, Effect.ERROR, "is neither true nor false")
            return default
        return bool(value)

    def _get_or_note(self, key: str, default: Any) -> Any:
        """As `get`; for an unresolved value that no result depends on, the default and a thing to do."""
        value = self.get(key, default)
        if isinstance(value, Unresolved) and key.startswith(NO_MATHEMATICS):
            self.report(key, Effect.TO_DO, f"{format_value(default)} is used instead")
            return default
        return value

    def misspelt(self, key: str) -> list[str]:
        """The known key that an unknown one is probably a misspelling of, if there is one."""
        section, _, name = key.rpartition(".")
        names = [
            each.rpartition(".")[2]
            for each in self.known - self.theirs.keys()
            if each.rpartition(".")[0] == section
        ]
        return [f"{section}.{each}".lstrip(".") for each in get_close_matches(name, names, 1, cutoff=0.8)]

    def has(self, key: str) -> bool:
        """Whether a key is present and not null."""
        return self.get(key) is not None

    def has_section(self, name: str) -> bool:
        """Whether a section is present and not null, even if empty."""
        return self.has(name) or any(key.startswith(f"{name}.") for key in self.theirs)

    def translate(
        self, key: str, values: Mapping[str, Any], note: str = "", effect: Effect = Effect.TRANSLATED
    ) -> None:
        """Set keys of the profile from a key of the config."""
        self.known.add(key)
        self.ours |= values
        if key in self.theirs:
            self._add(Line(key, self.theirs[key], effect, ", ".join(values) or None, note))

    def report(self, key: str, effect: Effect, note: str) -> None:
        """Report a key that sets nothing; one that the config lacks only with Effect.TO_DO or ERROR."""
        self.known.add(key)
        if key in self.theirs or effect in (Effect.TO_DO, Effect.ERROR):
            self._add(Line(key, self.theirs.get(key), effect, None, note))

    def report_unresolved(self) -> None:
        """Report each value that is not resolved as a thing to do; one that is required remains an error."""
        for key, value in self.theirs.items():
            if isinstance(value, Unresolved):
                line = self.lines[key]
                error, note = line.effect is Effect.ERROR, f"; {line.note}" if line.note else ""
                effect, note = (Effect.ERROR, "") if error else (Effect.TO_DO, note)
                self.lines[key] = replace(line, effect=effect, note=f"{value.reason}{note}")

    def path(self, key: str) -> str | None:
        """The path that a key names, variables and ~ expanded; None if it is missing or unresolved."""
        value = self.get(key)
        if value is None or isinstance(value, Unresolved):
            return None
        return os.path.expandvars(os.path.expanduser(str(value)))

    def _add(self, line: Line) -> None:
        """Keep the more severe of two lines for one key: an error is never replaced."""
        known = self.lines.get(line.key)
        order = list(Effect)
        if known is None or order.index(line.effect) >= order.index(known.effect):
            self.lines[line.key] = line
