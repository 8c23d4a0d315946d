"""Command-line parser: aligned help; errors show the subcommand's usage and the nearest valid choice."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from profiles.errors import OVERRIDE_SYNTAX

COMMAND_HINTS = {
    "export": "to export a run's latest checkpoint: trainshed convert store/runs/RUN DIR --to hf",
}


class HelpFormatter(argparse.HelpFormatter):
    """Align the help texts of subcommands too; argparse ignores their indent in the column's width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        for subaction in self._iter_indented_subactions(action):
            length = self._current_indent + len(self._format_action_invocation(subaction))
            self._action_max_length = max(self._action_max_length, length)

    def _format_action(self, action: argparse.Action) -> str:
        """Leave out the metavar line above the subcommands."""
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Do not wrap examples."""
        return text if text.startswith("example:") else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """Parser of the command line or a subcommand; rejects unknown arguments itself, with its own usage."""

    def parse_known_args(
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
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
        hint = COMMAND_HINTS.get(value) if name == "command" else None
        reason = f"{value} is not a valid {name}; {hint or _choices(difflib.get_close_matches(value, valid), valid)}"
        raise argparse.ArgumentError(None if name == "command" else action, reason)

    def _unknown(self, arguments: Sequence[str]) -> str:
        """Why the first of these arguments is rejected, and what the user may have meant."""
        first = arguments[0]
        if not first.startswith("-"):
            is_override = re.match(r"[a-z_]+(\.[a-z_0-9]+)+=", first) and "--set" in self._options()
            meant = f"; to override a key: --set {first}" if is_override else ""
            return f"unexpected argument {first}{meant}"
        option = first.partition("=")[0]
        return f"there is no option {option}; {_choices(self._nearest(option), list(self._options()))}"

    def _nearest(self, option: str) -> list[str]:
        """Options with a similar name, else those with a similar word in their help."""
        word, options = option.strip("-"), self._options()
        names = {name.strip("-"): name for name in options}
        if close := difflib.get_close_matches(word, names):
            return [names[name] for name in close]
        return [
            name
            for name, action in options.items()
            if difflib.get_close_matches(word, re.findall(r"[a-z]{4,}", (action.help or "").lower()), 1, 0.8)
        ]

    def _options(self) -> dict[str, argparse.Action]:
        """Actions by the long name of their option."""
        named = ((action.option_strings[-1], action) for action in self._actions if action.option_strings)
        return dict(named)


def _choices(nearest: Sequence[str], valid: Sequence[str]) -> str:
    """The nearest choices, or all if none is near."""
    return f"nearest valid: {', '.join(nearest)}" if nearest else f"valid: {', '.join(valid)}"


def override(text: str) -> str:
    """Argument type of an override; rejects `--set KEY VALUE`, which would leave VALUE as an argument."""
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text} {OVERRIDE_SYNTAX}")
    return text


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
