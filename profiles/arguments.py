"""Parser of complete option names, whose errors name the nearest choice; options of commands.

It overrides internals of argparse. Cyclopts and click, which Prefect brings, suggest by resemblance only, so that what an
abbreviation, a word of the help or an override means would have to be added to them, too; importing them takes 0.07 and 0.03
instead of 0.01 s of CPU, at each start of a command.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

FEW = 5  # choices to name if none is near


def to_arguments(**options: object) -> tuple[str, ...]:
    """Options of a command by name; None and False are left out, and True has no value."""
    found: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            found += [option] if value is True else [option, str(value)]
    return tuple(found)


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Argument type: integers within bounds."""

    def read(text: str) -> int:
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text} is not an integer {bounds}")
        return number

    return read


class Parser(argparse.ArgumentParser):
    """Parser of a program or a subcommand; rejects abbreviated and unknown arguments, with its own usage.

    argparse takes a unique prefix of an option for the option itself, so that a typo could start something else.

    Attributes:
        command_hints: what to advise in place of choices, by the name of a command that does not exist.
    """

    command_hints: ClassVar[dict[str, str]] = {}

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})
        # Python 3.14 would color usage if standard output is a terminal, even in messages to standard error.
        self.color = False

    def add(self, words: str, help_text: str, **settings: Any) -> None:
        """Add an argument with its help, which ends with its default, if it has one.

        Args:
            words: an option with a value, such as `--name NAME`; a flag, such as `--yes`; or an operand, such as `file FILE`.
        """
        name, _, metavar = words.partition(" ")
        if default := settings.get("default"):
            help_text = f"{help_text} (default: {default})"
        kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        self.add_argument(name, help=help_text, **kind, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with code 2."""
        self.exit(2, f"{self.format_usage()}{self.prog}: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        valid = [str(choice) for choice in action.choices]
        name = "command" if isinstance(action, argparse._SubParsersAction) else "value"
        hint = self.command_hints.get(value) if name == "command" else None
        reason = f"{value} is not a valid {name}; {hint or self._choices(difflib.get_close_matches(str(value), valid), valid)}"
        raise argparse.ArgumentError(None if name == "command" else action, reason)

    def _unknown(self, arguments: Sequence[str]) -> str:
        """Why the first of these arguments is rejected, and what the user may have meant."""
        first = arguments[0]
        if not first.startswith("-"):
            is_override = re.match(r"[a-z_]+(\.[a-z_0-9]+)+=", first) and "--set" in self._options()
            meant = f"; to override a key: --set {first}" if is_override else ""
            return f"unexpected argument {first}{meant}"
        option = first.partition("=")[0]
        return f"there is no option {option}; {self._choices(self._nearest(option), list(self._options()))}"

    def _choices(self, nearest: Sequence[str], valid: Sequence[str]) -> str:
        """The nearest choices, or the first ones if none is near, and what lists all."""
        if nearest:
            return f"nearest valid: {', '.join(nearest)}"
        more = f"; {self.prog} --help lists all" if len(valid) > FEW else ""
        return f"valid: {', '.join(valid[:FEW])}{more}"

    def _nearest(self, option: str) -> list[str]:
        """Options that the name abbreviates or resembles, else those with a similar word in their help."""
        word, options = option.strip("-"), self._options()
        names = {name.strip("-"): name for name in options}
        close = [*(name for name in names if name.startswith(word)), *difflib.get_close_matches(word, names)]
        if close:
            return [names[name] for name in dict.fromkeys(close)]
        return [
            name
            for name, action in options.items()
            if difflib.get_close_matches(word, re.findall(r"[a-z]{4,}", (action.help or "").lower()), 1, 0.8)
        ]

    def _options(self) -> dict[str, argparse.Action]:
        """Actions by the long name of their option."""
        named = ((action.option_strings[-1], action) for action in self._actions if action.option_strings)
        return dict(named)
