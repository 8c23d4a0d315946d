"""`trainshed import-config`: convert an NxD Training config, report on each key, and plan the profile."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from flows.cli.exit_codes import DONE
from flows.ui.console import TrimmedConsole, print_json, print_stderr, waiting
from profiles import nxdt, resolve
from profiles.errors import ProfileError, counted
from profiles.files import state_files
from profiles.nxdt.translation import Effect, Line
from profiles.rules.cluster import PLANNED_ONLY
from profiles.schema import Profile

if TYPE_CHECKING:
    from modeling.planning.planner import Plan

SHOWN = (Effect.DIFFERS, Effect.TO_DO)  # others are only counted


def run(options: argparse.Namespace) -> int:
    """Write the profile, print how each key was translated, and the plan; returns the exit code.

    Raises ProfileError if the config is invalid, or changes the mathematics in a way that no profile key can express.
    """
    path = Path(options.config).expanduser()
    model_config = None if options.model_config is None else Path(options.model_config).expanduser()
    imported = nxdt.import_config(path, model_config)
    target = Path(options.out or f"{path.stem.removesuffix('_config') or path.stem}.yaml")
    if options.out is None and target.resolve() == path.resolve():
        target = Path(f"{path.stem}_trainshed.yaml")
    if target.suffix not in (".yaml", ".yml"):
        raise ProfileError("OUT", str(target), "does not end in .yaml or .yml", [f"{target}.yaml"])
    if state_files.exists(target):
        raise ProfileError("OUT", str(target), "exists already; choose another file")
    with waiting(lambda: f"planning {target.stem}"):
        profile = _load(imported, target)
        if options.hardware is not None:
            from modeling.planning.replan import replan

            imported = imported.with_values(replan(profile, options.hardware))
            profile = _load(imported, target)
        from modeling.planning.planner import plan

        problem = None
        try:
            resolve.check(profile)
        except ProfileError as error:
            problem = error
        planned = None if problem else plan(profile)
    try:
        state_files.make_folder(target.parent)
        with target.open("x") as file:
            file.write(imported.text())
    except OSError as error:
        raise ProfileError("OUT", str(target), error.strerror or str(error)) from error
    if options.json:
        keys = [asdict(line) for line in imported.lines]
        print_json({"profile": str(target), "keys": keys, "plan": planned and planned.to_json()})
    else:
        _print(imported, target, profile, planned, verbose=options.verbose)
    if problem is not None:
        print_stderr(f"fix before you run it: {problem}")
    return DONE


def _load(imported: nxdt.Imported, target: Path) -> Profile:
    """The profile, with the name of the file that it will be written to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, target.name)
        path.write_text(imported.text())
        return resolve.load(str(path), folder=target.parent)


def _print(
    imported: nxdt.Imported, target: Path, profile: Profile, planned: Plan | None, *, verbose: bool
) -> None:
    console = TrimmedConsole()
    counts = ", ".join(f"{effect} {len(lines)}" for effect in Effect if (lines := imported.of(effect)))
    console.print(
        f"{counted(len(imported.lines), 'key')}: {counts}" + ("" if verbose else "; --verbose lists all")
    )
    for effect in Effect:
        if (lines := imported.of(effect)) and (effect in SHOWN or verbose):
            _print_lines(console, effect, lines)
    console.print(f"\nwrote {target}; next: trainshed plan {target}\n", soft_wrap=True)
    if planned is None:
        return
    from flows.cli.plan_table import print_plan

    print_plan(console, profile, planned)
    if profile.cluster.accelerator in PLANNED_ONLY:
        hint = (
            "\nthis is the original topology; --hardware trn2 or h200 plans one for hardware that can train"
        )
        console.print(Text(hint, "yellow"))


def _print_lines(console: Console, effect: Effect, lines: list[Line]) -> None:
    console.print(Text(f"\n{effect}", "bold"))
    for line in lines:
        subject, note = line.subject, line.note
        beside = len(subject) + len(note) + 6 <= console.width
        console.print(
            Padding(Text(f"{subject}: {note}" if note and beside else subject), (0, 0, 0, 2), expand=False)
        )
        if note and not beside:
            console.print(Padding(Text(note, "dim"), (0, 0, 0, 6), expand=False))
