"""What a profile may say: one class a section, each key with its type, its default and a sentence about it.

Types are checked here, and what one section can know by itself; rules between sections are in check.py. A resolved
profile is frozen: every step sees the same one, and it is what is stored with the run.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from parallel.constraints import kv_replicas
from profiles.model import Count, Model, Section, Size

__all__ = [
    "Checkpoint",
    "Cluster",
    "Compile",
    "Data",
    "Evaluate",
    "Init",
    "Model",
    "Parallel",
    "Profile",
    "Source",
    "Tokenizer",
    "Train",
]

Natural = Annotated[int, Field(ge=0, le=2**31 - 1)]
Wide = Annotated[int, Field(ge=1, le=2**63 - 1)]
Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
WORD = r"^[\w@.,+-]+$"
LINE = r"^[^\x00-\x1f\x7f]+$"
OPTION = r"^--[a-z][a-z-]*(=[^\x00-\x1f\x7f]+)?$"
TIME = r"^(\d+-)?\d+(:\d+){0,2}$"
FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def _as_text(value: Any) -> Any:
    """Minutes, which YAML takes for a number."""
    return str(value) if type(value) is int else value


class Tokenizer(Section):
    """Where the tokenizer comes from."""

    source: str = Field(
        min_length=1,
        description='"train" on the data, a hub repository (org/name), a folder, or an s3:// folder',
    )
    revision: str | None = Field(None, description="commit, tag or branch of a hub repository")
    vocabulary_size: Count | None = Field(
        None,
        description="size to train; of others, the size it is known to have, so that planning can check it",
    )


class Source(Section):
    """One source of text, or of tokens."""

    kind: Literal["python-docs", "files", "hub", "tokens", "megatron"] = Field(
        description="Python's own documentation; files of text (txt, md, json lines plain or as .gz or .zst, parquet, "
        "arrow); a data set of the hub; a folder written by save_to_disk with a column of token ids; Megatron .bin/.idx"
    )
    path: str | None = Field(
        None,
        min_length=1,
        description="of files and tokens: a file, a folder or a pattern, of megatron: the files' common prefix or a "
        "pattern of .idx files; local or s3://",
    )
    repository: str | None = Field(None, min_length=1, description="of hub: org/name")
    config: str | None = Field(
        None, min_length=1, description="of hub: configuration, where there are several"
    )
    split: str = Field("train", min_length=1, description="of hub: the split to read")
    revision: str | None = Field(None, min_length=1, description="of hub: commit, tag or branch")
    streaming: bool = Field(
        False, description="of hub: read over the network as it is needed; false: download files first"
    )
    text: str | None = Field(
        None, min_length=1, description="name of the field with the text, or with token ids; null: data.text"
    )
    lines: bool = Field(False, description="of plain text: a document is a line; false: a file")
    anonymous: bool = Field(False, description="of s3:// paths: read without credentials")
    weight: float | None = Field(
        None,
        gt=0,
        description="share of the training samples, as a proportion; all sources have one or none has",
    )
    use: Literal["split", "train", "validation"] = Field(
        "split", description="train on it, validate on it, or split it by data.validation_fraction"
    )


class Data(Section):
    """The text to train on."""

    sources: list[Source] = Field(
        min_length=1, description="where the text comes from, read one after another"
    )
    text: str = Field("text", min_length=1, description="name of the field that holds a record's text")
    validation_fraction: Fraction = Field(
        0.01, description="share of documents, by their hash, held out from training"
    )
    append_eos: bool = Field(True, description="end every document with the tokenizer's EOS token")
    prepend_bos: bool = Field(False, description="begin every document with the tokenizer's BOS token")
    deduplicate: bool = Field(False, description="keep one of equal documents of a source")
    minimum_length: Natural = Field(0, description="characters that a document must have to be kept")
    shuffle_tokens: Wide | None = Field(
        None,
        description="tokens that are shuffled together, where not all of the data fits a node's disk; null: all",
    )
    cache_gigabytes: Annotated[float, Field(gt=0)] = Field(
        200.0, description="disk of a node for data that is read from s3://"
    )
    maximum_missing: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="share of records without text above which the data is refused"
    )


class Init(Section):
    """Pretrained weights to start from."""

    from_: str | None = Field(
        None,
        alias="from",
        min_length=1,
        description="hub repository, folder or s3:// folder; null: from scratch",
    )
    revision: str | None = Field(None, description="commit, tag or branch of a hub repository")


class Parallel(Section):
    """How the model is spread; the data-parallel degree is what the cluster has left over."""

    tensor: Size = Field(1, description="tensor-parallel degree")
    pipeline: Size = Field(1, description="pipeline stages")
    context: Size = Field(1, description="context-parallel degree: parts a sequence is split into")
    kv_replication: Count | None = Field(
        None, description="ranks that hold the same KV head; derived, must agree where given"
    )
    sequence_parallel: bool = Field(
        True, description="split activations between layers over the tensor ranks"
    )
    zero1: bool = Field(True, description="shard optimizer states over data and context ranks")
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = Field(
        "1f1b",
        description="order of a pipeline's microbatches; zero_bubble runs eager and without recomputation",
    )
    pipeline_cuts: list[Count] | None = Field(
        None, description="numbers of the layers that begin the second and later stages; null: balanced"
    )


class Train(Section):
    """The training itself: what determines the weights that come out, but for the data."""

    steps: Count | None = Field(None, description="optimizer steps; null where train.epochs is given")
    epochs: Count | None = Field(
        None,
        description="times through the data, as many steps as that takes; null where train.steps is given",
    )
    global_batch_size: Count = Field(description="samples a step, over all ranks")
    micro_batch_size: Size = Field(1, description="samples a forward pass on one rank")
    sequence_length: Size = Field(description="tokens a sample")
    learning_rate: Rate = Field(description="its highest value")
    minimum_learning_rate: Rate = Field(0.0, description="its value at the last step")
    warmup_steps: Natural = Field(0, description="steps of linear rise from zero")
    constant_steps: Natural = Field(0, description="steps at the highest value, after the rise")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="form of the decay")
    weight_decay: Rate = Field(0.1, description="AdamW's decoupled weight decay")
    norm_weight_decay: bool = Field(False, description="decay weights of norms and biases too")
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field(
        (0.9, 0.95), description="AdamW's betas"
    )
    epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    clip: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="highest gradient norm; null: no clipping"
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(
        1234, description="of initial weights, data order and dropout"
    )
    precision: Literal["float32", "bf16"] = Field(
        "bf16", description="of weights and activations; master weights are float32"
    )
    gradient_dtype: Literal["float32", "bf16"] = Field("float32", description="that gradients are summed in")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in backward"
    )
    recompute_layers: Count | None = Field(
        None, description="layers of each pipeline stage that this applies to, from its first on; null: all"
    )
    document_masks: bool = Field(
        False, description="attention stays within a document, and positions begin again with each"
    )
    loss: str | None = Field(
        None,
        pattern=FUNCTION,
        description="module:function of the user's, (logits (tokens, vocabulary) float32, targets (tokens), -100 where nothing "
        "counts) -> their sum, a 0-dim tensor; null: cross-entropy",
    )
    log_every: Count = Field(
        1, description="steps between lines in the job's log; metrics.jsonl has every step"
    )
    spike_factor: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="a step whose loss is so many times the usual one is skipped; null: only where it is not finite",
    )
    bad_steps: Count = Field(
        10,
        description="steps skipped in a row after which the run goes back to a checkpoint, without their samples",
    )
    rollbacks: Natural = Field(2, description="times that a run goes back before it stops")


class Compile(Section):
    """Compilation of the training graphs."""

    enabled: bool = Field(True, description="compile, ahead of time; false: eager")
    backend: str | None = Field(
        None,
        min_length=1,
        description="inductor or neuron; null: the device's own",
    )
    processes: Count | None = Field(None, description="graphs compiled at a time; null: one a core")
    memory_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="memory that each process of a compile may take; null: this machine's, shared out"
    )
    flags: str | None = Field(
        None, min_length=1, description="flags of the Neuron compiler (NEURON_CC_FLAGS)"
    )


class Checkpoint(Section):
    """When training is saved, and what a run resumes from."""

    every: Natural = Field(0, description="steps between checkpoints; 0: only at the end")
    keep: Natural = Field(3, description="newest checkpoints that are kept; 0: all")
    keep_every: Natural = Field(
        0, description="checkpoints of multiples of this many steps are kept for good; 0: none"
    )
    async_: bool = Field(False, alias="async", description="write while training goes on")
    resume: Literal["newest", "none"] | Natural = Field(
        "newest", description='"newest", "none", or the number of a step'
    )
    on_stop: bool = Field(True, description="save when it is asked to stop, before it ends")
    weights: bool = Field(False, description="resume the weights alone, with a new optimizer and schedule")


class Evaluate(Section):
    """Evaluation during training; there is always one at the end."""

    every: Natural = Field(0, description="steps between evaluations; 0: only at the end")
    batches: Count | None = Field(
        None, description="microbatches a data rank, of each during training; null: all held-out text"
    )
    tolerance: Rate = Field(
        0.0,
        description="rise of held-out loss, in nats a token, at which continual pretraining still promotes a model",
    )
    metrics: list[Annotated[str, Field(pattern=FUNCTION)]] = Field(
        [],
        description="module:function of the user's, each called as train.loss is; their means a token go into metrics.jsonl "
        "under the functions' names",
    )


class Cluster(Section):
    """Where the processes run."""

    launcher: Literal["local", "slurm"] = Field("local", description="this machine, or a Slurm cluster")
    nodes: Size = Field(1, description="number of machines")
    devices_per_node: Size = Field(1, description="devices, and so processes, on each")
    device: Literal["cpu", "cuda", "neuron"] = Field(description="kind of device; never guessed")
    accelerator: Literal["trn1", "trn2", "trn3", "h100", "h200"] | None = Field(
        None, description="model of the device, whose memory and speed planning counts with"
    )
    node_price: Annotated[float, Field(gt=0)] | None = Field(
        None, description="price of a node an hour, in any currency, for planning"
    )
    work_dir: str | None = Field(None, min_length=1, description="folder for runs where the store is on S3")
    threads: Count | None = Field(
        None, description="torch threads a process on CPUs; null: its share of the cores"
    )
    retries: Natural = Field(
        2,
        description="further attempts after failures in a row; a new checkpoint starts the count again",
    )
    hang_seconds: Annotated[float, Field(gt=0)] | None = Field(
        20.0, description="a step may take so long beyond hang_factor median steps; null: it is not watched"
    )
    hang_factor: Annotated[float, Field(ge=1)] = Field(5.0, description="median steps that a step may take")
    partition: str | None = Field(
        None, pattern=WORD, description="Slurm partition; null: the cluster's default"
    )
    shards_partition: str | None = Field(
        None,
        pattern=WORD,
        description="Slurm partition that tokenizes shards, side by side; null: this machine does",
    )
    account: str | None = Field(None, pattern=WORD, description="Slurm account; null: the user's default")
    time: Annotated[str, Field(pattern=TIME), BeforeValidator(_as_text)] | None = Field(
        None,
        description="Slurm time limit of a job, as in 1-12:00:00; a run goes on in the next one",
    )
    time_left: Count = Field(
        120, description="seconds before the time limit at which training is saved and queued again"
    )
    grace: Natural = Field(
        30, description="seconds that training has to save when it is stopped, before it is ended by force"
    )
    constraint: str | None = Field(
        None, pattern=LINE, description="features that Slurm's nodes must have, as in trn2&efa"
    )
    exclusive: bool = Field(True, description="whether Slurm gives whole nodes")
    slurm: list[Annotated[str, Field(pattern=OPTION)]] = Field(
        [], description="further options of sbatch, as in --reservation=name"
    )
    trace: Annotated[tuple[Count, Count], Field(strict=False)] | None = Field(
        None, description="first and last step of which torch.profiler writes a Chrome trace; null: none"
    )


class Profile(Section):
    """A whole run: sections as in the YAML file, and what follows from them."""

    name: str = Field(
        pattern=f"^{NAME}$", description="of the profile, and of the run unless it gets its own"
    )
    description: str = Field("", description="one line for people")
    model: Model = Field(description="what is trained")
    tokenizer: Tokenizer = Field(description="from text to tokens")
    data: Data = Field(description="what it is trained on")
    init: Init = Field(Init(), description="what it starts from")
    parallel: Parallel = Field(Parallel(), description="how it is spread")
    train: Train = Field(description="how it is trained")
    compile: Compile = Field(Compile(), description="graphs ahead of time")
    checkpoint: Checkpoint = Field(Checkpoint(), description="saving and resuming")
    evaluate: Evaluate = Field(Evaluate(), description="held-out loss on the way")
    cluster: Cluster = Field(description="where it runs")

    @property
    def world_size(self) -> int:
        """Processes of the run: nodes × devices_per_node."""
        return self.cluster.nodes * self.cluster.devices_per_node

    @property
    def model_parallel(self) -> int:
        """Ranks that one copy of the model is spread over: tensor × pipeline × context."""
        return self.parallel.tensor * self.parallel.pipeline * self.parallel.context

    @property
    def data_parallel(self) -> int:
        """Copies of the model."""
        return self.world_size // self.model_parallel

    @property
    def kv_replication(self) -> int:
        """Tensor ranks that hold the same KV head: max(1, tensor / KV heads)."""
        return kv_replicas(self.model.num_key_value_heads, self.parallel.tensor)

    @property
    def accumulation_steps(self) -> int:
        """Microbatches that each copy of the model works through in a step."""
        return self.train.global_batch_size // (self.data_parallel * self.train.micro_batch_size)
