"""Graphs: traces the run's programs and compiles each distinct one once, on this machine, before the cluster is used.

    modeling.tracing.trace    the profile -> the distinct programs, by digest                 one process
    modeling.tracing.compile  a program -> its part of the compiler's cache                   one process each, several at a time

Each program is an artifact of its own, under a key of its graphs and its compiler: so runs that differ elsewhere share it, of
several tasks at once one compiles it and the others wait, and after a failure or a crash what is done is done. A failed program
is no artifact: its error is recorded in `<run>/graphs.json`, and a retry compiles it again, and it alone. When all are there
they are packed into the run's artifact, a cache folder in one file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil

from modeling.compilation import compilers
from modeling.compilation.graph_cache import CACHE
from modeling.planning import planner
from modeling.tracing.traced_plan import replaced
from profiles.schema import Profile
from tasks import keys
from tasks.launchers import Job, JobFailed, create, execute
from tasks.reporting.format import format_duration
from tasks.store.artifacts import Artifact
from tasks.store.store import Store

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

KIND = "graphs"
PROGRAM = "graph"  # kind of a single program's artifact
RECORD = "graphs.json"
TIMEOUT = 6 * 3600.0  # seconds, of one program
SHARE = 0.9  # of this machine's memory that compiles may take together
SCRATCH = ("locks", "precompiled_headers")  # folders of inductor's cache that only matter where it compiles


class GraphsFailed(RuntimeError):
    """Some graphs failed to compile; the message names them. What did not fail is kept."""


class _Stopped(BaseException):
    """Ends a compile: another failed, or the flow is being cancelled."""


def run(
    profile: Profile,
    store: Store,
    folder: Path,
    key: str,
    progress: Progress = lambda message, fraction: None,
) -> Artifact:
    """Compile the profile's graphs, once for all runs that share them.

    Args:
        progress: called with what is being done and the share of the programs that are compiled, 0 to 1.

    The artifact's summary: total, successful, failed and from_cache, in graphs; seconds; programs, each with its graphs, status,
    seconds and peak_bytes; traced, the figures of the trace; note, where there is something to know.

    Raises:
        GraphsFailed: naming each program that failed and why.
        ProfileError: by the traced figures it does not fit a device.
    """
    with store.artifacts.lock(KIND, key):
        found = store.artifacts.find(KIND, key)
        if found:
            return found
        lacks = compilers.missing_requirement(profile)
        if lacks:
            here = profile.cluster.device == "cpu"  # elsewhere training meets another machine
            note = f"{lacks} on this machine: training {'runs eager' if here else 'compiles as it goes'}"
            log.warning("%s", note)
            with store.artifacts.publish(KIND, key, {**summarize([], 0.0), "note": note}):
                pass
        else:
            _ahead(profile, store, folder, key, progress)
    return store.artifacts.expect(KIND, key)


def _ahead(profile: Profile, store: Store, folder: Path, key: str, progress: Progress) -> None:
    begun = time.monotonic()
    progress("tracing the programs of the run", 0.0)
    traced = _trace(profile, folder)
    # Before hours of compiling: what the estimates let pass and the traced figures do not is refused here.
    planner.require_fit(profile, replaced(profile, planner.plan(profile), traced))
    entries = _compile_all(profile, store, folder, traced["programs"], progress)
    summary = {**summarize(entries, time.monotonic() - begun), "traced": traced}
    _record(summary, folder)
    with store.artifacts.publish(KIND, key, summary) as staging, tarfile.open(staging / CACHE, "w") as tar:
        for entry in entries:
            part = store.artifacts.path(store.artifacts.expect(PROGRAM, entry["key"]))
            with tarfile.open(part / CACHE) as own:
                for member in own:
                    tar.addfile(member, own.extractfile(member))


def _record(summary: dict[str, Any], folder: Path) -> None:
    """Say and write down what became of the graphs; GraphsFailed where some failed."""
    (folder / RECORD).write_text(json.dumps(summary, indent=1))
    say(summary)
    failed = [entry for entry in summary["programs"] if entry["error"]]
    if failed:
        raise GraphsFailed("; ".join(f"{entry['name']}: {entry['error']}" for entry in failed))


def _trace(profile: Profile, folder: Path) -> dict[str, Any]:
    output = folder / "logs" / "trace.json"
    arguments = ("--run-folder", str(folder), "--output", str(output))
    job = Job("trace", "modeling.tracing.trace", arguments, folder / "logs", threads=profile.cluster.threads)
    execute(create("local"), job, timeout=TIMEOUT)
    return json.loads(output.read_text())


def _compile_all(
    profile: Profile,
    store: Store,
    folder: Path,
    programs: Sequence[Mapping[str, Any]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """An entry a program, in their order; whatever ends this early ends the compiles too."""
    cores = os.cpu_count() or 1
    workers = min(len(programs), profile.compile.processes or cores)
    memory = int(
        profile.compile.memory_gib * 2**30
        if profile.compile.memory_gib
        else SHARE * psutil.virtual_memory().total / workers
    )
    limits = ("--memory", str(memory), "--jobs", str(max(1, cores // workers)))
    stop = threading.Event()

    def watch() -> None:
        if stop.is_set():
            raise _Stopped

    with ThreadPoolExecutor(workers) as pool:
        waiting = [
            pool.submit(_compile, profile, store, folder, program, limits, watch) for program in programs
        ]
        try:
            done = -1
            while done < len(waiting):  # in short waits, between which a cancellation can come
                before, done = done, len(wait(waiting, timeout=0.2).done)
                if done > before:  # compiles can take hours, and a line goes into a log
                    progress(f"compiling: {done} of {len(waiting)} programs", done / len(waiting))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in waiting]


def _compile(
    profile: Profile,
    store: Store,
    folder: Path,
    program: Mapping[str, Any],
    limits: Sequence[str],
    watch: Any,
) -> dict[str, Any]:
    """Compile a program unless the store has it; its entry."""
    key = keys.graph(profile, program["digest"])
    entry = {"name": program["name"], "key": key, "graphs": len(program["graphs"]), "error": None}
    with store.artifacts.lock(PROGRAM, key):
        found = store.artifacts.find(PROGRAM, key)
        if found:
            return {**entry, **found.summary, "status": "from cache"}
        watch()
        log.info("compiling %s", program["name"])
        logs = folder / "logs"
        name = f"compile-{re.sub('[^a-z]+', '-', program['name'])}"
        result = logs / f"{name}.json"
        result.unlink(missing_ok=True)
        facts: dict[str, Any] = {}
        try:
            with store.artifacts.publish(PROGRAM, key, facts) as staging:
                cache = staging / "cache"
                arguments = (
                    *("--run-folder", str(folder), "--stage", str(program["stage"])),
                    *("--program", program["name"], "--digest", program["digest"]),
                    *("--cache", str(cache), "--result", str(result), *limits),
                )
                job = Job(name, "modeling.tracing.compile", arguments, logs, threads=profile.cluster.threads)
                execute(create("local"), job, watch, timeout=TIMEOUT)
                facts.update(_facts(result))
                _pack(cache, staging / CACHE)
        except (JobFailed, TimeoutError) as error:
            told = json.loads(result.read_text())["error"] if result.exists() else str(error)
            return {**entry, **_facts(result), "status": "failed", "error": told}
    return {**entry, **facts, "status": "compiled"}


def _facts(result: Path) -> dict[str, Any]:
    if not result.exists():
        return {"seconds": None, "peak_bytes": None}
    written = json.loads(result.read_text())
    return {name: written[name] for name in ("seconds", "peak_bytes")}


def _pack(cache: Path, target: Path) -> None:
    """Move a cache folder into one file, what is of no use elsewhere left out."""
    with tarfile.open(target, "w") as tar:
        for path in sorted(cache.rglob("*")):
            name = path.relative_to(cache)
            if path.is_file() and name.parts[0] not in SCRATCH and path.suffix not in (".lock", ".gch"):
                tar.add(path, arcname=str(name))
    shutil.rmtree(cache)


def summarize(entries: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """What became of all graphs, as users of these systems know it."""

    def count(*status: str) -> int:
        return sum(entry["graphs"] for entry in entries if entry["status"] in status)

    total, failed = sum(entry["graphs"] for entry in entries), count("failed")
    return {
        "total": total,
        "successful": total - failed,
        "failed": failed,
        "from_cache": count("from cache"),
        "seconds": seconds,
        "programs": list(entries),
    }


def say(summary: Mapping[str, Any]) -> None:
    """The summary in the log: a line a program, and one for all."""
    for entry in summary["programs"]:
        log.info("%s", line(entry))
        if entry["error"]:
            log.error("%s", entry["error"])
    log.info("%s", sentence(summary))


def line(entry: Mapping[str, Any]) -> str:
    """A program's entry in words."""
    took = ""
    if entry["seconds"] is not None:
        took = f", {format_duration(entry['seconds'])}"
    if entry["peak_bytes"] is not None:
        took += f", {entry['peak_bytes'] / 2**20:.0f} MiB"
    return f"{entry['name']}: {counted(entry['graphs'])}, {entry['status']}{took}"


def counted(graphs: int) -> str:
    return f"{graphs} graph{'' if graphs == 1 else 's'}"


def sentence(summary: Mapping[str, Any]) -> str:
    """All of it in words; the slowest named."""
    timed = [entry for entry in summary["programs"] if entry["status"] == "compiled"]
    slowest = max(timed, key=lambda entry: entry["seconds"], default=None)
    named = f"; slowest: {slowest['name']}, {format_duration(slowest['seconds'])}" if slowest else ""
    return (
        f"graphs: {summary['total']} in all, {summary['successful']} successful, {summary['failed']} failed, "
        f"{summary['from_cache']} from cache{named}"
    )
