"""Jobs of steps on the profile's cluster, and their log lines in the flow's log."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from modeling import job_log
from profiles.arguments import to_arguments
from profiles.files import run_files, state_files
from profiles.files.jsonl import LogFollower, size_of
from profiles.schema import Profile
from tasks import failures
from tasks.launchers import Job, JobFailed, create, execute
from tasks.launchers.causes import START
from tasks.step import Context
from tasks.store.artifacts import Artifact

TIMEOUT = 6 * 3600.0  # seconds, of a job that writes one file
# torch looks up the name of this machine's address only for its own messages; without a network there is none.
HARMLESS = re.compile(
    r"^\[W\S* \S+ socket\.cpp:\d+\] \[c10d\] The hostname of the client socket cannot be retrieved"
)
# The message that a rank logs before the traceback of the error that ends it (exit_codes.code_of, call_on_leader).
FAILURE = re.compile(r"(?:rank 0 )?failed|rejected|out of memory")
TRACEBACK = "Traceback (most recent call last)"
log = logging.getLogger(__name__)


class JobOptions(TypedDict, total=False):
    """Arguments of modules in modeling/training; each has some. An artifact stands for its path."""

    weights: Artifact | Path | None
    adapters: Path | None
    keep_optimizer: bool
    checkpoints: Path  # in place of the run's
    reference: Artifact | None
    output: Path
    profile: Path | None
    step: int
    sets: bool
    first: int
    count: int


def cluster_job(
    module: str,
    context: Context,
    key: str,
    dataset: Artifact,
    graphs: Artifact | None,
    **options: Unpack[JobOptions],
) -> Job:
    """Job that runs `modeling.training.<module>` on every device of the profile's cluster."""
    path = context.store.artifacts.path
    given = {name: path(each) if isinstance(each, Artifact) else each for name, each in options.items()}
    location = path(dataset, with_required=False)
    return _job(module, context, key, dataset=location, graphs=graphs and path(graphs), **given)


def training_job(context: Context) -> Job:
    """The job of the step train before its inputs exist, in whose places it has their names in capitals."""
    profile, folder = context.profile, context.run_folder
    job = _job(
        *("train", context, ""),
        dataset="DATASET",
        graphs="GRAPHS" if profile.compile.possible else None,
        weights="WEIGHTS" if profile.init.from_ else None,
        reference="REFERENCE" if profile.precomputes_reference else None,
    )
    return replace(job, attempt_file=folder / run_files.ATTEMPT)


def _job(module: str, context: Context, key: str, *, dataset: object, **options: object) -> Job:
    store, folder, cluster = context.store, context.run_folder, context.profile.cluster
    if store.is_remote:
        places = {
            "artifacts": store.artifacts.remote_uri,
            "checkpoints": store.run_folder(folder.name).checkpoints_location,
        }
        options = places | options  # in this order: a restarted flow finds its job by the ordered arguments
    cache = store.work_dir / "cache"
    return Job(
        name=module,
        program=f"modeling.training.{module}",
        arguments=to_arguments(run_folder=folder, cache=cache, dataset=dataset, **options),
        folder=folder / run_files.LOGS,
        nodes=cluster.nodes,
        processes=cluster.devices_per_node,
        threads=cluster.threads,
        key=key,
        run=folder.name,
    )


def run_json_job(profile: Profile, job: Job, output: Path) -> dict[str, Any]:
    """As `run_job`; returns the file's JSON object, which a job may have left that no flow followed."""
    if (found := state_files.read_json(output)) is not None:
        return found
    run_job(profile, job, output)
    return state_files.require_json(state_files.read(output) or b"", output)


def run_job(profile: Profile, job: Job, output: Path) -> None:
    """Run a job that writes a file. Raises JobFailed, FatalError or TimeoutError."""
    forwarder = LogForwarder(job.log_file)
    launcher = create(profile.cluster)
    # A cluster's queue may take any time, and it enforces its time limits itself.
    timeout = TIMEOUT if profile.cluster.launcher == "local" else None
    try:
        execute(launcher, job, forwarder.forward, timeout=timeout, grace=0)  # there is nothing to save
    except JobFailed as failure:
        raise failures.explain(profile, failure) from failure
    if not state_files.exists(output):
        raise JobFailed(f"{job.name} ended without a result; its log: {job.log_file}")


class LogForwarder:
    """Forwards rank 0's log to the flow's, except HARMLESS lines, step lines and the error that ends it.

    That error is the last that a rank writes, and the failed job's error has its last lines.
    """

    BURST = 10  # lines at once; then one per second, and the others stay in the job's log only

    def __init__(self, log_file: Path) -> None:
        self._follower = LogFollower(log_file, start=size_of(log_file))
        self._credit = float(self.BURST)
        self._asked = time.monotonic()
        self._failed = False
        self._held = ""  # a line that may begin the error

    def forward(self) -> None:
        """Forward new lines; call it several times a second."""
        now = time.monotonic()
        self._credit = min(self.BURST, self._credit + now - self._asked)
        self._asked = now
        for line in self._follower.lines():
            text = line.removeprefix("[rank 0] ")
            if text == line:
                self._failed = self._failed and not START.match(line)
                continue
            held, self._held = self._held, ""
            self._failed = self._failed or (held != "" and text.startswith(TRACEBACK))
            if self._failed:
                continue
            if held:  # a user's code prints such lines, too
                self._forward(held)
            if FAILURE.fullmatch(text):
                self._held = text
            else:
                self._forward(text)

    def _forward(self, text: str) -> None:
        if not text.startswith("step ") and not HARMLESS.search(text):
            if text.startswith(job_log.WARNING) or "Warning: " in text:  # ours, or one of Python's
                log.warning("%s", text)
            elif self._credit >= 1:
                self._credit -= 1
                log.info("%s", text)
