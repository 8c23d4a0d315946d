"""`trainshed import-config`: a config of NxD Training made into a profile, with a line for each of its keys."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from flows.ui.console import say
from profiles import nxdt, resolve, text
from profiles.errors import ProfileError


def import_config(theirs: str, out: str | None, *, as_json: bool) -> int:
    """Write the profile, by default to NAME.yaml here; ProfileError where a key cannot be understood, or a file is in the way."""
    path = Path(theirs).expanduser()
    values, lines = nxdt.convert(nxdt.read(path), path.parent)
    target = Path(out or f"{values['name']}.yaml")
    if target.exists():
        raise ProfileError("OUT", str(target), "is there already, and nothing is overwritten")
    written = text.write(values)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(written)
        resolve.load(str(target) if target.is_absolute() else f"./{target}")
    except OSError as error:
        raise ProfileError("OUT", str(target), str(error)) from error
    except ProfileError:
        target.unlink()
        raise
    if as_json:
        print(json.dumps({"profile": str(target), "keys": [asdict(line) for line in lines]}, indent=1))
    else:
        width = max((len(line.key) for line in lines), default=0)
        for line in lines:
            print(line.show(width))
        print(f"\nwritten to {target}; next: trainshed plan {target}")
    try:
        resolve.check(resolve.load(str(target) if target.is_absolute() else f"./{target}"))
    except ProfileError as error:
        say(f"to be mended before it runs: {error}")
    return 0
