"""`trainshed import-config`: convert an NxD Training config to a profile, and report each of its keys."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from flows.cli.exit_codes import DONE
from flows.ui.console import print_stderr
from profiles import nxdt, resolve, yaml_text
from profiles.errors import ProfileError


def run(options: argparse.Namespace) -> int:
    """Write the profile and print what each key became; returns the exit code. Raises ProfileError for an invalid key."""
    path = Path(options.config).expanduser()
    values, lines = nxdt.convert(nxdt.read(path), path.parent)
    target = Path(options.out or f"{values['name']}.yaml")
    if target.exists():
        raise ProfileError("OUT", str(target), "exists already; choose another file")
    profile_path = str(target) if target.is_absolute() else f"./{target}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml_text.write(values))
        profile = resolve.load(profile_path)
    except OSError as error:
        raise ProfileError("OUT", str(target), str(error)) from error
    except ProfileError:
        target.unlink()
        raise
    if options.json:
        print(json.dumps({"profile": str(target), "keys": [asdict(line) for line in lines]}, indent=1))
    else:
        width = max((len(line.key) for line in lines), default=0)
        for line in lines:
            print(line.show(width))
        print(f"\nwrote {target}; next: trainshed plan {target}")
    try:
        resolve.check(profile)
    except ProfileError as error:
        print_stderr(f"fix before you run it: {error}")
    return DONE
