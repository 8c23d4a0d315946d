"""Profile schema: a class per section (some in sections/) with each key's type, default, description.

Rules within a section are checked here, those between sections in check.py. A resolved profile is frozen and stored with the run.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from parallel.constraints import expert_shard_degree, kv_replicas
from profiles.recompute import AUTO
from profiles.sections import roles
from profiles.sections.base import CONDITION, FUNCTION, NAME, Count, Natural, Section, Size
from profiles.sections.cluster import Cluster
from profiles.sections.continual import Continual, Gate
from profiles.sections.data import Data, Source, Tokenizer
from profiles.sections.model import Model
from profiles.sections.objective import Lora, Objective
from profiles.sections.tracking import Tracking
from profiles.sections.train import Train

__all__ = [
    "Checkpoint",
    "Cluster",
    "Compile",
    "Continual",
    "Data",
    "Evaluate",
    "Gate",
    "Init",
    "Lora",
    "Model",
    "Objective",
    "Parallel",
    "Profile",
    "Source",
    "Tokenizer",
    "Tracking",
    "Train",
]


class Init(Section):
    """Pretrained weights."""

    default_role = roles.WEIGHTS

    from_: str | None = Field(default=None, alias="from", min_length=1)
    """hub repository, folder or s3:// folder of initial weights, or run:NAME, an exported run of the store; null: train from
    scratch"""
    revision: str | None = None
    """commit, tag or branch of a hub repository"""
    nxd_layout: Literal["trn1", "trn2"] | None = None
    """accelerator that NxD shards were made on; needed where several ranks share a KV head, whose order differs"""


class Parallel(Section):
    """Parallelism; the data-parallel degree is world size / (tensor × pipeline × context)."""

    default_role = roles.GRAPHS

    tensor: Size = 1
    """tensor-parallel degree"""
    pipeline: Size = 1
    """pipeline-parallel degree: ranks per pipeline"""
    context: Size = 1
    """context-parallel degree: ranks that share a sequence"""
    expert: Annotated[Size, roles.EXPERT_PLACEMENT] = 1
    """expert-parallel degree: data and context ranks that a layer's experts are divided among"""
    sequence_parallel: bool = True
    """sequence parallelism: shard activations between layers over tensor ranks"""
    overlap_chunks: Count | None = None
    """maximum number of token chunks in which sequence parallelism overlaps gathers and scatters with the matrix products;
    null: chosen by size on cuda, unless compile.async_tensor merges them, 1 elsewhere"""
    data_sharding: Annotated[Literal["none", "zero1", "fsdp"], roles.SHARDING] = "zero1"
    """what is sharded over data and context ranks: nothing, optimizer states (ZeRO-1), or parameters and gradients too"""
    shard_degree: Annotated[Size | None, roles.SHARDING] = None
    """data and context ranks that states are sharded over; further ranks hold replicas; null: all"""
    keep_gathered: Annotated[bool | Literal["auto"], roles.NONE] = False
    """fsdp: keep gathered weights and unsharded gradients for all microbatches of a step: less communication, more memory;
    auto: if that fits in memory and makes steps shorter"""
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """pipeline schedule; zero_bubble needs train.recompute none, and no fsdp in compiled graphs on neuron"""
    pipeline_cuts: list[Count] | None = None
    """first layer of each stage after the first; null: balanced by cost"""


class Compile(Section):
    """Compilation of the training graphs."""

    default_role = roles.GRAPHS

    enabled: bool | Literal["auto"] = AUTO
    """compile graphs ahead of time; false: eager mode; auto: on a cpu with train.steps, only if training is long enough that it
    pays, as the graphs step measures; elsewhere true"""
    backend: str | None = Field(default=None, min_length=1)
    """inductor or neuron; null: the device's default"""
    launcher: Annotated[Literal["local", "slurm"], roles.NONE] = "local"
    """where graphs are compiled ahead of time; local: the machine of the flow; slurm: a job array on cluster.shards_partition,
    a job for each graph's program"""
    processes: Annotated[Count | None, roles.NONE] = None
    """graphs compiled concurrently on the flow's machine; null: one per core"""
    memory_gib: Annotated[Annotated[float, Field(gt=0)] | None, roles.NONE] = None
    """memory limit of each compiler process; null: this machine's memory, or that of its Slurm job, divided among the
    processes"""
    async_tensor: bool = False
    """cuda, experimental: inductor merges sequence parallelism's collectives with the matrix products (torch's asynchronous
    tensor parallelism), which needs NVLink between the ranks of a tensor group; not yet tested on hardware"""
    flags: str | None = Field(default=None, min_length=1)
    """Neuron compiler flags (NEURON_CC_FLAGS)"""

    @property
    def possible(self) -> bool:
        """Whether training may run compiled graphs: with `auto` until the graphs step decides."""
        return self.enabled is not False


class Checkpoint(Section):
    """Checkpoints: when to save, what to keep, what to resume from."""

    default_role = roles.NONE

    every: Natural = 0
    """steps between checkpoints; 0: only at the end, and when stopped (on_stop)"""
    keep: Natural = 3
    """number of latest checkpoints to keep, in addition to the one with the lowest validation loss if evaluations coincide with
    saves; 0: all"""
    keep_every: Natural = 0
    """keep checkpoints at multiples of this many steps permanently; 0: none"""
    async_: bool = Field(default=False, alias="async")
    """save asynchronously, while training continues"""
    resume: Literal["newest", "none"] | Natural = "newest"
    """checkpoint to resume from: newest, a step, or none (start from the initial weights again)"""
    on_stop: bool = True
    """save before exiting when stopped by a signal"""
    weights_only: bool = False
    """resume only the weights, with a new optimizer and schedule"""


class Evaluate(Section):
    """Evaluation during training; the final model is always evaluated."""

    default_role = roles.NONE

    every: Natural = 0
    """steps between evaluations; 0: only at the end"""
    batches: Count | None = None
    """global batches per evaluation during training; null: the complete validation split"""
    by_source: Annotated[bool, roles.EVALUATION] = False
    """also evaluate each data source separately, on as many batches: metrics.jsonl has validation_loss/<source>"""
    mtp: Annotated[bool, roles.MULTI_TOKEN_EVALUATION] = False
    """also evaluate the modules for multi-token prediction: metrics.jsonl has their losses as mtp_loss_1 (the token after the
    next) and so on"""
    gate: list[Annotated[str, Field(pattern=CONDITION)]] = Field(default=[])
    """conditions on the final evaluation for a chain to continue, such as validation_loss <= 2.5 or accuracy >= 0.6;
    validation_rise is the increase over the loss of the initial weights; []: validation_rise <= 0"""
    metrics: Annotated[list[Annotated[str, Field(pattern=FUNCTION)]], roles.METRICS] = Field(default=[])
    """user metrics, module:function, called like train.loss; metrics.jsonl has their means per token under the function
    names"""


class Profile(Section):
    """A run: the sections of the YAML file, and quantities derived from them."""

    default_role = roles.NONE

    name: Annotated[str, roles.NAME] = Field(pattern=f"^{NAME}$")
    """name of the profile, and of the run unless set with --name"""
    description: str = ""
    """one-line description"""
    model: Model
    """model architecture"""
    tokenizer: Tokenizer
    """tokenizer"""
    data: Data
    """training and validation data"""
    init: Init = Init()
    """initial weights"""
    objective: Objective = Objective()
    """what the model is trained for"""
    lora: Lora = Lora()
    """low-rank adapters"""
    parallel: Parallel = Parallel()
    """parallelism"""
    train: Train
    """training hyperparameters"""
    compile: Compile = Compile()
    """graph compilation"""
    checkpoint: Checkpoint = Checkpoint()
    """checkpoints and resume"""
    evaluate: Evaluate = Evaluate()
    """evaluation during training"""
    continual: Continual = Continual()
    """rounds of continual pretraining"""
    cluster: Cluster
    """cluster and launcher"""
    tracking: Tracking = Tracking()
    """experiment trackers"""

    @property
    def world_size(self) -> int:
        """Number of processes: nodes × devices_per_node."""
        return self.cluster.nodes * self.cluster.devices_per_node

    @property
    def model_parallel(self) -> int:
        """Ranks per model replica: tensor × pipeline × context."""
        return self.parallel.tensor * self.parallel.pipeline * self.parallel.context

    @property
    def data_parallel(self) -> int:
        """Data-parallel degree: number of model replicas."""
        return self.world_size // self.model_parallel

    @property
    def weight_replicas(self) -> int:
        """Ranks that hold the same weights unless these are sharded: data × context."""
        return self.data_parallel * self.parallel.context

    @property
    def shard_degree(self) -> int:
        """Ranks that optimizer states, and with fsdp parameters and gradients, are sharded over."""
        if self.parallel.data_sharding == "none":
            return 1
        return self.parallel.shard_degree or self.weight_replicas

    @property
    def expert_shard_degree(self) -> int:
        """Ranks that states of the same experts are sharded over."""
        return expert_shard_degree(self.shard_degree, self.parallel.expert, self.weight_replicas)

    @property
    def fine_tunes(self) -> bool:
        """Whether the run fine-tunes: with an objective other than pretrain, or with LoRA."""
        return self.objective.traits.reads_records or bool(self.lora.rank)

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference model's log-probabilities of pairs are computed once, before training."""
        return self.objective.traits.needs_reference and self.objective.precompute_reference

    @property
    def scores_pairs_in_step(self) -> bool:
        """Whether each step computes the reference model's log-probabilities of its pairs."""
        return self.objective.traits.needs_reference and not self.objective.precompute_reference

    @property
    def copies_reference(self) -> bool:
        """Whether training holds a frozen copy of the initial weights, as DPO's reference model."""
        return self.scores_pairs_in_step and not self.lora.rank

    @property
    def uses_initial_weights(self) -> bool:
        """Whether the run computes with its initial weights in addition to those of its checkpoints."""
        return bool(self.lora.rank) or self.copies_reference

    @property
    def has_dropout(self) -> bool:
        """Whether the model or its LoRA updates have dropout."""
        return self.model.has_dropout or bool(self.lora.rank and self.lora.dropout)

    @property
    def rows_per_sample(self) -> int:
        """Sequences per sample: two for a preference pair, else one."""
        return self.objective.traits.rows

    @property
    def answers_per_row(self) -> int:
        """Maximum answers in a row of preference pairs; a sequence has at least two tokens."""
        return max(1, self.train.sequence_length // 2) if self.packs and self.objective.traits.pairs else 1

    @property
    def micro_batch_rows(self) -> int:
        """Sequences in a forward pass on a rank."""
        return self.train.micro_batch_size * self.rows_per_sample

    @property
    def step_tokens(self) -> int:
        """Tokens that a step reads, padding of records and both rows of preference pairs included."""
        return self.train.global_batch_size * self.rows_per_sample * self.train.sequence_length

    @property
    def document_masks(self) -> bool:
        """Whether attention is masked across documents, or across the records of a packed sample."""
        return self.train.document_masks or self.packs

    @property
    def padding_masks(self) -> bool:
        """Whether layers are given which tokens are padding, which experts do not count."""
        return self.objective.traits.reads_records and self.model.num_experts is not None

    @property
    def packs(self) -> bool:
        """Whether a sample may contain several records."""
        traits, packing = self.objective.traits, self.objective.packing
        return traits.reads_records and (traits.packs if packing is None else packing)

    @property
    def kv_replication(self) -> int:
        """Tensor ranks that hold the same KV head: max(1, tensor / KV heads)."""
        return kv_replicas(self.model.num_key_value_heads, self.parallel.tensor)

    @property
    def accumulation_steps(self) -> int:
        """Gradient accumulation: microbatches per replica and step."""
        return self.train.global_batch_size // (self.data_parallel * self.train.micro_batch_size)
