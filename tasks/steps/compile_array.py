"""Compile a run's programs in a Slurm array: `python -m tasks.steps.compile_array` is one of its jobs.

The store's locks and artifacts ensure that each program is compiled once for the whole cluster, also by arrays of several flows.
A job that dies loses only its own programs, which the next attempt finds missing. An array has all of the run's programs, with
those that the store has: a flow that is started again makes the same one, and re-attaches to it. Programs have the keys of the
flow's machine: a node on which the compiler would make other code of them is an error.
"""

from __future__ import annotations

import json
import logging
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modeling import job_log
from profiles.arguments import Parser, to_arguments
from profiles.files import run_files, state_files
from profiles.resolve import load
from tasks import keys
from tasks.failures import FatalError
from tasks.launchers import Job, JobFailed, create, execute
from tasks.launchers.base import Unavailable
from tasks.step import Context
from tasks.steps.programs import PROGRAM, compile_program, job_name, limits_of
from tasks.store.artifacts import ArtifactId
from tasks.store.store import Store
from tasks.tokenization.worker_pool import CPU_NODES, MAX_JOBS

log = logging.getLogger(__name__)

COUNT_SECONDS = 5.0  # between counts of the programs that are done


def compile_all(context: Context, work: Path, programs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compile the programs in an array, unless the store has all; returns entries in order.

    Raises:
        JobFailed: a job ended without having tried all of its programs, which the message names.
        FatalError: a node has another compiler than the flow's machine.
    """
    ids = [ArtifactId(PROGRAM, keys.graph(context.profile, each["digest"])) for each in programs]
    if all(context.store.artifacts.find_many(ids)):
        return [compile_program(context, work, program, (), lambda: None) for program in programs]  # finds it
    _run(context, work, programs)
    return [_entry(work, program) for program in programs]


def _run(context: Context, work: Path, programs: Sequence[Mapping[str, Any]]) -> None:
    store, cluster = context.store, context.profile.cluster
    order = {"programs": list(programs), "compiler": keys.compiler(context.profile)}
    path = work / f"programs-{keys.digest(order)}.json"  # another array has another command
    state_files.write(path, json.dumps(order))
    count, counted = min(MAX_JOBS, len(programs)), 0.0
    options = to_arguments(work=work, programs=path, of=count, store=store.uri, work_dir=store.work_dir)
    job = Job("compile", "tasks.steps.compile_array", options, work / "logs", array=count)
    changes = {**CPU_NODES, "partition": cluster.shards_partition or cluster.partition}
    launcher = create(cluster.model_copy(update=changes))

    def watch() -> None:
        nonlocal counted
        context.watch()
        if time.monotonic() - counted > COUNT_SECONDS:
            counted = time.monotonic()
            done = sum(state_files.exists(_result(work, each)) for each in programs)
            message = f"compiling in a Slurm array: {done} of {len(programs)} programs"
            context.progress(message, done / len(programs))

    def forget() -> None:
        """Remove the results of an earlier array."""
        for each in programs:
            _result(work, each).unlink(missing_ok=True)

    try:
        execute(launcher, job, watch, grace=0, on_submit=forget)  # compiled programs are in the store
    except JobFailed as failure:
        left = [each["name"] for each in programs if not state_files.exists(_result(work, each))]
        if isinstance(failure, Unavailable) or not left:
            raise
        raise JobFailed(
            f"{failure}; not tried: {', '.join(left)}", failure.detail, failure.exit_code
        ) from failure


def _entry(work: Path, program: Mapping[str, Any]) -> dict[str, Any]:
    """A program's entry, from its job. Raises FatalError if its node has another compiler."""
    entry: dict[str, Any] = json.loads(state_files.contents(_result(work, program)))
    if entry.get("fatal"):
        raise FatalError(f"compile.launcher slurm: {program['name']} was not compiled: {entry['error']}")
    return entry


def _result(work: Path, program: Mapping[str, Any]) -> Path:
    return work / "logs" / f"{job_name(program)}.entry.json"


def _difference(flows: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """What of the compiler differs between the flow's machine and this one; None if nothing."""
    for name in sorted(flows.keys() | here.keys()):
        one, other = (json.loads(json.dumps(each.get(name))) for each in (flows, here))
        if one != other:
            todo = "set cluster.threads" if name == "threads" else "install the same one there, or use local"
            return f"{name} is {other} on {platform.node()}, and {one} where the flow runs; {todo}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="tasks.steps.compile_array", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="the step's folder, with profile.yaml")
    parser.add_argument("--programs", type=Path, required=True, help="JSON file of the programs to compile")
    parser.add_argument("--store", required=True, help="folder or s3:// prefix")
    parser.add_argument("--work-dir", default="store", help="local folder of a store on S3")
    parser.add_argument("--index", type=int, default=0, help="number of this job, from 0")
    parser.add_argument("--of", type=int, default=1, help="number of jobs that share the programs")
    options = parser.parse_args(arguments)
    job_log.configure(sys.stdout)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # `execute` stops its compile
    profile = load(str(options.work / run_files.PROFILE))
    context = Context(profile, Store(options.store, options.work_dir))
    order = json.loads(state_files.contents(options.programs))
    different = _difference(order["compiler"], keys.compiler(profile))
    for program in order["programs"][options.index :: options.of]:
        if different:
            entry = {"status": "not compiled", "error": different, "fatal": True}
        else:
            entry = compile_program(context, options.work, program, limits_of(profile, 1), lambda: None)
        state_files.write(_result(options.work, program), json.dumps(entry))
        log.info(f"{program['name']}: {entry['error'] or entry['status']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
