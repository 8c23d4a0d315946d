"""Results of a benchmark: each row is printed, and appended to a JSON Lines file, when it exists.

A benchmark that is ended keeps the rows that it has measured.
"""

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from profiles.files import state_files
from profiles.files.jsonl import LogFollower


class Results:
    """The rows of a run of a benchmark; created before the work, which needs a writable file.

    Args:
        path: the file that `--out` names; earlier rows stay.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            print(
                f"{path}: cannot be written ({error.strerror}); name another file with --out", file=sys.stderr
            )
            raise SystemExit(2) from None

    def add(self, row: str, text: str | None = None, **figures: Any) -> None:
        """Print a text, by default the row's name and figures, and append the row to the file."""
        shown = (f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
                 for name, value in figures.items())  # fmt: skip
        print(f"{row}: {', '.join(shown)}" if text is None else text, flush=True)
        self.append({"row": row, **figures})

    def turn(self, side: str, result: Any) -> None:
        """Add the result of one turn of a side, for `keep` of `timing.alternate`."""
        self.add(side, result=result)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row durably, with its time and the command's arguments.

        A line that a killed process left incomplete is ended first.
        """
        row = {**row, "time": datetime.now(UTC).isoformat(timespec="seconds"), "arguments": sys.argv[1:]}
        state_files.append_line(self.path, json.dumps(row))
        state_files.sync(self.path)


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, oldest first; incomplete lines are left out."""
    return [*LogFollower(path).rows()]
