"""Damage or replace each file of a store in many ways, and run each command on it.

No command may crash, hang or use wrong data.

A small run is trained and evaluated once. Then one file, or one folder, of a copy of its store is damaged, and a command is run
on the copy, in a forked process and without Prefect; jobs that it starts train and evaluate in processes forked from that one. It
must succeed with the results that it has without damage, or name what is damaged in its error. A traceback, an error without the
name, more than 60 seconds, and other results (losses of `run` and `evaluate`, files of the export) are findings, which are
printed and make the exit code 1.

With `--sample`, each file and damage is tried with one command, in turn, so that every file, every damage and every command is
tried. An interrupted benchmark continues with `--resume`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib
import inspect
import io
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import Results, read
from benchmarks.harness.timing import make_parser
from flows.cli.main import main as command
from parallel.checkpoint import locations
from profiles import resolve
from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.files.state_files import CorruptedState
from tasks import completed
from tasks.failures import FatalError
from tasks.sources.shard import SOURCE_ERRORS
from tasks.store import locks
from tasks.store.store import Store
from tests.flows.micro import write_profile
from tests.flows.without_prefect import without_prefect
from tests.forked_jobs import forked_jobs

RUN = "micro"
KEY = re.compile("[0-9a-f]{8,}")  # in names of files, which differ between stores
TIMEOUT = 60.0  # seconds of a command
LOCK_EXPIRY = 3.0  # seconds; a corrupted ticket of a lock is waited for during half of it
# Errors whose messages name their subject.
NAMED = (ProfileError, CorruptedState, FatalError, OSError, *SOURCE_ERRORS)
# Imported once, before the processes that need them are forked.
PRELOADED = (
    *("flows.pretrain", "flows.evaluate", "flows.export", "flows.start_checks", "tasks.completed"),
    *(f"flows.cli.{name}" for name in ("run", "evaluate", "runs.compare", "runs.runs", "runs.fork")),
    *("modeling.training.train", "modeling.training.evaluate", "tests.cheap_torch"),
    *("torch.utils.tensorboard", "transformers.models.auto.tokenization_auto"),
)
OTHERS = ("forecast.json", "before.json", "evaluations.jsonl", "events.jsonl")  # files that this run lacks


def retype(value: Any) -> Any:
    """A JSON value with values of other types in the same places."""
    if isinstance(value, dict):
        return {key: retype(each) for key, each in value.items()}
    if isinstance(value, list):
        return {"0": retype(value[0]) if value else 1}
    return 7 if isinstance(value, str) else [str(value)]


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change each document of a JSON, JSON Lines or YAML file; other files become a JSON object."""
    missing = '{"step": 1, "loss": 1.0, "event": "x", "time": 1}'
    text = path.read_text(errors="replace") if path.exists() else missing
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
    "loop": replace_by(lambda path: path.symlink_to(path.name)),
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


def commands(folder: Path, results: list[Any]) -> dict[str, Callable[[], int]]:
    """Each command on the store of a folder; `results` takes the result of those that are functions.

    `completed` is how the command `run` answers for a completed run without a flow.
    """
    store, profile = str(folder / "store"), str(folder.parent / f"{RUN}.yaml")

    def call(*arguments: str) -> Callable[[], int]:
        return lambda: command([*arguments, "--store", store])

    def export() -> int:
        from flows.export import export

        results.append({"export": export(RUN, store, store)})
        return 0

    def answer() -> int:
        if found := completed.find(Store(store), resolve.load(profile)):
            results.append(found)
        return 0

    return {
        "run": call("run", profile),
        "completed": answer,
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
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=lambda: sender.send(function(*arguments)))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise TimeoutError
        return receiver.recv()
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(process.pid).children(recursive=True):  # its jobs
                each.kill()
        process.kill()
        process.join()


@dataclass(frozen=True)
class Attempt:
    """How a command ended."""

    code: int
    known: bool  # whether its error is of a kind that names its subject
    jobs: int  # that it started
    errors: str  # what it printed on standard error, and the message of what it raised
    details: str  # its log, and the traceback of what it raised
    results: Any  # of its flow: losses, or digests of exported files


def attempt(folder: Path, name: str) -> Attempt:
    """Run a command, with jobs in forked processes; nothing waits before it tries again."""
    _drop_capabilities()
    os.chdir(folder)
    errors, log, raised, jobs = io.StringIO(), io.StringIO(), [], []
    logging.basicConfig(stream=log, level=logging.WARNING, force=True)

    def keep(*_: object) -> str:
        raised.append(sys.exception())
        return "kept"

    def fork() -> BaseContext:
        jobs.append(name)
        return multiprocessing.get_context("fork")  # torch is imported here

    with (
        without_prefect() as results,
        forked_jobs(),
        mock.patch("tests.forked_jobs.forkserver", fork),
        mock.patch("tasks.launchers.base.POLL", 0.02),
        mock.patch("flows.cli.main.save_traceback", keep),
        mock.patch.object(state_files, "DELAYS", (0.0,) * len(state_files.DELAYS)),
        mock.patch.object(locations, "READ_PAUSES", (0.0,) * len(locations.READ_PAUSES)),
        mock.patch.object(inspect.unwrap(locks.acquire), "__defaults__", (LOCK_EXPIRY, lambda: None)),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            code = commands(folder, results)[name]()
        except Exception as error:
            raised.append(error)
            code = 1
    known = not raised or isinstance(raised[-1], NAMED)
    found = outputs(results[-1]) if results and code == 0 else None
    message, details = errors.getvalue(), log.getvalue()
    if raised:
        message += "".join(traceback.format_exception_only(raised[-1]))
        details += "".join(traceback.format_exception(raised[-1]))
    return Attempt(code, known, len(jobs), message, details, found)


def outputs(result: Any) -> Any:
    """What damage may not change of a flow's result: its evaluations, and the contents of the export."""
    if isinstance(result, list):
        return result
    files = sorted(Path(result["export"]).iterdir())
    exported = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return {"evaluation": result.get("evaluation"), **exported}


def _drop_capabilities() -> None:
    """Let root obey the permissions of files, as other users do."""
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset(ctypes.byref(header), ctypes.byref(nothing))


def undamaged_results(folder: Path, name: str) -> Any:
    """What damage may not change of a command's results."""
    found: Attempt = call_in_child(attempt, folder, name)
    if found.code:
        raise SystemExit(f"{name} fails without damage\n{found.errors}{found.details}")
    return found.results


def judge(folder: Path, file: str, name: str, expected: Any) -> tuple[str, str]:
    """Run a command on a damaged store; returns its outcome, and details of a finding."""
    try:
        found: Attempt = call_in_child(attempt, folder, name)
    except TimeoutError:
        return "HANGS", ""
    except EOFError:
        return "CRASHES", ""
    if found.code == 0:
        if not same(found.results, expected):
            return "OTHER RESULTS", f"{found.results}, not {expected}\n{found.errors}{found.details}"
        return ("succeeds after a job" if found.jobs else "succeeds"), ""
    if not found.known:
        return "TRACEBACK", f"{found.errors}{found.details}"
    path = Path(file)
    names = [path.name, f"= {RUN}", *([str(path.parent)] if path.parent.name else [])]
    named = any(name in found.errors for name in names)
    return ("names it", "") if named else ("DOES NOT NAME IT", f"{found.errors}{found.details}")


def same(found: Any, expected: Any) -> bool:
    """Whether results are those without damage, or none; evaluations may lack damaged checkpoints."""
    if isinstance(found, list):
        return all(each in expected for each in found)
    return found is None or bool(found == expected)


def files_of(store: Path) -> list[str]:
    """One file of each kind in the store, and the folders."""
    found: dict[tuple[object, ...], str] = {}
    for path in sorted(store.rglob("*")):
        parts = path.relative_to(store).parts
        kind: tuple[object, ...] = parts
        if len(parts) > 2 and parts[0] == "artifacts":
            kind = (*parts[:2], *parts[3:])  # without its key
        elif parts[0] in ("locks", "local-cache", "ledger"):
            used = parts[:2] in (("locks", "gc"), ("locks", f"run-{RUN}"))
            kind = (*parts[: 2 if used else 1], len(parts))
        elif "step_6" in parts[:-1]:
            kind = (*parts[:-1], path.suffix or path.name)
        found[kind] = "/".join(parts)
    return [*found.values(), *(f"runs/{RUN}/{name}" for name in OTHERS)]


def numbered(files: list[str]) -> dict[str, str]:
    """Each file's name in rows: keys and ids, which differ between stores, are numbered by appearance."""
    numbers: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        return f"#{numbers.setdefault(found[0], len(numbers) + 1)}"

    return {file: KEY.sub(number, file) for file in files}


def train(folder: Path) -> None:
    """Train and evaluate the run whose store is damaged."""
    profile, store = write_profile(folder), str(folder / "store")
    with without_prefect(), forked_jobs():
        if command(["run", str(profile), "--store", store]) or command(["evaluate", RUN, "--store", store]):
            raise SystemExit("the undamaged run failed")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, out="damaged_files")
    names = [*commands(Path(), [])]
    parser.add_argument("--commands", nargs="+", choices=names, default=names)
    parser.add_argument("--damages", nargs="+", choices=DAMAGES, default=[*DAMAGES])
    parser.add_argument("--files", default="", help="only files whose path contains this text")
    parser.add_argument("--sample", action="store_true", help="one command for each file and damage, in turn")
    text = "run only cases that --out lacks, or has as findings; of others, its outcomes are counted"
    parser.add("--resume", text)
    return parser.parse_args(arguments)


def cases(store: Path, options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(file, damage, command) of each chosen case."""
    chosen: list[tuple[str, str, str]] = []
    for number, file in enumerate(files_of(store)):
        if options.files not in file:
            continue
        damages = OF_FOLDERS if (store / file).is_dir() else DAMAGES
        for turn, damage in enumerate([each for each in options.damages if each in damages], number):
            names = options.commands
            if options.sample:
                names = [names[turn % len(names)]]
            chosen += [(file, damage, name) for name in names]
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


@contextlib.contextmanager
def copied(store: Path, copy: Path) -> Iterator[None]:
    """A copy of the store in a folder; commands write into files, so that links to them would not do."""
    shutil.copytree(store, copy / "store")
    try:
        yield
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    options, console = parse(arguments), Console(highlight=False)
    kept = Results(options.out)
    done = {row["row"]: row["outcome"] for row in read(options.out)} if options.resume else {}
    outcomes: Counter[tuple[str, str]] = Counter()  # of a command and an outcome
    begun, findings = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        os.environ["PREFECT_HOME"] = str(base / "prefect")
        for module in PRELOADED:
            importlib.import_module(module)
        call_in_child(train, base, timeout=1800)
        chosen, copy = cases(base / "store", options), base / "copy"
        names = numbered(files_of(base / "store"))
        expected: dict[str, Any] = {}  # results of each command without damage
        for file, damage, each in chosen:
            row = f"{each}, {names[file]} {damage}"
            outcome, details = done.get(row, "NEW"), ""
            if outcome.isupper():
                if each not in expected:
                    with copied(base / "store", copy):
                        expected[each] = undamaged_results(copy, each)
                with copied(base / "store", copy):
                    DAMAGES[damage](copy / "store" / file)
                    outcome, details = judge(copy, file, each, expected[each])
                kept.append({"row": row, "outcome": outcome})
            outcomes[each, outcome] += 1
            if outcome.isupper():
                findings += 1
                console.print(f"{outcome}: {row}\n{details}", markup=False)
    console.print(table(outcomes))
    times = os.times()
    cpu = times.user + times.system + times.children_user + times.children_system
    seconds = time.monotonic() - begun
    console.print(f"{findings} findings in {len(chosen):,} cases, {seconds:,.0f} s, {cpu:,.0f} s of CPU")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
