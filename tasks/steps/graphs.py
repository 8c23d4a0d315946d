"""Graphs step: traces the run's programs and compiles each distinct one ahead of time, locally.

    modeling.tracing.trace    profile -> the distinct programs, by digest                 one process
    modeling.tracing.compile  program -> its part of the compiler's cache                 a process each, several at a time

With `compile.enabled: auto` on a CPU, modeling.tracing.trial first measures whether compiling pays over the run's length.
Needs only the profile, so it runs beside the tokenizer and dataset steps. Each program is a separate artifact, keyed by its
graphs and its compiler: runs that differ elsewhere share it, concurrent flows compile it once, and a retry compiles only what
failed. The run's artifact packs the caches of all its programs into one file.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from modeling.compilation import compilers, manifest, toolchain
from modeling.compilation.graph_cache import CACHE
from modeling.cores import usable_cores, usable_memory
from modeling.planning import planner
from modeling.tracing.traced_plan import apply_trace
from profiles import resolve
from profiles.check import with_value
from profiles.recompute import AUTO
from profiles.schema import Profile
from tasks import keys
from tasks.launchers import Job, JobFailed, Launcher, execute
from tasks.launchers.local import LocalLauncher
from tasks.reporting.format import format_bytes, format_duration
from tasks.step import Context, Step
from tasks.store import runs
from tasks.store.artifacts import Artifact, ArtifactId

log = logging.getLogger(__name__)

PROGRAM = "graph"  # artifact kind of a single program
TIMEOUT = 6 * 3600.0  # seconds, of one program
MEMORY_FRACTION = 0.9  # of this machine's memory that all compiles together may use
PREPARED = "prepared"  # folder that each program's cache starts from
SAVES = 0.25  # of an eager run's time at most, if it is compiled for a CPU
LOCAL_ONLY = ("locks", "precompiled_headers")  # folders of inductor's cache, useless on other machines


class GraphsFailed(RuntimeError):
    """Some graphs failed to compile; the message names them. The others are kept."""


class _Stopped(BaseException):
    """Ends a compile because the step was interrupted."""


class GraphsStep(Step):
    """Compiles the profile's graphs, once for all runs that share them.

    The artifact's summary: total, successful, failed and from_cache, in graphs; seconds; programs, each with its graphs, status,
    seconds and peak_bytes; traced, the trace's statistics. If the run's graphs were not compiled: note, the reason; eager,
    whether training must not compile them either.
    """

    kind = "graphs"
    name = "graphs"

    def title(self, profile: Profile) -> str:
        return f"graphs of {profile.name}"

    def skip_reason(self, profile: Profile) -> str | None:
        return None if profile.compile.possible else "training runs in eager mode"

    def key(self, context: Context) -> str:
        """Of the graphs or, if a trial decides whether to compile them, of its decision."""
        return (keys.trial if decides(context.profile) else keys.graphs)(context.profile)

    def make(self, context: Context, key: str) -> Artifact:
        """Trace and compile, unless a trial shows that it does not pay.

        Raises:
            GraphsFailed: names each program that failed, and why.
            ProfileError: the traced memory does not fit a device.
        """
        store, profile = context.store, context.profile
        if super().find(context, key):  # without graphs, see `find`
            store.artifacts.remove(self.id(key))
        compiler = compilers.make_compiler(profile)
        if lacks := compiler.missing_requirement(ahead_of_time=True):
            return self._publish_none(context, key, lacks)
        begun = time.monotonic()
        work = store.scratch_folder(f"{self.kind}-{key}")
        if fault := compiler.fault(work / PREPARED):
            return self._publish_none(context, key, fault, test_again=True)
        (work / "profile.yaml").write_text(resolve.dump(profile))
        (work / PREPARED).mkdir(exist_ok=True)
        if decides(profile):
            if summary := _trial(context, work):
                return self._publish(context, key, summary)
            store.remove_scratch_folder(f"{self.kind}-{key}")
            return self.run(replace(context, profile=with_value(profile, "compile.enabled", True)))
        runs.record_flow_run(work, context.flow_run)
        context.progress("tracing the programs of the run", None)
        try:
            traced = _trace(profile, work)
        except JobFailed as error:
            if not compiler.missing_device():
                raise
            return self._publish_none(
                context, key, f"tracing without a device failed ({error})", test_again=True
            )
        # Traced memory is more accurate than the plan: reject what does not fit before hours of compiling.
        planner.require_fit(profile, apply_trace(profile, planner.plan(profile), traced))
        entries = _compile_all(context, work, traced["programs"])
        summary = {**summarize(entries, time.monotonic() - begun), "traced": traced}
        _show(context, summary)
        if failed := [entry for entry in entries if entry["error"]]:
            faults = [fault for entry in failed if (fault := toolchain.of_machine(entry["error"]))]
            all_of_machine = profile.cluster.device == "cpu" and len(faults) == len(failed)
            if all_of_machine and profile.compile.memory_gib is None:
                return self._publish_none(context, key, faults[0], test_again=True)
            if compiler.missing_device():  # nodes have one, and compile on first use
                reason = f"compiling without a device failed ({failed[0]['name']}: {failed[0]['error']})"
                return self._publish_none(context, key, reason, test_again=True)
            raise GraphsFailed("; ".join(f"{entry['name']}: {entry['error']}" for entry in failed))
        with store.artifacts.publish(self.id(key), summary) as staging:
            _pack_all(context, entries, staging / CACHE)
            shutil.move(work / "logs" / manifest.FILE, staging / manifest.FILE)
            shutil.copytree(work / "logs", staging / "logs")
        store.remove_scratch_folder(f"{self.kind}-{key}")
        return store.artifacts.expect(self.id(key))

    def find(self, context: Context, key: str) -> Artifact | None:
        """The artifact of this key; None if it has no graphs for a reason that may have passed."""
        found = super().find(context, key)
        if decides(context.profile):  # graphs that another run has compiled cost nothing
            found = super().find(context, keys.graphs(context.profile)) or found
        return None if found and found.summary.get("test_again") else found

    def _publish_none(self, context: Context, key: str, reason: str, *, test_again: bool = False) -> Artifact:
        """Publish an artifact without graphs.

        Args:
            reason: what this machine lacks for compiling, as a phrase.
            test_again: whether the key does not depend on it, so that the next run tests again.
        """
        # On devices other than the CPU, training runs on another machine, which may have the compiler.
        eager = context.profile.cluster.device == "cpu"
        note = f"{reason} on this machine: training {'runs in eager mode' if eager else 'compiles graphs on first use'}"
        summary = {**summarize([], 0.0), "note": note, "eager": eager, "test_again": test_again}
        return self._publish(context, key, summary)

    def _publish(self, context: Context, key: str, summary: Mapping[str, Any]) -> Artifact:
        """Publish an artifact that is only a summary."""
        with context.store.artifacts.publish(self.id(key), summary):
            pass
        context.store.remove_scratch_folder(f"{self.kind}-{key}")
        return context.store.artifacts.expect(self.id(key))

    def describe(self, summary: Mapping[str, Any]) -> str:
        return summary.get("note") or format_graphs(summary["total"])


def decides(profile: Profile) -> bool:
    """Whether a trial decides if the run's graphs are compiled."""
    return (
        profile.compile.enabled == AUTO
        and profile.cluster.device == "cpu"
        and profile.train.steps is not None
    )


def _trial(context: Context, work: Path) -> dict[str, Any] | None:
    """Compile a small graph. The summary of a run that trains eagerly, None if compiling all graphs pays."""
    context.progress("measuring whether compiling pays", None)
    output = work / "logs" / "trial.json"
    arguments = ("--run-folder", str(work), "--cache", str(work / PREPARED), "--output", str(output))
    job = Job("trial", "modeling.tracing.trial", arguments, work / "logs", threads=1)
    try:
        execute(_launcher(context.profile, work / PREPARED), job, timeout=TIMEOUT)
    except (JobFailed, TimeoutError) as error:
        note = f"{_reason(error)}: training runs in eager mode"
        return {**summarize([], 0.0), "note": note, "eager": True, "test_again": True}
    trial = json.loads(output.read_text())
    saved = SAVES * trial["training"]
    if trial["compiling"] < saved:
        return None
    entry = {"name": "activation", "graphs": 1, "status": "compiled", "seconds": trial["seconds"]}
    needed, saves = format_duration(trial["compiling"]), format_duration(saved)
    note = (
        f"1 graph as a trial; all would take {needed} of CPU to compile and save at most {saves}: eager mode"
    )
    return {**summarize([{**entry, "peak_bytes": None}], trial["seconds"]), "note": note, "eager": True}


def _reason(error: JobFailed | TimeoutError) -> str:
    """Why a trial failed, as a phrase; its log is removed with its work folder."""
    lines = [line for line in getattr(error, "detail", "").splitlines() if line.strip()]
    phrase = toolchain.of_machine("\n".join([str(error), *lines]))
    raised = (line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception)\b", line))
    reason = next(raised, str(error).partition("; log: ")[0])[:200]
    return phrase or f"a trial of the compiler failed ({reason})"


def _trace(profile: Profile, work: Path) -> dict[str, Any]:
    output = work / "logs" / "trace.json"
    arguments = ("--run-folder", str(work), "--output", str(output), "--cache", str(work / PREPARED))
    job = Job("trace", "modeling.tracing.trace", arguments, work / "logs", threads=profile.cluster.threads)
    execute(_launcher(profile, work / PREPARED), job, timeout=TIMEOUT)
    traced: dict[str, Any] = json.loads(output.read_text())
    return traced


def _launcher(profile: Profile, cache: Path) -> Launcher:
    """Starts a job on this machine that traces or compiles into a cache, and does not use a device."""
    return LocalLauncher(compilers.make_compiler(profile).environment(cache, ahead_of_time=True))


def _compile_all(context: Context, work: Path, programs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compile the programs concurrently; returns entries in order. An exception stops all compiles."""
    settings, cores = context.profile.compile, usable_cores()
    workers = min(len(programs), settings.processes or cores)
    share = MEMORY_FRACTION * usable_memory() / workers
    memory = int(settings.memory_gib * 2**30 if settings.memory_gib else share)
    limits = ("--memory", str(memory), "--jobs", str(max(1, cores // workers)))
    stop = threading.Event()

    def watch() -> None:
        if stop.is_set():
            raise _Stopped

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_compile, context, work, program, limits, watch) for program in programs]
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


def job_name(program: Mapping[str, Any]) -> str:
    """Name of a compile job, with the digest: programs of different kinds of layers may share a name.

    Two jobs of one name would replace each other.
    """
    return f"compile-{re.sub('[^a-z]+', '-', program['name'])}-{program['digest'][:8]}"


def _compile(
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
                    *("--program", program["name"], "--digest", program["digest"]),
                    *("--cache", str(cache), "--result", str(result), *limits),
                )
                job = Job(name, "modeling.tracing.compile", arguments, work / "logs", threads=threads)
                launcher = _launcher(context.profile, cache)
                execute(launcher, job, watch, timeout=TIMEOUT)
                summary.update(_cost(result))
                _pack(cache, staging / CACHE)
        except (JobFailed, TimeoutError) as error:
            reason = json.loads(result.read_text())["error"] if result.exists() else str(error)
            return {**entry, **_cost(result), "status": "failed", "error": reason}
    return {**entry, **summary, "status": "compiled"}


def _cost(result: Path) -> dict[str, Any]:
    if not result.exists():
        return {"seconds": None, "peak_bytes": None}
    written = json.loads(result.read_text())
    return {name: written[name] for name in ("seconds", "peak_bytes")}


def _pack(cache: Path, target: Path) -> None:
    """Pack a cache folder into one file, without what is useless on other machines, and remove the folder."""
    with tarfile.open(target, "w") as tar:
        for path in sorted(cache.rglob("*")):
            name = path.relative_to(cache)
            if path.is_file() and name.parts[0] not in LOCAL_ONLY and path.suffix not in (".lock", ".gch"):
                tar.add(path, arcname=str(name))
    shutil.rmtree(cache)


def _pack_all(context: Context, entries: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Join the packed caches of all programs."""
    with tarfile.open(target, "w") as tar:
        for entry in entries:
            artifact = context.store.artifacts.expect(ArtifactId(PROGRAM, entry["key"]))
            with tarfile.open(context.store.artifacts.path(artifact) / CACHE) as part:
                for member in part:
                    tar.addfile(member, part.extractfile(member))


def summarize(entries: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """Counts of graphs, under the names that neuron_parallel_compile prints."""

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


def _show(context: Context, summary: Mapping[str, Any]) -> None:
    """Log a line per program and a summary line, and show the programs as a table."""
    for entry in summary["programs"]:
        log.info("%s", format_program(entry))
        if entry["error"]:
            log.error("%s", entry["error"])
    log.info("%s", format_summary(summary))
    rows = [
        {
            "program": entry["name"],
            "graphs": entry["graphs"],
            "status": entry["status"],
            "time": None if entry["seconds"] is None else format_duration(entry["seconds"]),
            "memory": None if entry["peak_bytes"] is None else format_bytes(entry["peak_bytes"]),
            "error": entry["error"],
        }
        for entry in summary["programs"]
    ]
    context.table("graphs", format_summary(summary), rows)


def format_program(entry: Mapping[str, Any]) -> str:
    """A program's entry in one line: graphs, status, time and memory."""
    time = "" if entry["seconds"] is None else f", {format_duration(entry['seconds'])}"
    memory = "" if entry["peak_bytes"] is None else f", {format_bytes(entry['peak_bytes'])}"
    return f"{entry['name']}: {format_graphs(entry['graphs'])}, {entry['status']}{time}{memory}"


def format_graphs(graphs: int) -> str:
    return f"{graphs} graph{'' if graphs == 1 else 's'}"


def format_summary(summary: Mapping[str, Any]) -> str:
    """The counts of all programs in one line, with the slowest program."""
    timed = [entry for entry in summary["programs"] if entry["status"] == "compiled"]
    slowest = max(timed, key=lambda entry: entry["seconds"], default=None)
    named = f"; slowest: {slowest['name']}, {format_duration(slowest['seconds'])}" if slowest else ""
    return (
        f"{format_graphs(summary['total'])}: {summary['successful']} successful, {summary['failed']} failed, "
        f"{summary['from_cache']} cached{named}"
    )
