"""ProfileError: which key is invalid, its value, why, and the valid choices that it was given."""

from __future__ import annotations

import difflib
import fnmatch
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from profiles.files import state_files

MAX_VALUE_LENGTH = 80  # characters
MAX_PATH_LENGTH = 4096  # characters, PATH_MAX on Linux
FEW = 5  # choices to name if none is near
OVERRIDE_SYNTAX = (
    "is not of the form KEY.PATH=VALUE, without spaces around =; for instance --set train.steps=100"
)


class ProfileError(ValueError):
    """Invalid profile; the message has a line per error, `key = value: reason; nearest valid: choices`.

    Attributes:
        key: dotted path, such as `parallel.tensor` or `data.sources.0.path`.
        value: the given value; None if it is missing.
        reason: why it is invalid, phrased to follow the value.
        choices: nearest valid values, best first; may be empty.
        others: further errors of the same profile.
    """

    def __init__(
        self,
        key: str,
        value: Any,
        reason: str,
        choices: Sequence[Any] = (),
        others: Sequence[ProfileError] = (),
    ) -> None:
        super().__init__(key, value, reason, choices, others)
        self.key = key
        self.value = value
        self.reason = reason
        self.choices = tuple(choice for choice in choices if not _reads_as(choice, value))
        self.others = tuple(others)

    def __str__(self) -> str:
        subject = self.key if self.value is None else f"{self.key} = {format_value(self.value)}"
        choices = ", ".join(format_value(choice, longest=None) for choice in self.choices)
        nearest = f"; nearest valid: {choices}" if choices else ""
        also = "".join(f";\nalso {other}" for other in self.others)
        return f"{subject}: {self.reason}{nearest}{also}"

    def within(self, section: str) -> ProfileError:
        """The same error, and those along with it, with their keys prefixed by a section."""
        others = [other.within(section) for other in self.others]
        return ProfileError(f"{section}.{self.key}", self.value, self.reason, self.choices, others)

    def with_choices(self, choices: Sequence[Any]) -> ProfileError:
        """The same error with other choices, without those along with it."""
        return ProfileError(self.key, self.value, self.reason, choices)

    def along_with(self, others: Sequence[ProfileError]) -> ProfileError:
        """The same error together with further ones."""
        return ProfileError(self.key, self.value, self.reason, self.choices, others)


def _reads_as(choice: Any, value: Any) -> bool:
    """Whether a choice would repeat the given value in a message, such as 1 for 1.0."""
    if {type(choice), type(value)} == {int, float}:
        return bool(choice == value)
    return value is not None and format_value(choice) == format_value(value)


def format_value(value: Any, longest: int | None = MAX_VALUE_LENGTH) -> str:
    """A value as in YAML, on one line, cut in its middle to `longest` characters if that is given.

    A path or URI is not cut.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(str(value).split())
    if longest is not None and _is_path(value):
        longest = MAX_PATH_LENGTH
    if longest is None or len(text) <= longest:
        return text
    return f"{text[: longest // 2 - 1]}…{text[-longest // 2 :]}"


def counted(count: int, noun: str) -> str:
    """A number of things: (1, 'shard') -> '1 shard', (1200, 'shard') -> '1,200 shards'."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def _is_path(value: Any) -> bool:
    """Whether a value can be a path or URI, which is of no use unless it is complete."""
    return isinstance(value, PurePath) or (isinstance(value, str) and "/" in value and value.isprintable())


def install_command(extra: str) -> str:
    """The command that installs an extra into this environment, with the pins of its installation."""
    pip, constraints = Path(sys.prefix, "bin/pip"), Path(sys.prefix, "constraints.txt")
    if not state_files.exists(constraints):  # not created by `make install`
        pip, constraints = Path(pip.name), Path(constraints.name)
    return shlex.join([str(pip), "install", "-c", str(constraints), "-e", f".[{extra}]"])


def closest(name: str, known: Iterable[str], most: int = FEW) -> list[str]:
    """The known names most similar to a name; if none is similar, the first `most`."""
    names = list(known)
    return difflib.get_close_matches(name, names) or names[:most]


def names_in(folder: Path, pattern: str) -> list[str]:
    """Names in a folder to suggest: those that begin a path of this pattern, NAME or NAME/PATH.

    What cannot be read is left out, without retries: the error that suggests names is about another path.
    """
    first, _, rest = pattern.partition("/")
    names: list[str] = []
    with suppress(OSError, ValueError):
        names = sorted(fnmatch.filter(os.listdir(folder), first))
    found: list[str] = []
    for name in names:
        with suppress(OSError):
            Path(folder, name, rest).stat()
            found.append(name)
    return found


def closest_files(path: str, pattern: str = "*", folder: Path | None = None) -> list[str]:
    """Paths beside one that is missing, with the most similar names.

    Args:
        pattern: of the names to consider.
        folder: that a path is relative to, if not the working folder.
    """
    missing = Path(path)
    names = names_in(Path(folder or "", missing.expanduser()).parent, pattern)
    return [str(missing.with_name(name)) for name in difflib.get_close_matches(missing.name, names)]
