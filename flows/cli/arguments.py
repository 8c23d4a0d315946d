"""Arguments of the `trainshed` command: help, nearest commands, argument types, `--output`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import ClassVar

from profiles import arguments
from profiles.errors import OVERRIDE_SYNTAX, ProfileError
from profiles.files import state_files


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


class Parser(arguments.Parser):
    """Parser of the command line or a subcommand."""

    command_hints: ClassVar[dict[str, str]] = {
        "export": "to export a run's latest checkpoint: trainshed convert store/runs/RUN DIR --to hf",
        "deploy": "to register deployments: trainshed up --register",
        "share": "to find a series' share of replay: trainshed mixture share FILE",
        "resume": "to resume a run, start it again with the same command",
        "report": "a run writes its report at its end, to store/runs/RUN/report.html",
        "train": "to train a profile: trainshed run PROFILE",
        "check-device": "to check this machine's devices: make check-device",
    }


def override(text: str) -> str:
    """Argument type of an override; rejects `--set KEY VALUE`, which would leave VALUE as an argument."""
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text} {OVERRIDE_SYNTAX}")
    return text


def write_page(output: str, page: str) -> str:
    """Write the page of `--output`; returns its path. Raises ProfileError if it cannot be written."""
    path = Path(output)
    try:
        state_files.make_folder(path.parent)
        path.write_text(page)
    except OSError as error:
        raise ProfileError("--output", output, f"cannot be written: {error.strerror}") from error
    return str(path)
