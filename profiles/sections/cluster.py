"""The section `cluster`: where a run's jobs run, what starts them, and how they are monitored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from profiles.sections import roles
from profiles.sections.base import Count, Natural, Section, Size

WORD = r"^[\w@.,+-]+$"
LINE = r"^[^\x00-\x1f\x7f]+$"
OPTION = r"^--[a-z][a-z-]*(=[^\x00-\x1f\x7f]+)?$"
LABEL = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
PATH = r"^/[^\x00-\x1f\x7f]*$"
QUANTITY = r"^[\w./-]+=[\w.-]+$"
VARIABLE = r"^[A-Za-z_]\w*=[^\x00-\x1f\x7f]*$"
Accelerator = Literal["trn1", "trn2", "trn3", "a100", "h100", "h100_96", "h800", "h200", "b200"]
TIME = r"^(\d+-)?\d+(:\d+){0,2}$"


def _as_text(value: Any) -> Any:
    """Accept a time in minutes, which YAML reads as a number."""
    return str(value) if type(value) is int else value


class Kubernetes(Section):
    """Kubernetes launcher: one indexed Job and a headless Service for each of a run's jobs."""

    default_role = roles.NONE

    image: str | None = Field(default=None, pattern=LINE)
    """container image with Trainshed, for instance installed from this checkout"""
    namespace: str = Field(default="default", pattern=LABEL)
    """namespace of the Jobs"""
    context: str | None = Field(default=None, pattern=LINE)
    """context of the kubeconfig file; null: the current one, or the Pod's own account"""
    claim: str | None = Field(default=None, pattern=LABEL)
    """PersistentVolumeClaim with the store and the working folder"""
    mount: str | None = Field(default=None, pattern=PATH)
    """path where the claim is mounted, the same on the flow's machine and in Pods"""
    resources: list[Annotated[str, Field(pattern=QUANTITY)]] = Field(default=[])
    """resources that a Pod requests, such as nvidia.com/gpu=8; empty: nvidia.com/gpu=devices_per_node for cuda, nothing for
    cpu; required for neuron"""
    node_selector: list[Annotated[str, Field(pattern=QUANTITY)]] = Field(default=[])
    """required node labels, such as node.kubernetes.io/instance-type=trn2.48xlarge"""
    tolerations: list[Annotated[str, Field(pattern=LINE)]] = Field(default=[])
    """keys of node taints that Pods tolerate"""
    environment: list[Annotated[str, Field(pattern=VARIABLE)]] = Field(default=[])
    """environment variables of Pods, such as FI_PROVIDER=efa; no secrets: they are stored in the profile"""
    service_account: str | None = Field(default=None, pattern=LABEL)
    """service account of Pods; null: the default one"""
    priority_class: str | None = Field(default=None, pattern=LABEL)
    """priority class of Pods"""
    queue: str | None = Field(default=None, pattern=LABEL)
    """Kueue queue that admits the Jobs"""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of Pods, by name."""
        return dict(entry.split("=", 1) for entry in self.environment)


class Cluster(Section):
    """Cluster and launcher."""

    default_role = roles.NONE

    launcher: Annotated[str, Field(pattern=WORD)] = "local"
    """local: this machine; slurm: a Slurm cluster; kubernetes; or the name of a plugin (entry point of the group
    trainshed.launchers)"""
    nodes: Annotated[Size, roles.SHARDING] = 1
    """number of nodes"""
    devices_per_node: Annotated[Size, roles.GRAPHS] = 1
    """devices per node, with one process each"""
    device: Annotated[Literal["cpu", "cuda", "neuron"], roles.GRAPHS]
    """device type; never detected automatically"""
    accelerator: Annotated[Accelerator | None, roles.GRAPHS] = None
    """accelerator model, whose memory and speed are used for planning; null: this machine's GPU on cuda, trn2 on neuron"""
    node_price: Annotated[float, Field(gt=0)] | None = None
    """price per node hour in any currency, for planning"""
    network: Annotated[float, Field(gt=0)] | None = None
    """bandwidth of a node's network in Gbit/s, for planning; null: that of nodes usual for the accelerator"""
    work_dir: str | None = Field(default=None, min_length=1)
    """local folder for runs if the store is on S3; null: ./store"""
    threads: Annotated[Count | None, roles.GRAPHS] = None
    """torch threads per process; null: the node's usable cores divided among its processes"""
    retries: Natural = 2
    """maximum retries without a new checkpoint, which resets the count; outages count only after an hour"""
    hang_seconds: Annotated[float, Field(gt=0)] | None = 20.0
    """hang timeout of a step = hang_factor × median step time + this; null: no hang detection"""
    hang_factor: Annotated[float, Field(ge=1)] = 5.0
    """multiple of the median step time in the hang timeout"""
    partition: str | None = Field(default=None, pattern=WORD)
    """Slurm partition; null: the cluster's default"""
    shards_partition: str | None = Field(default=None, pattern=WORD)
    """Slurm partition that tokenizes shards in parallel, and compiles with compile.launcher slurm; null: tokenize on this
    machine"""
    account: str | None = Field(default=None, pattern=WORD)
    """Slurm account; null: the user's default"""
    time: Annotated[str, Field(pattern=TIME), BeforeValidator(_as_text)] | None = None
    """Slurm time limit of a job, such as 1-12:00:00; the run resumes in the next job"""
    time_left: Count = 120
    """seconds before the time limit at which training stops, saves and requeues; a stop takes up to three steps"""
    grace: Natural = 30
    """seconds to stop and save after a signal before the processes are killed; a stop takes up to three steps"""
    constraint: str | None = Field(default=None, pattern=LINE)
    """required Slurm node features, such as trn2&efa"""
    exclusive: bool = True
    """request exclusive nodes from Slurm"""
    slurm: list[Annotated[str, Field(pattern=OPTION)]] = Field(default=[])
    """further sbatch options, such as --mem=500G, --cpus-per-task=48 or --reservation=name"""
    kubernetes: Kubernetes = Kubernetes()
    """settings of the Kubernetes launcher"""
    trace: Annotated[tuple[Count, Count], Field(strict=False)] | None = None
    """first and last step to profile with torch.profiler, as a Chrome trace; null: none"""
