"""A real Slurm cluster of several nodes on this machine: munge, a controller and a slurmd per node.

Everything listens on loopback, is kept in one temporary folder and is a child of this process, so several clusters run side by
side. Requires root and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import IO

import psutil

from tests.ports import free_port

PROGRAMS = ("setpriv", "munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
NODES, CPUS, MEMORY = 4, 2, 4000  # MiB
CLUSTERS, JOBS = 8, 50  # clusters at a time on this machine, and jobs of each
WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")  # prefix of commands that must not outlive this process
NODE = "TRAINSHED_TEST_NODE"  # environment variable of a slurmd and its step daemons
CONFIGURATION = Template("""
ClusterName=trainshed-tests
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=5
Prolog=$folder/prolog
Epilog=$folder/epilog
MinJobAge=300
FirstJobId=$first_job
SlurmctldTimeout=30
SlurmdTimeout=30
MessageTimeout=20
BatchStartTimeout=20
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
$nodes
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
""")


def missing() -> str:
    """What this machine lacks to run a cluster; empty if nothing."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs Debian's slurm-wlm and munge ({absent[0]} is not here)" if absent else ""


class Cluster:
    """Use as a context manager; Slurm's commands find it through SLURM_CONF."""

    def __init__(self, nodes: int = NODES) -> None:
        self._slot, number = _take_slot()
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._ports = {node: free_port() for node in self.nodes}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (self.folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        lines = (
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory={MEMORY} State=UNKNOWN"
            for node, port in self._ports.items()
        )
        self._hold = self.folder / "hold-epilogs"
        self._failure = self.folder / "fail-prolog"
        epilog = self.folder / "epilog"
        epilog.write_text(
            f"#!/bin/bash\nfor ((i = 0; i < 1200; i++)); do [ -e {self._hold} ] || exit 0; /bin/sleep 0.1; done\n"
        )
        epilog.chmod(0o755)
        prolog = self.folder / "prolog"
        prolog.write_text(f"#!/bin/sh\n! rm {self._failure} 2> /dev/null\n")
        prolog.chmod(0o755)
        self.configuration = self.folder / "slurm.conf"
        self.configuration.write_text(
            CONFIGURATION.substitute(
                host=host,
                port=free_port(),
                folder=self.folder,
                first_job=1 + JOBS * number,
                nodes="\n".join(lines),
            )
        )

    def __enter__(self) -> Cluster:
        self._before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(self.configuration)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        socket_path = self.folder / "munge.socket"
        try:
            self._start(
                "munged",
                *("munged", "--foreground", "--force", f"--socket={socket_path}", f"--key-file={key}"),
                *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log"),
                *(f"--seed-file={self.folder}/munged.seed", "--num-threads=2"),
            )
            _until(socket_path.exists, "munged did not start")
            self._start("slurmctld", "slurmctld", "-D", "-c")
            for node in self.nodes:
                self.start_node(node)
            _until(lambda: self.idle() == self.nodes, "the nodes did not come up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._daemons:
            self.command("scancel", "--full", f"--user={os.getuid()}", check=False)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():
            process.kill()
        if self._before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = self._before
        shutil.rmtree(self.folder, ignore_errors=True)
        self._slot.close()

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Processes of the cluster or of one node: step daemons and their tasks."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                on = {environment.get(NODE), environment.get("SLURMD_NODENAME")} - {None}
                ours = environment.get("SLURM_CONF") == str(self.configuration)
                if ours and on and (node is None or node in on) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def tasks(self) -> list[psutil.Process]:
        """Processes of running jobs."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # the process has just ended
                if "SLURM_JOB_ID" in process.environ():
                    found.append(process)
        return found

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node, **{NODE: node})

    @contextlib.contextmanager
    def slow_epilogs(self) -> Iterator[None]:
        """Let the epilogs of jobs that end in the block take two minutes, or until the block ends."""
        self._hold.touch()
        try:
            yield
        finally:
            self._hold.unlink()

    def fail_next_prolog(self) -> None:
        self._failure.touch()

    def kill_slurmd(self, node: str) -> None:
        """Kill only the daemon; its jobs keep running."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def kill_node(self, node: str) -> None:
        """Simulate a power loss: kill everything on the node, and mark it down."""
        self.kill_slurmd(node)
        for process in self.processes(node):
            process.kill()
        self.down(node)

    def down(self, node: str) -> None:
        """Mark a node down, as the controller does after SlurmdTimeout without a response."""
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def heal(self) -> None:
        """Bring all nodes up and idle, and kill everything on them, also orphans of a killed slurmd."""
        daemons = {daemon.pid for daemon in self._daemons.values()}
        self.command("scancel", "--full", f"--user={os.getuid()}", check=False)
        if any(daemon.poll() is not None for daemon in self._daemons.values()):
            for process in self.processes():
                if process.pid not in daemons:
                    process.kill()
        for node, daemon in list(self._daemons.items()):
            if node in self._ports and daemon.poll() is not None:
                self.start_node(node)
        for node in set(self.nodes) - set(self.idle()):
            self.command("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        _until(lambda: self.idle() == self.nodes, "the nodes did not come up again")

    def stop_controller(self) -> None:
        """Stop it gracefully, to save its state; otherwise it would reuse job ids that the nodes know."""
        self._daemons["slurmctld"].terminate()
        self._daemons["slurmctld"].wait()

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D")

    def idle(self) -> list[str]:
        """Nodes that Slurm would allocate now: idle, and neither completing a job nor silent (`idle*`)."""
        shown = self.command("sinfo", "-h", "-N", "-p", "train", "-o", "%N %t", check=False)
        return sorted(node for node, state in map(str.split, shown.splitlines()) if state == "idle")

    def jobs(self, states: str = "PENDING,RUNNING,COMPLETING") -> list[list[str]]:
        """[id, name, state, nodes] of each job."""
        shown = self.command("squeue", "-h", "-t", states, "-o", "%A|%j|%T|%N")
        return [line.split("|") for line in shown.splitlines()]

    def command(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def _start(self, name: str, *command: str, **environment: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [*WITH_PARENT, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )


def _take_slot() -> tuple[IO[bytes], int]:
    """A cluster number, unique on this machine while the file is open; job ports follow from it."""
    for number in range(CLUSTERS):
        file = (Path(tempfile.gettempdir()) / f"trainshed-tests-cluster-{number}").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            return file, number
    raise RuntimeError(f"{CLUSTERS} clusters are running on this machine")


def _until(true: object, failure: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(failure)
        time.sleep(0.1)
