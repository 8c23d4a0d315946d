"""The batch script of a job on Slurm: one torchrun a node under srun, readable, and good to be submitted by hand.

The script is the whole truth about a job, since nobody else may be there while it runs:

    attempt     a number in a file of the run, one higher at each start: it fences one that was given up and lives on
    USR1        the time limit nears, or the job is preempted: the ranks save, and the job is queued again
    USR2        somebody wants it stopped: the ranks save, and it ends
                (a job that does not save, one without attempts, has no USR1, and ends at once on USR2)
    record      how it ended, written at the very end; a job that is gone without one was ended by Slurm, or its node died

Every value is quoted for the shell that reads it. Options of sbatch are read by Slurm itself, whose quotes are its own; no path
is among them, since the job runs in the folder of its log until it says `cd`.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from pathlib import Path
from shlex import quote
from string import Template

from modeling import exit_codes
from parallel import device as devices
from profiles.schema import Cluster
from tasks.launchers.base import SAFE_PATH, Job
from tasks.launchers.causes import LOG_TAIL, PREFIX

LONGEST_NAME = 60
# Codes of ranks that ended on a signal: having saved; before they listened, as torchrun and as srun has it.
INTERRUPTED = (exit_codes.INTERRUPTED, -signal.SIGUSR1, -signal.SIGTERM, 128 + signal.SIGUSR1)

SCRIPT = Template(r"""#!/bin/bash
# $about
# To submit it by hand: cd $logs && sbatch $name.sbatch
$options

logs=$logs
name=$name$${SLURM_ARRAY_TASK_ID:+.$$SLURM_ARRAY_TASK_ID}

# Sixty-five thousand open files where the machine allows it, else as many as it does.
ulimit -n 65535 2> /dev/null || ulimit -n "$$(ulimit -Hn)"
cd -- $folder || exit 1

# Where the ranks meet: the first node by the address that Slurm knows, a port of this start's own.
hosts=($$(scontrol show hostnames "$$SLURM_JOB_NODELIST"))
MASTER_ADDR=$$(scontrol --oneliner show node "$${hosts[0]}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
MASTER_PORT=$port
export PET_MASTER_ADDR=$$MASTER_ADDR PET_MASTER_PORT=$$MASTER_PORT # torchrun's own names
$environment

# Whoever starts last speaks for the job: one that Slurm gave up on, but that lives on, finds another name here than its own.
start=$$SLURM_JOB_ID.$${SLURM_RESTART_COUNT:-0}
echo "$$start" > "$$logs/$$name.start"
rm -f "$$logs/$$name.exit.json"
$count
echo "job $$SLURM_JOB_ID, start $$((SLURM_RESTART_COUNT + 1)), on $${hosts[*]}; they meet at $$MASTER_ADDR:$$MASTER_PORT"

command=(
$command
)
$run
wait "$$ranks"
code=$$?

[ "$$(cat "$$logs/$$name.start")" = "$$start" ] || exit 1
# The codes of the ranks that ended first, as each node's torchrun names them; srun's own says only that one was not 0.
first=$$(tail -c $tail "$$logs/$$name.log" 2> /dev/null | awk '
  /^job [0-9]+, start [0-9]+, on / { codes = "" }
  /^Root Cause/ { looking = 1 }
  looking && $$1 == "exitcode" { codes = codes " " $$3; looking = 0 }
  END { print codes }')
interrupted() { # whether they ended because they were asked to, or before they could hear it
  for each in $${first:-$$code}; do
    case $$each in
      $interrupted) ;;
      *) return 1 ;;
    esac
  done
}
# A job that is preempted with a time of grace has had its ranks told to end by Slurm itself, of which torchrun names none.
if [ "$$stopping" = requeue ]; then
  interrupted || stopping= # it ended by itself, in its last seconds
elif [ -z "$$stopping" ] && [ "$$code" != 0 ] && { [ -z "$$first" ] || interrupted; } &&
  scontrol --oneliner show job "$$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
  stopping=requeue
fi
case $$stopping in
  requeue) echo "$requeued"; scontrol requeue "$$SLURM_JOB_ID" && exec sleep 60 ;; # which ends this
  killed) exit "$$code" ;;
esac
nodes=$$(IFS=,; echo "$${hosts[*]}")
printf '{"job": "%s", "exit_code": %d, "nodes": "%s"}\n' "$${SLURM_ARRAY_JOB_ID:-$$SLURM_JOB_ID}" "$$code" "$$nodes" \
  > "$$logs/$$name.exit.partial" && mv "$$logs/$$name.exit.partial" "$$logs/$$name.exit.json"
exit "$$code"
""")

SAVES = r"""
# USR1 passes by what is between srun and the ranks, and asks these to save and end.
srun --kill-on-bad-exit=1 --export=ALL bash -c 'trap "" USR1; exec env PET_NODE_RANK="$SLURM_NODEID" "$@"' - "${command[@]}" &
ranks=$!

stopping=
trap 'stopping=requeue; echo "the time is nearly over: the ranks save"; kill -USR1 "$ranks"' USR1
trap 'stopping=end; echo "asked to stop: the ranks save"; kill -USR1 "$ranks"' USR2
trap 'stopping=killed' TERM
while kill -0 "$ranks" 2> /dev/null; do
  if [ -z "$stopping" ]; then
    wait "$ranks"
  else
    kill -USR1 "$ranks" 2> /dev/null # again and again: one that is only starting does not hear the first
    sleep 1
  fi
done"""

SAVES_NOT = r"""
srun --kill-on-bad-exit=1 --export=ALL bash -c 'exec env PET_NODE_RANK="$SLURM_NODEID" "$@"' - "${command[@]}" &
ranks=$!

stopping=
trap 'stopping=end; echo "asked to stop"; kill "$ranks"' USR2
trap 'stopping=killed' TERM
while kill -0 "$ranks" 2> /dev/null; do
  wait "$ranks"
done"""

COUNT = Template(r"""
# One start more: an older one that lives on somewhere is told from this by its number.
attempt_file=$file
attempt=$$(($$(cat "$$attempt_file" 2> /dev/null || echo 0) + 1))
printf %d "$$attempt" > "$$attempt_file.partial" && mv "$$attempt_file.partial" "$$attempt_file"
""")


def script(job: Job, cluster: Cluster) -> str:
    """The batch script of a job, to be kept in the job's folder as <name>.sbatch."""
    device = devices.resolve(cluster.device)
    variables = {**SAFE_PATH, "PYTHONUNBUFFERED": "1", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": PREFIX}
    variables |= dict(device.environment)
    if job.threads is not None:
        variables["OMP_NUM_THREADS"] = str(job.threads)
    lines = [f"export {name}={quote(value)}" for name, value in variables.items()]
    if device.communicator:
        lines.append(f'export {device.communicator}="$MASTER_ADDR:$((MASTER_PORT + 1))"')
    return SCRIPT.substitute(
        about=_one_line(f"{job.program} on {job.nodes} nodes, {job.processes} processes on each"),
        logs=quote(str(job.folder)),
        name=job.name,
        folder=quote(str(Path.cwd())),
        options="\n".join(f"#SBATCH {option}" for option in options(job, cluster)),
        port="$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) * 2 % 12000))",
        environment="\n".join(lines),
        run=(SAVES if job.attempt_file else SAVES_NOT).lstrip(),
        tail=LOG_TAIL,
        interrupted="|".join(map(str, INTERRUPTED)),
        requeued="saved; queued again" if job.attempt_file else "queued again",
        count=COUNT.substitute(file=quote(str(job.attempt_file))) if job.attempt_file else "",
        command="\n".join(f"  {' '.join(map(quote, words))}" for words in _command(job))
        + ('\n  --attempt "$attempt"' if job.attempt_file else "")
        + ('\n  --index "$SLURM_ARRAY_TASK_ID"' if job.array else ""),
    )


def job_name(job: Job) -> str:
    """The same for every job of one name, key and folder, so that it can be looked up before another is submitted."""
    told = hashlib.sha256(f"{job.key}\n{job.folder.absolute()}".encode()).hexdigest()[:16]
    return f"trainshed-{job.name[:LONGEST_NAME]}-{told}"


def fingerprint(job: Job) -> str:
    """Of what makes two jobs the same, as squeue shows it."""
    return hashlib.sha256(json.dumps(job.essence).encode()).hexdigest()[:16]


def options(job: Job, cluster: Cluster) -> list[str]:
    """sbatch's options."""
    found = [
        f"--job-name={job_name(job)}",
        f"--comment={fingerprint(job)}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--output={job.name}.log",
        "--open-mode=append",
        "--requeue",
        # Of an array, it would keep all but one waiting.
        f"--array=0-{job.array - 1}" if job.array else "--dependency=singleton",
    ]
    if job.attempt_file:  # others have nothing to save, and would begin again for ever
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


def _command(job: Job) -> list[list[str]]:
    """The words of the command, line by line."""
    program = [["-m", job.program]]
    pairs = list(job.arguments)
    program += [pairs[index : index + 2] for index in range(0, len(pairs), 2)]
    if job.processes == 0:
        return [[sys.executable], *program]
    return [
        [sys.executable, "-m", "modeling.training.torchrun"],
        ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.processes), "--max-restarts", "0"],
        ["--rdzv-backend", "static"],  # c10d's prints a stack dump when it shuts down
        ["--tee", "3", "--log-dir", str(job.folder / "ranks")],
        *program,
    ]


def _slurm_quote(value: str) -> str:
    """A value as Slurm's reader of #SBATCH lines takes it: within double quotes, a backslash before what is special."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return value if value and escaped == value and not set(value) & set(" '#\t") else f'"{escaped}"'


def _one_line(text: str) -> str:
    return " ".join(text.split())
