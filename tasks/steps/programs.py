"""Programs of a run: each is compiled in its own process, once for all runs of a store.

A program is an artifact, keyed by its graphs and its compiler: concurrent flows, and the jobs of a Slurm array
(`compile_array.py`), compile it once.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from modeling.compilation import compilers
from modeling.compilation.graph_cache import CACHE
from modeling.cores import allotted_cores, allotted_memory
from profiles.files import state_files
from profiles.files.folders import walk
from profiles.schema import Profile
from tasks import keys
from tasks.launchers import Job, JobFailed, Launcher, execute
from tasks.launchers.local import LocalLauncher
from tasks.step import Context
from tasks.store.artifacts import ArtifactId

log = logging.getLogger(__name__)

PROGRAM = "graph"  # artifact kind of a single program
TIMEOUT = 6 * 3600.0  # seconds, of one program
GRACE = 5.0  # seconds to end, of a compile that is stopped: within Slurm's KillWait, and it saves nothing
MEMORY_FRACTION = 0.9  # of this machine's memory, or of the Slurm job's, that all compiles together may use
PREPARED = "prepared"  # folder that each program's cache starts from
LOCAL_ONLY = ("locks", "precompiled_headers")  # folders of inductor's cache, useless on other machines


class _Stopped(BaseException):
    """Ends a compile because the step was interrupted."""


def launcher(profile: Profile, cache: Path) -> Launcher:
    """Starts a job on this machine that traces or compiles into a cache, and does not use a device."""
    return LocalLauncher(fixed=compilers.make_compiler(profile).environment(cache, ahead_of_time=True))


def compile_all(context: Context, work: Path, programs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compile the programs concurrently; returns entries in order. An exception stops all compiles."""
    workers = min(len(programs), context.profile.compile.processes or allotted_cores())
    limits, stop = limits_of(context.profile, workers), threading.Event()

    def watch() -> None:
        if stop.is_set():
            raise _Stopped

    with ThreadPoolExecutor(workers) as pool:
        futures = [
            pool.submit(compile_program, context, work, program, limits, watch) for program in programs
        ]
        try:
            done = -1
            while done < len(futures):  # short waits, between which an interruption is noticed
                before, done = done, len(wait(futures, timeout=0.2).done)
                if done > before:
                    context.progress(f"compiling: {done} of {len(futures)} programs", done / len(futures))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def limits_of(profile: Profile, workers: int) -> tuple[str, ...]:
    """Options that limit one of so many compiles on this machine: its memory, and its own processes."""
    given = profile.compile.memory_gib
    memory = given * 2**30 if given else MEMORY_FRACTION * allotted_memory() / workers
    return "--memory", str(int(memory)), "--jobs", str(max(1, allotted_cores() // workers))


def job_name(program: Mapping[str, Any]) -> str:
    """Name of a compile job, with the digest: programs of different kinds of layers may share a name.

    Two jobs of one name would replace each other.
    """
    return f"compile-{re.sub('[^a-z]+', '-', program['name'])}-{program['digest'][:8]}"


def compile_program(
    context: Context, work: Path, program: Mapping[str, Any], limits: Sequence[str], watch: Callable[[], None]
) -> dict[str, Any]:
    """Compile a program unless the store has it; returns its entry."""
    store, threads = context.store, context.profile.cluster.threads
    key = keys.graph(context.profile, program["digest"])
    entry = {"name": program["name"], "key": key, "graphs": len(program["graphs"]), "error": None}
    id = ArtifactId(PROGRAM, key)
    with store.artifacts.lock(id, watch):
        if found := store.artifacts.find(id):
            return {**entry, **found.summary, "status": "from cache"}
        watch()
        log.info("compiling %s", program["name"])
        name = job_name(program)
        result = work / "logs" / f"{name}.json"
        result.unlink(missing_ok=True)
        summary: dict[str, Any] = {}
        try:
            with store.artifacts.publish(id, summary) as staging:
                cache = staging / "cache"
                shutil.copytree(work / PREPARED, cache)
                arguments = (
                    *("--run-folder", str(work), "--stage", str(program["stage"])),
                    *("--program", program["name"], "--regions", *program["regions"]),
                    *("--cache", str(cache), "--result", str(result), *limits),
                )
                job = Job(name, "modeling.tracing.compile", arguments, work / "logs", threads=threads)
                execute(launcher(context.profile, cache), job, watch, timeout=TIMEOUT, grace=GRACE)
                summary.update(_cost(result))
                _pack(cache, staging / CACHE)
        except (JobFailed, TimeoutError) as error:
            written = json.loads(state_files.contents(result)) if state_files.exists(result) else {}
            reason = written.get("error", str(error))
            return {**entry, **_cost(result), "status": "failed", "error": reason}
    return {**entry, **summary, "status": "compiled"}


def _cost(result: Path) -> dict[str, Any]:
    if not state_files.exists(result):
        return {"seconds": None, "peak_bytes": None}
    written = json.loads(state_files.contents(result))
    return {name: written[name] for name in ("seconds", "peak_bytes")}


def _pack(cache: Path, target: Path) -> None:
    """Pack a cache folder into one file, without what is useless on other machines, and remove the folder."""
    with tarfile.open(target, "w") as tar:
        for name in sorted(name for name, _ in walk(cache)):
            path, is_local = cache / name, name.partition("/")[0] in LOCAL_ONLY
            if not is_local and path.suffix not in (".lock", ".gch") and state_files.is_file(path):
                tar.add(path, arcname=name)
    shutil.rmtree(cache)


def pack_all(context: Context, entries: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Join the packed caches of all programs."""
    with tarfile.open(target, "w") as tar:
        for entry in entries:
            artifact = context.store.artifacts.expect(ArtifactId(PROGRAM, entry["key"]))
            with tarfile.open(context.store.artifacts.path(artifact) / CACHE) as part:
                for member in part:
                    tar.addfile(member, part.extractfile(member))
