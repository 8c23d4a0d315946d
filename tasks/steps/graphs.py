"""Graphs step: traces the run's programs and compiles each distinct one ahead of time.

    modeling.tracing.trace    profile -> the distinct programs, by digest                 one process
    modeling.tracing.compile  program -> its part of the compiler's cache                 a process each (programs.py), several at
                              a time on this machine or in a Slurm array (compile_array.py)

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
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modeling.compilation import compilers, manifest, toolchain
from modeling.compilation.graph_cache import CACHE
from modeling.planning import planner
from modeling.tracing.traced_plan import apply_trace
from profiles import resolve
from profiles.arguments import to_arguments
from profiles.check import with_value
from profiles.errors import counted
from profiles.files import run_files, state_files
from profiles.recompute import AUTO
from profiles.schema import Profile
from tasks import keys
from tasks.launchers import Job, JobFailed, execute
from tasks.reporting.format import format_bytes, format_duration
from tasks.step import Context, Step
from tasks.steps import compile_array, programs
from tasks.steps.programs import PREPARED, TIMEOUT, launcher, pack_all
from tasks.store import runs
from tasks.store.artifacts import Artifact

log = logging.getLogger(__name__)

PREPARING = "preparing"  # folder that becomes PREPARED
SAVES = 0.25  # of an eager run's time at most, if it is compiled for a CPU


class GraphsFailed(RuntimeError):
    """Some graphs failed to compile; the message names them. The others are kept."""


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
        if fault := compiler.fault(work):
            return self._publish_none(context, key, fault, test_again=True)
        state_files.write(work / run_files.PROFILE, resolve.dump(profile))
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
        compile_all = compile_array if profile.compile.launcher == "slurm" else programs
        entries = compile_all.compile_all(context, work, traced["programs"])
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
            pack_all(context, entries, staging / CACHE)
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
        return summary.get("note") or counted(summary["total"], "graph")


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
    state_files.make_folder(work / PREPARED)
    arguments = to_arguments(run_folder=work, cache=work / PREPARED, output=output)
    job = Job("trial", "modeling.tracing.trial", arguments, work / "logs", threads=1)
    try:
        execute(launcher(context.profile, work / PREPARED), job, timeout=TIMEOUT)
    except (JobFailed, TimeoutError) as error:
        note = f"{_reason(error)}: training runs in eager mode"
        return {**summarize([], 0.0), "note": note, "eager": True, "test_again": True}
    trial = json.loads(state_files.contents(output))
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
    # A job array of an earlier flow may still copy what is prepared, so it does not change once it is there.
    prepared, cache = work / PREPARED, work / PREPARING
    state_files.make_folder(cache)
    output = work / "logs" / "trace.json"
    is_prepared = state_files.exists(prepared)
    arguments = to_arguments(run_folder=work, output=output, cache=None if is_prepared else cache)
    job = Job("trace", "modeling.tracing.trace", arguments, work / "logs", threads=profile.cluster.threads)
    execute(launcher(profile, cache), job, timeout=TIMEOUT)
    if state_files.exists(prepared):
        shutil.rmtree(cache)
    else:
        cache.rename(prepared)
    traced: dict[str, Any] = json.loads(state_files.contents(output))
    return traced


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
    return f"{entry['name']}: {counted(entry['graphs'], 'graph')}, {entry['status']}{time}{memory}"


def format_summary(summary: Mapping[str, Any]) -> str:
    """The counts of all programs in one line, with the slowest program."""
    timed = [entry for entry in summary["programs"] if entry["status"] == "compiled"]
    slowest = max(timed, key=lambda entry: entry["seconds"], default=None)
    named = f"; slowest: {slowest['name']}, {format_duration(slowest['seconds'])}" if slowest else ""
    return (
        f"{counted(summary['total'], 'graph')}: {summary['successful']} successful, {summary['failed']} failed, "
        f"{summary['from_cache']} cached{named}"
    )
