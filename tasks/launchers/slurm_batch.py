"""Slurm's batch script of a job, from slurm_batch.sh.jinja: one torchrun per node under srun.

It can be read and submitted by hand.

The script handles everything itself, since no orchestrator need be alive while the job runs:

    attempt     number in a file of the run, incremented at each start; fences earlier attempts that are still running
    USR1        time limit near, or preemption: the ranks save a checkpoint and the job is requeued
    USR2        stop requested: the ranks save a checkpoint and the job ends
                (a job without an attempt file saves nothing: it gets no USR1 and ends at once on USR2)
    record      <name>.exit.json, written once the ranks have ended: their exit code, or null if Slurm kills or requeues the job
                (the queue shows which); missing if the script itself was killed or its node failed

Values are quoted for bash. #SBATCH options are parsed by Slurm, with its own quoting; none holds a path, since the script is
submitted from the log's folder and changes to the job's folder itself.
"""

from __future__ import annotations

import hashlib
import signal
import sys
from contextlib import suppress
from pathlib import Path
from shlex import quote

from parallel import device as devices
from profiles.errors import counted
from profiles.files import exit_codes, state_files
from profiles.files.retry_policies import REQUEUE
from profiles.schema import Cluster
from tasks.launchers import environment
from tasks.launchers.base import START, TORCHRUN, Job
from tasks.launchers.causes import LOG_TAIL

MAX_NAME_LENGTH = 60
PREVIEW = "preview"  # in place of a submission's identifier: of a script that is only shown
# For which a requeue is retried while the controller does not answer.
REQUEUE_SECONDS = round(REQUEUE.seconds)
REQUEUE_PAUSE = round(REQUEUE.delays[0])  # seconds before each retry
# Exit codes of ranks that ended on a signal: after saving; before their handler was installed, from torchrun and from srun.
INTERRUPTED = (exit_codes.INTERRUPTED, -signal.SIGUSR1, -signal.SIGTERM, 128 + signal.SIGUSR1)


def script(job: Job, cluster: Cluster, submission: str) -> str:
    """Text of the job's batch script; `submission` identifies this submission, in the Slurm job's comment."""
    from jinja2 import Environment, StrictUndefined

    processes = "1 process" if job.processes == 1 else f"{job.processes} processes"
    address = "$MASTER_ADDR:$((MASTER_PORT + 1))"
    text = Path(__file__).with_name("slurm_batch.sh.jinja").read_text()
    shell = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    return shell.from_string(text).render(
        about=f"{' '.join(job.program.split())} on {counted(job.nodes, 'node')}, {processes} per node",
        preview=submission == PREVIEW,
        logs=quote(str(job.folder)),
        name=job.name,
        folder=quote(str(Path.cwd())),
        options=sbatch_options(job, cluster, submission),
        variables={name: quote(value) for name, value in environment.job_variables(job).items()}
        | environment.defaults(devices.resolve(cluster.device), address),
        attempt_file=job.attempt_file and quote(str(job.attempt_file)),
        array=job.array,
        command=[" ".join(map(quote, arguments)) for arguments in _command(job, cluster)],
        tail=LOG_TAIL,
        interrupted="|".join(map(str, INTERRUPTED)),
        requeue_seconds=REQUEUE_SECONDS,
        requeue_pause=REQUEUE_PAUSE,
    )


def create_attempt_file(path: Path) -> None:
    """Create the file of a job's attempt number, which is 0 before its first start, unless it exists."""

    def create() -> None:
        with path.open("x") as file:
            file.write("0")

    with suppress(FileExistsError):
        state_files.retried(create)


def job_name(job: Job) -> str:
    """Slurm job name: ts-RUN-JOB and a digest of key and folder.

    The digest identifies a job that is already running before another is submitted.

    The name must not be that of another store's run: Slurm starts one job of a name after another (singleton).
    """
    digest = hashlib.sha256(f"{job.key}\n{job.folder.absolute()}".encode()).hexdigest()
    return f"{job.title[:MAX_NAME_LENGTH]}-{digest[:8]}"


def sbatch_options(job: Job, cluster: Cluster, submission: str) -> list[str]:
    found = [
        f"--job-name={job_name(job)}",
        f"--comment={job.fingerprint}.{submission}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--output={job.name}.log",
        "--open-mode=append",
        "--requeue",
        # singleton would run the jobs of an array one at a time.
        f"--array=0-{job.array - 1}" if job.array else "--dependency=singleton",
    ]
    if job.attempt_file:  # other jobs save nothing and would restart from the beginning forever
        found.append(f"--signal=B:USR1@{cluster.time_left}")
    found += [
        f"--{name}={_slurm_quote(value)}"
        for name in ("partition", "account", "time", "constraint")
        if (value := getattr(cluster, name)) is not None
    ]
    if cluster.exclusive:
        found.append("--exclusive")
    for option in cluster.slurm:
        name, equals, value = option.partition("=")
        found.append(f"{name}{equals}{_slurm_quote(value) if equals else ''}")
    return found


def _command(job: Job, cluster: Cluster) -> list[list[str]]:
    """The command, as lists of arguments that share a line of the script."""
    program = [["-m", *job.module]]
    pairs = list(job.arguments)
    program += [pairs[index : index + 2] for index in range(0, len(pairs), 2)]
    if job.processes == 0:
        return [[sys.executable], *program]
    return [
        [sys.executable, "-m", START, TORCHRUN],
        ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.processes), "--max-restarts", "0"],
        ["--rdzv-backend", "static"],  # the c10d one prints a stack dump on shutdown
        # When Slurm stops the job, KillWait or a partition's grace time is the limit; torchrun's default of 30 s may be less.
        ["--shutdown-timeout", str(max(cluster.grace, cluster.time_left))],
        ["--tee", "3", "--log-dir", str(job.folder / "ranks")],
        *program,
    ]


def _slurm_quote(value: str) -> str:
    """Quote a value for Slurm's parser of #SBATCH lines: double quotes, backslash escapes."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return value if value and escaped == value and not set(value) & set(" '#\t") else f'"{escaped}"'
