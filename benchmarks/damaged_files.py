"""Damage or replace each file of a store in many ways, and run each command on it.

No command may crash, hang or use wrong data.

A small run is trained once. Then one file, or one folder, of a copy of its store is damaged, and a command is run on the copy, in
a forked process and without Prefect. It must succeed, or name what is damaged in its error; a traceback, an error without the
name, more than 60 seconds, and another validation loss of a run that succeeds are findings, which are printed and make the exit
code 1. Jobs are not started: a command that would train or evaluate again has passed (tests/modeling/training/recovery tests what
jobs do with damaged checkpoints).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.timing import make_parser
from flows.cli.main import main as command
from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.files.state_files import CorruptedState
from tasks.failures import FatalError
from tasks.sources.shard import SOURCE_ERRORS
from tests.flows.micro import write_profile
from tests.flows.without_prefect import without_prefect
from tests.forked_jobs import forked_jobs

RUN = "micro"
TIMEOUT = 60.0  # seconds of a command
NAMED = (
    ProfileError,
    CorruptedState,
    FatalError,
    OSError,
    *SOURCE_ERRORS,
)  # errors whose messages name their subject
# Imported once, before the processes that need them are forked.
PRELOADED = (
    *("flows.pretrain", "flows.evaluate", "flows.export", "flows.start_checks", "tasks.completed"),
    *(
        f"flows.cli.{name}"
        for name in ("run", "evaluate", "runs.compare", "runs.runs", "runs.fleet", "runs.gc", "runs.fork")
    ),
    *("torch.utils.tensorboard", "transformers.models.auto.tokenization_auto"),
)
OTHERS = ("forecast.json", "before.json", "evaluations.jsonl", "events.jsonl")  # files that this run lacks


class JobStarted(Exception):
    """A step would start a job."""


def retype(value: Any) -> Any:
    """A JSON value with values of other types in the same places."""
    if isinstance(value, dict):
        return {key: retype(each) for key, each in value.items()}
    if isinstance(value, list):
        return {"0": retype(value[0]) if value else 1}
    return 7 if isinstance(value, str) else [str(value)]


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change each document of a JSON, JSON Lines or YAML file; other files become a JSON object."""
    text = (
        path.read_text(errors="replace")
        if path.exists()
        else '{"step": 1, "loss": 1.0, "event": "x", "time": 1}'
    )
    if path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(change(yaml.safe_load(text))))
        return
    with contextlib.suppress(ValueError):
        documents = text.splitlines() if path.suffix == ".jsonl" else [text]
        text = "\n".join(json.dumps(change(json.loads(document))) for document in documents)
        path.write_text(f"{text}\n")
        return
    path.write_text('{"identity": 5, "step": "x"}')


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def swap(path: Path) -> None:
    """A folder in place of a file, or a file in place of a folder."""
    was_folder = path.is_dir()
    remove(path)
    path.write_text("text") if was_folder else path.mkdir()


def replace_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        remove(path)
        make(path)

    return damage


def truncate(path: Path) -> None:
    data = path.read_bytes() if path.exists() else b'{"a":'
    path.write_bytes(data[: len(data) // 2])


def enlarge(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + (64 << 20))


def hide(path: Path) -> None:
    path.touch()
    path.chmod(0)


OF_FOLDERS = {
    "swapped": swap,
    "dangling": replace_by(lambda path: path.symlink_to("nowhere")),
    "pipe": replace_by(os.mkfifo),
    "unreadable": hide,
}
DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "noise": lambda path: path.write_bytes(random.Random(0).randbytes(700)),
    "list": lambda path: path.write_text("[1, 2]"),
    "types": lambda path: rewrite(path, retype),
    "nulls": lambda path: rewrite(
        path, lambda value: dict.fromkeys(value) if isinstance(value, dict) else None
    ),
    "huge": enlarge,
    **OF_FOLDERS,
}


def commands(folder: Path) -> dict[str, Callable[[], int]]:
    """Each command on the store of a folder."""
    store, profile = str(folder / "store"), str(folder.parent / f"{RUN}.yaml")

    def call(*arguments: str) -> Callable[[], int]:
        return lambda: command([*arguments, "--store", store])

    def export() -> int:
        from flows.export import export

        export(RUN, store, store)
        return 0

    return {
        "run": call("run", profile),
        "fork": call("fork", f"{RUN}@4", "child", "--set", "train.steps=8"),
        "evaluate": call("evaluate", RUN),
        "export": export,
        "compare": call("compare", RUN, "--output", str(folder / "compare.html")),
        "runs": call("runs", "--json"),
        "fleet": call("fleet", "--output", str(folder / "fleet.html")),
        "gc": call("gc", "--yes"),
    }


def call_in_child(function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT) -> Any:
    """A function's result, from a forked process. Raises TimeoutError, or EOFError if the process ended."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise TimeoutError
        return receiver.recv()
    finally:
        process.kill()
        process.join()


def _send(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))


def attempt(folder: Path, name: str) -> tuple[int, bool, bool, str, float | None]:
    """Run a command.

    Returns its exit code, whether an error of its kind names its subject, whether it would start a job, its errors, and the
    flow's validation loss.
    """
    _drop_capabilities()
    os.chdir(folder)
    errors, raised = io.StringIO(), []
    logging.basicConfig(stream=errors, level=logging.WARNING, force=True)

    def keep(*_: object) -> str:
        raised.append(sys.exception())
        return "kept"

    def start(*_: object, **__: object) -> None:
        raise JobStarted

    with (
        without_prefect() as results,
        mock.patch("flows.cli.main.save_traceback", keep),
        mock.patch("tasks.steps.training.execute", start),
        mock.patch("tasks.steps.jobs.execute", start),
        mock.patch.object(state_files, "DELAYS", ()),
        mock.patch("parallel.checkpoint.locations.READ_PAUSES", ()),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            code = commands(folder)[name]()
        except Exception as error:
            raised.append(error)
            code = 1
    text = "".join(traceback.format_exception(raised[-1])) if raised else ""
    known = not raised or isinstance(raised[-1], NAMED)
    loss = results[-1].get("validation_loss") if results and isinstance(results[-1], dict) else None
    return code, known, JobStarted.__name__ in text, f"{errors.getvalue()}{text}", loss


def _drop_capabilities() -> None:
    """Let root obey the permissions of files, as other users do."""
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset(ctypes.byref(header), ctypes.byref(nothing))


def judge(folder: Path, file: str, name: str, loss: float) -> tuple[str, str]:
    """Run a command on a damaged store; returns its outcome, and details of a finding."""
    try:
        code, known, started, text, found = call_in_child(attempt, folder, name)
    except TimeoutError:
        return "HANGS", ""
    except EOFError:
        return "CRASHES", ""
    if started:
        return "starts a job again", ""
    if code == 0:
        return ("succeeds", "") if found in (None, loss) else (f"WRONG LOSS {found}", text)
    if not known:
        return "TRACEBACK", text
    named = any(part in text for part in (Path(file).name, str(Path(file).parent), f"= {RUN}"))
    return ("names it", "") if named else ("DOES NOT NAME IT", text)


def files_of(store: Path) -> list[str]:
    """One file of each kind in the store, and the folders."""
    found: dict[tuple[object, ...], str] = {}
    for path in sorted(store.rglob("*")):
        parts = path.relative_to(store).parts
        kind: tuple[object, ...]
        if len(parts) > 2 and parts[0] == "artifacts":
            kind = (*parts[:2], *parts[3:])  # without its key
        elif parts[0] in ("locks", "local-cache", "ledger"):
            kind = (
                parts[0],
                len(parts),
                *parts[1:2] * (parts[0] == "locks" and parts[1:2] in (("gc",), (f"run-{RUN}",))),
            )
        else:
            kind = (*parts[:-1], path.suffix or path.name) if "step_6" in parts[:-1] else parts
        found[kind] = "/".join(parts)
    return [*found.values(), *(f"runs/{RUN}/{name}" for name in OTHERS)]


def train(folder: Path) -> float:
    """Train the run whose store is damaged; returns its validation loss."""
    profile = write_profile(folder)
    with without_prefect() as results, forked_jobs():
        command(["run", str(profile), "--store", str(folder / "store")])
    loss: float = results[-1]["validation_loss"]
    return loss


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    names = [*commands(Path())]
    parser.add_argument("--commands", nargs="+", choices=names, default=names)
    parser.add_argument("--damages", nargs="+", choices=DAMAGES, default=[*DAMAGES])
    parser.add_argument("--files", default="", help="only files whose path contains this text")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after this time")
    return parser.parse_args(arguments)


def cases(store: Path, options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(file, damage, command) of each chosen case, shuffled, so that the first ones are a sample of all."""
    chosen: list[tuple[str, str, str]] = []
    for file in files_of(store):
        damages = OF_FOLDERS if (store / file).is_dir() else DAMAGES
        if options.files in file:
            chosen += itertools.product(
                [file], [each for each in options.damages if each in damages], options.commands
            )
    random.Random(options.seed).shuffle(chosen)
    return chosen


def table(outcomes: Mapping[tuple[str, str], int]) -> Table:
    """Counts of outcomes by command."""
    names = list(dict.fromkeys(name for name, _ in outcomes))
    kinds = sorted({outcome for _, outcome in outcomes})
    shown = Table("command", "cases", *kinds, box=box.MARKDOWN)
    for name in names:
        counts = [outcomes.get((name, kind), 0) for kind in kinds]
        shown.add_row(name, *(f"{count:,}" for count in (sum(counts), *counts)))
    return shown


def main(arguments: list[str] | None = None) -> int:
    options, console = parse(arguments), Console(highlight=False)
    outcomes: Counter[tuple[str, str]] = Counter()  # of a command and an outcome
    begun, findings = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        os.environ["PREFECT_HOME"] = str(base / "prefect")
        for module in PRELOADED:
            importlib.import_module(module)
        loss = call_in_child(train, base, timeout=1800)
        chosen, started = cases(base / "store", options), time.monotonic()
        for file, damage, each in chosen:
            if time.monotonic() - started > options.seconds:
                break
            copy = base / "copy"
            shutil.copytree(base / "store", copy / "store")
            DAMAGES[damage](copy / "store" / file)
            outcome, details = judge(copy, file, each, loss)
            shutil.rmtree(copy, ignore_errors=True)
            outcomes[each, outcome] += 1
            if outcome.isupper() or outcome.startswith("WRONG"):
                findings += 1
                console.print(f"{outcome}: {each}, {file} {damage}\n{details}", markup=False)
    console.print(table(outcomes))
    seconds = time.monotonic() - begun
    console.print(f"{findings} findings in {outcomes.total():,} of {len(chosen):,} cases, {seconds:,.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
