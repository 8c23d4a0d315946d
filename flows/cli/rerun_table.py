"""The output of `trainshed plan --changes`: what a changed profile would run again of an existing run."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from flows.cli.exit_codes import DONE
from flows.start_checks import RunCommand
from flows.ui.console import TrimmedConsole, plain_table, print_json, waiting
from modeling.planning.auto import resolve_auto
from profiles.errors import format_value
from profiles.schema import Profile
from tasks.rerun import Rerun, compare
from tasks.store.runs import RunExists
from tasks.store.store import Store


def show_rerun(profile: Profile, command: RunCommand, run: str, *, as_json: bool) -> int:
    """Print what running a profile under the name of an existing run would run again, and why."""
    with waiting(lambda: f"comparing with {run}"):
        profile = resolve_auto(profile)
        store = Store(command.store, profile.cluster.work_dir or "store").existing()
        rerun = compare(store, profile, run)
    if as_json:
        print_json(asdict(rerun))
        return DONE
    console = TrimmedConsole()
    reached = f"at step {rerun.checkpoint:,}" if rerun.checkpoint else "without a checkpoint"
    console.print(Text.assemble((run, "bold"), f"  {reached}"))
    changes = [str(change) for change in rerun.changes] or ["no key of the profile differs"]
    console.print(plain_table([("", change) for change in changes]))
    console.print()
    rows = [(each.step, each.outcome, "\n".join(each.reasons)) for each in rerun.steps]
    console.print(plain_table(rows))
    console.print()
    console.print(_verdict(rerun, command), soft_wrap=True)  # so that commands can be copied
    return DONE


def _verdict(rerun: Rerun, command: RunCommand) -> str:
    """Whether it would be the same run, and otherwise the commands that train another one."""
    if not rerun.another_run:
        return "the same run: its name and identity stay"
    if not rerun.checkpoint:
        return f"another run: {rerun.run}, which has no checkpoint, is moved to {rerun.run}~N"
    changed = [each for each in rerun.changes if each.key.startswith("train.")]
    settings = [f"{each.key}={format_value(each.after, longest=None)}" for each in changed]
    conflict = RunExists(rerun.run, rerun.another_run, rerun.checkpoint, rerun.forkable, settings)
    conflict.commands = command.alternatives(conflict, rerun.run)
    return "\n".join(["another run; to train it:", *conflict.suggestions()])
