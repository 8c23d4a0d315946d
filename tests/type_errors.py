"""mypy over the product, in strict mode: `python -m tests.type_errors`.

The modules that still have errors are listed in type_errors.txt, which may only become shorter: the check fails for an error in
any other module, and for a listed module without errors.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

LISTED = Path(__file__).with_suffix(".txt")
CLEAN = ("flows/", "modeling/", "parallel/", "profiles/", "tasks/")  # folders without errors


def problems(report: str, listed: Collection[str]) -> Iterator[str]:
    """What is wrong with mypy's report, given the files that may have errors."""
    lines = report.splitlines()
    with_errors = {line.partition(":")[0] for line in lines if ": error: " in line}
    yield from (line for line in lines if line.partition(":")[0] in with_errors.difference(listed))
    for path in sorted(set(listed)):
        if path.startswith(CLEAN):
            yield f"{path}: is in a folder without type errors; remove it from {LISTED.name} and mend its errors"
        elif path not in with_errors:
            yield f"{path}: has no type errors any more; remove it from {LISTED.name}"


def main() -> int:
    """Check the product; 1 if something is wrong."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", "--hide-error-context"]
    result = subprocess.run(command, cwd=LISTED.parents[1], capture_output=True, text=True)
    if result.returncode not in (0, 1):
        print(result.stdout, result.stderr, sep="", file=sys.stderr)
        return result.returncode
    found = list(problems(result.stdout, LISTED.read_text().split()))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
