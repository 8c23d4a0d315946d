"""A real Slurm cluster of several nodes on this machine, for as long as a block lasts: munge, a controller, a slurmd a node.

Everything listens on loopback, lies in one temporary folder and is a child of this process. Needs root, and Debian's
slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from string import Template

import psutil

PROGRAMS = ("setpriv", "munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
NODES, CPUS, MEMORY = 4, 2, 4000  # MiB
WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")  # in front of a command that is not to outlive this process
NODE = "TRAINSHED_TEST_NODE"  # in the environment of a slurmd and of the daemons of its steps
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
MinJobAge=300
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
    """Why there can be no cluster on this machine; empty where there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs Debian's slurm-wlm and munge ({absent[0]} is not here)" if absent else ""


class Cluster:
    """`with Cluster() as cluster:`; commands find it through SLURM_CONF, which is set meanwhile."""

    def __init__(self, nodes: int = NODES) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._ports = dict(zip(self.nodes, _free_ports(nodes), strict=True))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (self.folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        lines = (
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory={MEMORY} State=UNKNOWN"
            for node, port in self._ports.items()
        )
        self.configuration = self.folder / "slurm.conf"
        self.configuration.write_text(
            CONFIGURATION.substitute(
                host=host,
                port=_free_ports(1)[0],
                folder=self.folder,
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

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Every process of this cluster, or of one node of it: daemons of its steps, and their tasks."""
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
        """What jobs have running."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # of one that has just ended
                if "SLURM_JOB_ID" in process.environ():
                    found.append(process)
        return found

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node, **{NODE: node})

    def kill_slurmd(self, node: str) -> None:
        """The daemon alone: its jobs live on."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def kill_node(self, node: str) -> None:
        """As when a machine loses its power: everything on it is gone, and the controller notices."""
        self.kill_slurmd(node)
        for process in self.processes(node):
            process.kill()
        self.down(node)

    def down(self, node: str) -> None:
        """What the controller decides by itself when a node has been silent for SlurmdTimeout."""
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def heal(self) -> None:
        """All nodes up and idle, and nothing on them, not even what its slurmd did not outlive."""
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
        """It writes down what it knows first: else it would give later jobs numbers that the nodes have seen already."""
        self._daemons["slurmctld"].terminate()
        self._daemons["slurmctld"].wait()

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D")

    def idle(self) -> list[str]:
        shown = self.command("sinfo", "-h", "-N", "-p", "train", "-t", "idle", "-o", "%N", check=False)
        return sorted(shown.split())

    def jobs(self, states: str = "PENDING,RUNNING,COMPLETING") -> list[list[str]]:
        """[number, name, state, nodes] of each job."""
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


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _until(true: object, failure: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(failure)
        time.sleep(0.1)
