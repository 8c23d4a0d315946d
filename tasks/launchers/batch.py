"""Batch script of a Slurm job: one torchrun per node under srun; can be read and submitted by hand.

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
from string import Template

from parallel import device as devices
from profiles.errors import counted
from profiles.files import exit_codes, state_files
from profiles.files.retry_policies import REQUEUE
from profiles.schema import Cluster
from tasks.launchers import environment
from tasks.launchers.base import SAFE_PATH, START, TORCHRUN, Job
from tasks.launchers.causes import LOG_TAIL, RANK_PREFIX

MAX_NAME_LENGTH = 60
# For which a requeue is retried while the controller does not answer.
REQUEUE_SECONDS = round(REQUEUE.seconds)
REQUEUE_PAUSE = round(REQUEUE.delay(0))  # seconds before each retry
# Exit codes of ranks that ended on a signal: after saving; before their handler was installed, from torchrun and from srun.
INTERRUPTED = (exit_codes.INTERRUPTED, -signal.SIGUSR1, -signal.SIGTERM, 128 + signal.SIGUSR1)

SCRIPT = Template(r"""#!/bin/bash
# $about
# To submit by hand: cd $logs && sbatch $name.sbatch
$options

logs=$logs
name=$name$${SLURM_ARRAY_TASK_ID:+.$$SLURM_ARRAY_TASK_ID}

# Raise the limit of open files to 65535, or to the hard limit.
ulimit -n 65535 2> /dev/null || ulimit -n "$$(ulimit -Hn)"
cd -- $folder || exit 1

# srun does not read sbatch's --cpus-per-task itself.
[ -z "$$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$$SLURM_CPUS_PER_TASK"

# Rendezvous: the first node's address as Slurm knows it; the port differs at each start.
hosts=($$(scontrol show hostnames "$$SLURM_JOB_NODELIST"))
MASTER_ADDR=$$(scontrol --oneliner show node "$${hosts[0]}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
MASTER_PORT=$port
export PET_MASTER_ADDR=$$MASTER_ADDR PET_MASTER_PORT=$$MASTER_PORT # as torchrun names them
$environment

# Only the latest start writes the record: an earlier one that is still running finds another start's name in this file.
start=$$SLURM_JOB_ID.$${SLURM_RESTART_COUNT:-0}
echo "$$start" > "$$logs/$$name.start"
rm -f "$$logs/$$name.exit.json"
record() { # exit code
  printf '{"job": "%s", "exit_code": %s, "nodes": "%s"}\n' "$${SLURM_ARRAY_JOB_ID:-$$SLURM_JOB_ID}" "$$1" \
    "$$(IFS=,; echo "$${hosts[*]}")" > "$$logs/$$name.exit.partial" && mv "$$logs/$$name.exit.partial" "$$logs/$$name.exit.json"
}
$count
echo "job $$SLURM_JOB_ID, start $$((SLURM_RESTART_COUNT + 1)), on $${hosts[*]}; rendezvous at $$MASTER_ADDR:$$MASTER_PORT"

command=(
$command
)
$run
wait "$$ranks"
code=$$?

[ "$$(cat "$$logs/$$name.start")" = "$$start" ] || exit 1
# Exit codes of the ranks that failed first, as each node's torchrun reports them; srun's only says that one was not 0.
first=$$(tail -c $tail "$$logs/$$name.log" 2> /dev/null | awk '
  /^job [0-9]+, start [0-9]+, on / { codes = "" }
  /^Root Cause/ { in_cause = 1 }
  in_cause && $$1 == "exitcode" { codes = codes " " $$3; in_cause = 0 }
  END { print codes }')
interrupted() { # whether every rank ended on the stop signal
  for rank_code in $${first:-$$code}; do
    case $$rank_code in
      $interrupted) ;;
      *) return 1 ;;
    esac
  done
}
# On preemption with a grace time, Slurm itself sends TERM, which ends torchrun and its ranks without a report of a failed rank.
if [ "$$stopping" = requeue ]; then
  interrupted || stopping= # it finished or failed by itself in its last seconds
elif [ -z "$$stopping" ] && [ "$$code" != 0 ] && { [ -z "$$first" ] || interrupted; } &&
  scontrol --oneliner show job "$$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
  stopping=requeue
fi
case $$stopping in
  requeue) # sleeps until the requeue kills this script
    echo "$requeued"
    record null
    # Slurm kills this script if the time limit is reached first, and a stop request ends the loop.
    give_up=$$((SECONDS + $requeue_seconds))
    while [ "$$stopping" = requeue ]; do
      # The requeue ends this job's processes, perhaps before scontrol has heard that it succeeded.
      if (trap "" TERM && exec scontrol requeue "$$SLURM_JOB_ID"); then
        [ "$$stopping" = killed ] || exec sleep 60
        exit 1
      fi
      [ "$$SECONDS" -lt "$$give_up" ] || break
      sleep $requeue_pause
    done
    if [ "$$stopping" = killed ]; then exit "$$code"; fi
    echo "not requeued; start the run again to resume it"
    ;;
  killed)
    record null
    exit "$$code"
    ;;
esac
record "$$code"
exit "$$code"
""")

RUN_SAVING = r"""
# The ranks save and exit on USR1. Slurm signals torchrun, which forwards it, and depending on ProctrackType also the ranks. Each
# ignores it until it can handle it.
srun --kill-on-bad-exit=1 --export=ALL bash -c 'trap "" USR1; exec env PET_NODE_RANK="$SLURM_NODEID" "$@"' - "${command[@]}" &
ranks=$!

stopping=
trap 'stopping=requeue; echo "time limit near or preempted: saving"; kill -USR1 "$ranks"' USR1
trap 'stopping=end; echo "stop requested: saving"; kill -USR1 "$ranks"' USR2
trap 'stopping=killed' TERM
while kill -0 "$ranks" 2> /dev/null; do
  if [ -z "$stopping" ]; then
    wait "$ranks"
  else
    kill -USR1 "$ranks" 2> /dev/null # repeat: a rank that is starting up misses the first
    sleep 1
  fi
done"""

RUN_WITHOUT_SAVING = r"""
srun --kill-on-bad-exit=1 --export=ALL bash -c 'exec env PET_NODE_RANK="$SLURM_NODEID" "$@"' - "${command[@]}" &
ranks=$!

stopping=
trap 'stopping=end; echo "stop requested"; kill "$ranks"' USR2
trap 'stopping=killed' TERM
while kill -0 "$ranks" 2> /dev/null; do
  wait "$ranks"
done"""

COUNT_ATTEMPT = Template(r"""
# Increment the attempt number, which fences earlier starts that are still running. The submission has created the file, so one
# that cannot be read ends the job. If it is corrupted, continue from the Unix time, which exceeds every earlier number.
attempt_file=$file
attempt=$$(cat "$$attempt_file") || exit 1
case "$$attempt" in ''|*[!0-9]*) echo "$$attempt_file: corrupted; continuing from the Unix time"; attempt=$$(date +%s) ;; esac
attempt=$$((attempt + 1))
printf %d "$$attempt" > "$$attempt_file.partial" && sync "$$attempt_file.partial" &&
  mv "$$attempt_file.partial" "$$attempt_file" || exit 1
""")


def script(job: Job, cluster: Cluster, submission: str) -> str:
    """Text of the job's batch script; `submission` identifies this submission, in the Slurm job's comment."""
    device = devices.resolve(cluster.device)
    processes = "1 process" if job.processes == 1 else f"{job.processes} processes"
    variables = {**SAFE_PATH, "PYTHONUNBUFFERED": "1", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_PREFIX}
    if job.threads is not None:
        variables["OMP_NUM_THREADS"] = str(job.threads)
    lines = [f"export {name}={quote(value)}" for name, value in variables.items()]
    lines += environment.exports(device, "$MASTER_ADDR:$((MASTER_PORT + 1))")
    return SCRIPT.substitute(
        about=f"{' '.join(job.program.split())} on {counted(job.nodes, 'node')}, {processes} per node",
        logs=quote(str(job.folder)),
        name=job.name,
        folder=quote(str(Path.cwd())),
        options="\n".join(f"#SBATCH {option}" for option in options(job, cluster, submission)),
        port="$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) * 2 % 12000))",
        environment="\n".join(lines),
        run=(RUN_SAVING if job.attempt_file else RUN_WITHOUT_SAVING).lstrip(),
        tail=LOG_TAIL,
        interrupted="|".join(map(str, INTERRUPTED)),
        requeued="saved; requeued" if job.attempt_file else "requeued",
        requeue_seconds=REQUEUE_SECONDS,
        requeue_pause=REQUEUE_PAUSE,
        count=COUNT_ATTEMPT.substitute(file=quote(str(job.attempt_file))) if job.attempt_file else "",
        command="\n".join(f"  {' '.join(map(quote, arguments))}" for arguments in _command(job, cluster))
        + ('\n  --attempt "$attempt"' if job.attempt_file else "")
        + ('\n  --index "$SLURM_ARRAY_TASK_ID"' if job.array else ""),
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


def options(job: Job, cluster: Cluster, submission: str) -> list[str]:
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
