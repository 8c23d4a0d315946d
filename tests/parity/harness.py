"""Train a small model on a topology; compare losses, gradients, norms and weights with one process.

`train` runs on every rank with the trainer and optimizer of real runs; `assemble` builds global tensors from the ranks' boxes;
`differences` compares them with one process, within the tolerances of every topology.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modeling.data.prefetch import Batch
from modeling.data.records import PADDING
from modeling.training.step import take_expert_load, take_logit_clip
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel import ShardedAdamW, collectives
from parallel import device as devices
from parallel.checkpoint import checkpoint
from parallel.mesh import Axis
from parallel.optimizer.buckets import ShardBox
from profiles.recompute import Recompute
from profiles.schema import Profile
from tests.pool import Pool

STEPS = 2  # the second loss depends on an update, and the second update on states of the first
BATCH, SEQUENCE = 8, 32
MANY_STEPS = 10  # in which small differences would grow
RATE = 3e-3
# Tolerances, all relative. The losses of a router are squares of its weights, which AdamW moves by full steps however small a
# gradient is; the counts of tokens must be equal at either.
LOSS, GRADIENT, NORM, WEIGHT, ROUTER, LOGIT = 1e-5, 1e-5, 1e-4, 1e-3, 1e-4, 1e-4

LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "initializer_range": 0.1}  # fmt: skip
GPT = {
    **LLAMA,
    "architecture": "gpt",
    "num_key_value_heads": 8,
    "vocab_size": 101,
}  # with biases and tied embeddings
LINEAR = {
    "num_hidden_layers": 3, "full_attention_every": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 12, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN = {
    **LLAMA, **LINEAR, "architecture": "qwen3_next", "head_dim": 16, "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 24,
}  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "llama 4 layers": {**LLAMA, "num_hidden_layers": 4},
    "llama tied": {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "vocab_size": 101,
                   "scaled_initialization": True},
    "llama completep": {**LLAMA, "tie_word_embeddings": True, "parametrization": "completep", "base_hidden_size": 16,
                        "base_num_hidden_layers": 1},
    "mistral": {**LLAMA, "architecture": "mistral", "sliding_window": 9},
    "gemma2": {
        **LLAMA, "architecture": "gemma2", "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 9,
        "full_attention_every": 2, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 0.8,
        "final_logit_softcapping": 1.5, "vocab_size": 101,
    },
    "gemma3": {
        **LLAMA, "architecture": "gemma3", "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 9,
        "full_attention_every": 2, "rope_local_base_freq": 100.0, "query_pre_attn_scalar": 20,
    },
    "olmo3": {
        **LLAMA, "architecture": "olmo3", "num_hidden_layers": 3, "sliding_window": 9, "full_attention_every": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen2": {**LLAMA, "architecture": "qwen2", "sliding_window": 9, "max_window_layers": 1},
    "smollm3": {**LLAMA, "architecture": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2},
    "granite": {
        **LLAMA, "architecture": "granite", "tie_word_embeddings": True, "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 2.0,
    },
    # without biases: the exact gradients of the key biases that are not rotated are zero
    "glm4": {**LLAMA, "architecture": "glm4", "partial_rotary_factor": 0.5, "attention_bias": False, "vocab_size": 101},
    # without biases, as above
    "gpt_neox": {
        **LLAMA, "architecture": "gpt_neox", "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "attention_bias": False,
        "use_parallel_residual": True,
    },
    "dbrx": {
        **LLAMA, "architecture": "dbrx", "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 0.5,
    },
    "gpt_oss": {
        **LLAMA, "architecture": "gpt_oss", "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 9, "full_attention_every": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "mixtral": {**LLAMA, "architecture": "mixtral", "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **LLAMA, "architecture": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 16, "num_experts": 8,
        "num_experts_per_tok": 3, "norm_topk_prob": False,
    },
    "deepseek_v3": {
        **LLAMA, "architecture": "deepseek_v3", "num_key_value_heads": 8, "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5,
    },
    "multi-token": {
        **LLAMA, "architecture": "deepseek_v3", "num_key_value_heads": 8, "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "num_nextn_predict_layers": 2, "vocab_size": 101,
    },
    "qwen3_next": QWEN,
    "qwen3_next multi-token": {**QWEN, "num_nextn_predict_layers": 1},
    "qwen3_5": {**LLAMA, **LINEAR, "architecture": "qwen3_5", "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    "qwen3_5 multi-token": {
        **LLAMA, **LINEAR, "architecture": "qwen3_5", "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1,
        "vocab_size": 101,
    },
    "olmo_hybrid": {
        **LLAMA, **LINEAR, "architecture": "olmo_hybrid", "linear_allow_neg_eigval": True, "no_rope_layer_interval": 1,
    },
    "gpt": GPT,
    "gpt 4 layers": {**GPT, "num_hidden_layers": 4},
    "gpt dropout": {**GPT, "dropout": 0.1, "mlp_dropout": 0.1},
}  # fmt: skip


BOUNDARIES = ((5, 19), (11,), (), (16, 17, 30))  # positions where documents begin, for consecutive samples


@dataclass(frozen=True)
class Case:
    """A model and the topology it is trained on; by default one process."""

    model: str = "llama"
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    microbatches: int = 2  # per step and pipeline rank
    sequence_parallel: bool = True
    sharding: str = "zero1"
    shard_degree: int | None = None
    keep_gathered: bool = False
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    precision: str = "float32"
    fp8_recipe: str = "rowwise"
    balance: str = "sequence"
    capacity: float | None = None  # of the experts
    documents: bool = False  # whether attention is masked to documents
    # sft: the loss counts some tokens only; dpo, orpo: two rows of the batch are a pair, or several with `documents`
    objective: str = "pretrain"
    optimizer: str = "adamw"
    muon_heads: bool = False
    qk_clip: float | None = None
    lora: tuple[
        str, ...
    ] = ()  # targets of updates of rank 4, which have dropout unless they belong to experts
    in_graph: bool = False  # whether FSDP's collectives are operators of the blocks, as on neuron
    overlap_chunks: int | None = None
    native: bool = False  # whether to use the backend's reductions, as on accelerators
    eager: bool = (
        True  # whether to save for backward what eager runs save, not graphs; the run itself is always eager
    )

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def rows(self) -> int:
        """Rows per sample."""
        return 2 if self.objective in ("dpo", "orpo") else 1

    @property
    def dropout(self) -> float:
        """Dropout rate of LoRA's updates."""
        experts = MODELS[self.model].get("num_experts") and {"gate_up", "down"} & {*self.lora}
        return 0.0 if experts else 0.2

    @property
    def packs(self) -> bool:
        """Whether the two rows of a sample hold several pairs."""
        return self.rows == 2 and self.documents

    @property
    def computes_reference(self) -> bool:
        """Whether each step computes the reference's log-probabilities, with the model without its updates."""
        return self.objective == "dpo" and bool(self.lora)

    @property
    def reference(self) -> Case:
        """The same mathematics on one process."""
        same = (
            "model",
            "documents",
            "precision",
            "balance",
            "capacity",
            "objective",
            "optimizer",
            "muon_heads",
            "qk_clip",
            "lora",
        )
        return Case(**{name: getattr(self, name) for name in same})

    def profile(self) -> Profile:
        """The profile."""
        size = BATCH // self.rows
        micro_batch = max(1, size // self.data // (self.microbatches * self.pipeline))
        return Profile.model_validate(
            {
                "name": "parity",
                "model": MODELS[self.model],
                "tokenizer": {"source": "train"},
                "data": {"sources": [{"kind": "python-docs"}]},
                "objective": {
                    "kind": self.objective, "precompute_reference": not self.computes_reference,
                    **({"packing": True} if self.packs else {}),
                },
                **({"lora": {"rank": 4, "targets": [*self.lora], "dropout": self.dropout}} if self.lora else {}),
                "parallel": {
                    "tensor": self.tensor, "pipeline": self.pipeline, "context": self.context, "expert": self.expert,
                    "sequence_parallel": self.sequence_parallel, "schedule": self.schedule,
                    "data_sharding": self.sharding, "shard_degree": self.shard_degree,
                    "keep_gathered": self.keep_gathered, "overlap_chunks": self.overlap_chunks,
                },
                "train": {
                    "steps": STEPS, "global_batch_size": size, "micro_batch_size": micro_batch, "sequence_length": SEQUENCE,
                    "learning_rate": RATE, "optimizer": self.optimizer, "muon_heads": self.muon_heads, "qk_clip": self.qk_clip,
                    "precision": self.precision, "fp8_recipe": self.fp8_recipe,
                    "recompute": self.recompute, "document_masks": self.documents,
                    "balance": self.balance, "balance_coefficient": 0.1, "router_z_coefficient": 0.01,
                    "capacity_factor": self.capacity,
                },
                "compile": {"enabled": not self.eager},
                "cluster": {"device": "cpu", "devices_per_node": self.world, "threads": 1},
            }
        )  # fmt: skip


@dataclass
class Results:
    """A run's results per step, and per global tensor once the ranks' boxes are assembled."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    router: list[float] = field(default_factory=list)  # take_expert_load, summed over ranks
    modules: list[float] = field(default_factory=list)  # losses of multi-token prediction
    logits: list[float] = field(
        default_factory=list
    )  # with QK-clip: the largest, and the number of clipped heads
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the last
    boxes: list[tuple[str, ShardBox, Tensor]] = field(default_factory=list)  # of this rank


def batch(step: int, objective: str = "pretrain", padded: bool = False) -> Tensor:
    """Token ids (batch, s + 1) of a step: the same for all topologies, and partly learnable.

    Except for pretraining, the first tokens of each sample are its prompt, whose length differs between samples. In pairs that
    are not packed, up to 9 tokens after it are padding, at the end.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 100, (BATCH, SEQUENCE + 1), generator=generator)
    repeated = torch.rand(tokens.shape, generator=generator) < 0.5
    tokens = tokens.where(~repeated, torch.arange(SEQUENCE + 1) % 7)
    if objective == "pretrain":
        return tokens
    numbers = torch.arange(BATCH)[:, None]
    prompts = torch.arange(SEQUENCE + 1) < (3 * numbers + step) % SEQUENCE
    tokens = tokens.where(~prompts, ~tokens)
    ends = SEQUENCE + 1 - (2 * numbers + step) % 10
    return tokens.where(prompts | (torch.arange(SEQUENCE + 1) < ends), PADDING) if padded else tokens


def train(
    case: Case,
    fault: Callable[[Trainer, ShardedAdamW], None] | None = None,
    steps: range = range(STEPS),
    resume: Path | None = None,
    save: dict[int, Path] | None = None,
) -> Results:
    """Train on this rank.

    Args:
        fault: breaks the trainer before training, for negative controls.
        steps: the numbers of the steps to train.
        resume: checkpoint to start from.
        save: checkpoint folders by number of completed steps.
    """
    with pytest.MonkeyPatch.context() as patch:
        device = replace(devices.CPU, supports_reduction=case.native, gathers_in_graph=case.in_graph)
        patch.setitem(devices.KINDS, "cpu", device)
        if case.native:
            patch.setattr(collectives, "start_all_gather", completed_all_gather)
            patch.setattr(collectives, "start_all_gather_into", completed_all_gather_into)
        return _train(case, fault, steps, resume, save)


# Concurrent all-gathers of gloo corrupt the heap (torch 2.13). On CPUs, real runs start none; with native reductions, the tests
# wait for each before it returns.
start_all_gather, start_all_gather_into = collectives.start_all_gather, collectives.start_all_gather_into


def completed_all_gather(x: Tensor, axis: Axis) -> Tensor:
    return collectives.wait(start_all_gather(x, axis))


def completed_all_gather_into(out: Tensor, axis: Axis) -> dist.Work:
    work = start_all_gather_into(out, axis)
    work.wait()
    return work


def _train(
    case: Case,
    fault: Callable[[Trainer, ShardedAdamW], None] | None,
    steps: range,
    resume: Path | None,
    save: dict[int, Path] | None,
) -> Results:
    trainer = Trainer(case.profile())
    optimizer = make_optimizer(trainer)
    try:
        if fault:
            fault(trainer, optimizer)
        if resume:
            checkpoint.load(resume, optimizer)
        results = Results()
        samples = BATCH // trainer.mesh.data.size
        first = trainer.mesh.data.rank * samples
        for step in steps:
            optimizer.begin_step(trainer.profile.accumulation_steps)
            tokens = batch(step, case.objective, case.rows == 2 and not case.packs)
            local = tokens[first : first + samples] if trainer.reads_samples else None
            counted = int((tokens[:, 1:] >= 0).sum()) if case.rows == 1 else BATCH // 2
            reference = None
            if case.objective == "dpo" and not case.computes_reference:
                answers = trainer.profile.answers_per_row
                reference = (-torch.arange(first, first + samples).float() - step).repeat(answers, 1).T
            starts = document_starts(first // case.rows, samples, rows=case.rows) if case.documents else None
            numbers = answer_numbers(starts) if case.packs else None
            loss = trainer.forward_backward(
                Batch(local, starts, numbers, reference),
                1 / counted,
                (step * BATCH + first) // case.rows,
                step=step + 1,
                pairs_per_token=1 / SEQUENCE,
            )
            results.router += trainer.sum(take_expert_load(trainer)).tolist()
            results.modules += trainer.sum(trainer.module_losses).tolist()
            if step == steps[0]:
                optimizer.reduce()
                results.boxes += saved_boxes("gradients", gradient_boxes(optimizer))
            clip = take_logit_clip(trainer)
            update = optimizer.step(RATE, row_factors=clip and clip.row_factors)
            results.norms.append(update.gradient_norm.item())
            if clip:
                results.logits += [number.item() for number in clip.results]
            results.losses += trainer.sum(loss[None]).tolist()
            if save and step + 1 in save:
                about = {"step": step + 1, "profile": trainer.profile.model_dump(mode="json")}
                checkpoint.save(save[step + 1], optimizer, about)
        optimizer.gather_parameters()  # the next forward would wait for them; some tests read them
        results.boxes += saved_boxes(
            "weights", ((box, states["master"]) for box, states in optimizer.state_boxes())
        )
        return results
    finally:
        trainer.mesh.close()


def document_starts(
    first: int, count: int, known: Sequence[Sequence[int]] = BOUNDARIES, rows: int = 1
) -> Tensor:
    """Start of each token's document (count, s), from sample `first` on; a sample's `rows` are equal."""
    starts = torch.zeros(count, SEQUENCE, dtype=torch.int64)
    for i in range(count):
        for boundary in known[(first + i // rows) % len(known)]:
            starts[i, boundary:] = boundary
    return starts


def answer_numbers(starts: Tensor) -> Tensor:
    """Number of each token's document, -1 if the next token is in another; all shapes are (rows, s)."""
    begins = starts == torch.arange(SEQUENCE)
    following = torch.cat((begins[:, 1:], begins[:, :1]), 1)  # the last is the end of a document, too
    return (begins.cumsum(1) - 1).where(~following, -1)


def gradient_boxes(optimizer: ShardedAdamW) -> Iterator[tuple[ShardBox, Tensor]]:
    """This rank's shards of the summed gradients; valid between `reduce` and `step`."""
    for bucket in optimizer.buckets:
        for box in bucket.boxes():
            yield box, box.view(bucket.gradient_shard)


def saved_boxes(kind: str, boxes: Iterable[tuple[ShardBox, Tensor]]) -> list[tuple[str, ShardBox, Tensor]]:
    """Copies of the boxes that this rank saves."""
    return [(kind, box, view.clone()) for box, view in boxes if box.saved]


def assemble(ranks: list[Results]) -> Results:
    """Build global tensors from the boxes of all ranks; asserts that each element comes from exactly one."""
    results = replace(ranks[0], boxes=[])
    for kind, box, view in (entry for rank in ranks for entry in rank.boxes):
        tensors: dict[str, Tensor] = getattr(results, kind)
        tensor = tensors.setdefault(box.name, torch.full(box.shape, math.nan))
        index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        assert tensor[index].isnan().all(), f"{kind}: {box.name} comes from two ranks"
        tensor[index] = view
    for tensors in (results.gradients, results.weights):
        assert not any(tensor.isnan().any() for tensor in tensors.values()), "a box comes from no rank"
    return results


@cache
def one_process(case: Case, steps: int = STEPS) -> Results:
    """Results of a case on one process, trained once."""
    assert case.world == 1
    return assemble([train(case, steps=range(steps))])


def run(case: Case, pool: Pool, fault: Callable | None = None, steps: int = STEPS) -> Results:
    """Results of a case on a pool of processes."""
    return assemble(pool.run(train, case.world, case=case, fault=fault, steps=range(steps)))


def differences(results: Results, reference: Results) -> list[str]:
    """Every violated tolerance: the kind, the step or tensor, and the distance."""
    found = []
    for kind, tolerance in (
        ("losses", LOSS),
        ("norms", NORM),
        ("router", ROUTER),
        ("modules", LOSS),
        ("logits", LOGIT),
    ):
        pairs = zip(getattr(results, kind), getattr(reference, kind), strict=True)
        for number, (found_value, exact) in enumerate(pairs):
            if not math.isclose(found_value, exact, rel_tol=tolerance):
                found.append(f"{kind}, step {number}: {found_value} instead of {exact}")
    total_norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in reference.gradients.values()))
    # Where the exact gradient is zero, AdamW turns rounding errors into full-size steps; they do not change outputs.
    largest_distance = 2 * RATE * len(reference.losses)
    for kind, tolerance, zero in (
        ("gradients", GRADIENT, GRADIENT * total_norm),
        ("weights", WEIGHT, largest_distance),
    ):
        tensors, exact = getattr(results, kind), getattr(reference, kind)
        assert tensors.keys() == exact.keys()
        for name, tensor in exact.items():
            distance = (tensors[name] - tensor).norm()
            allowed = tolerance * tensor.norm()
            if is_exactly_zero(name, reference):
                allowed = zero * math.sqrt(tensor.numel())
            if not distance <= allowed:
                found.append(
                    f"{kind}, {name}: distance {distance:.1e} from a tensor of norm {tensor.norm():.1e}"
                )
    return found


def is_exactly_zero(name: str, reference: Results) -> bool:
    """Whether the exact gradient is zero: without RoPE, a key bias shifts all scores of a query equally."""
    return name.endswith("qkv.k.bias") and "positions.weight" in reference.gradients
