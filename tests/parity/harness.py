"""Train a case for some steps, on one process or spread over a pool's, and compare what came out.

`train` runs on every rank with the trainer and optimizer of training itself; `assemble` puts the ranks' pieces
together by their global boxes; `differences` holds them against one process, at the tolerances that any topology must keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel import ZeRO1
from parallel import device as devices
from parallel.checkpoint import checkpoint
from parallel.optimizer.buckets import ShardBox
from profiles.schema import Profile
from tests.pool import Pool

STEPS, BATCH, SEQUENCE = 20, 8, 32
RATE = 3e-3
LOSS, GRADIENT, NORM, WEIGHT = 1e-5, 1e-5, 1e-4, 1e-3  # tolerances, all relative

LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "initializer_range": 0.1}  # fmt: skip
GPT = {**LLAMA, "architecture": "gpt", "num_key_value_heads": 8, "vocab_size": 101}  # with biases, and tied
MODELS = {
    "llama": LLAMA,
    "llama 4 layers": {**LLAMA, "num_hidden_layers": 4},
    "llama tied": {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "vocab_size": 101},
    "gpt": GPT,
    "gpt 4 layers": {**GPT, "num_hidden_layers": 4},
    "gpt dropout": {**GPT, "dropout": 0.1},
}  # fmt: skip


BOUNDARIES = ((5, 19), (11,), (), (16, 17, 30))  # places where documents begin, of one sample after another


@dataclass(frozen=True)
class Case:
    """A model and the topology that it is trained on; by default one process."""

    model: str = "llama"
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    sequence_parallel: bool = True
    zero1: bool = True
    schedule: str = "1f1b"
    recompute: str = "none"
    recompute_layers: int | None = None
    precision: str = "float32"
    documents: bool = False  # whether attention stays within documents
    native: bool = False  # whether the backend's own reductions are used, as on accelerators

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def reference(self) -> Case:
        """The same mathematics on one process."""
        return Case(self.model, documents=self.documents, precision=self.precision)

    def profile(self) -> Profile:
        """The run's profile; a pipeline gets microbatches of one sample, others two microbatches a step."""
        micro_batch = 1 if self.pipeline > 1 else BATCH // self.data // 2
        return Profile.model_validate(
            {
                "name": "parity",
                "model": MODELS[self.model],
                "tokenizer": {"source": "train"},
                "data": {"sources": [{"kind": "python-docs"}]},
                "parallel": {
                    "tensor": self.tensor, "pipeline": self.pipeline, "context": self.context,
                    "sequence_parallel": self.sequence_parallel, "zero1": self.zero1, "schedule": self.schedule,
                },
                "train": {
                    "steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": micro_batch, "sequence_length": SEQUENCE,
                    "learning_rate": RATE, "precision": self.precision, "recompute": self.recompute,
                    "recompute_layers": self.recompute_layers, "document_masks": self.documents,
                },
                "cluster": {"device": "cpu", "devices_per_node": self.world, "threads": 1},
            }
        )  # fmt: skip


@dataclass
class Results:
    """What a run leaves: by step, and by global tensor once the ranks' pieces are assembled."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the last
    pieces: list[tuple[str, ShardBox, Tensor]] = field(default_factory=list)


def batch(step: int) -> Tensor:
    """Token ids (batch, s + 1) of a step: the same for all topologies, and learnable in part."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 100, (BATCH, SEQUENCE + 1), generator=generator)
    repeated = torch.rand(tokens.shape, generator=generator) < 0.5
    return tokens.where(~repeated, torch.arange(SEQUENCE + 1) % 7)


def train(
    case: Case,
    fault: Callable[[Trainer, ZeRO1], None] | None = None,
    steps: range = range(STEPS),
    resume: Path | None = None,
    save: dict[int, Path] | None = None,
) -> Results:
    """Train on this rank.

    Args:
        fault: spoils the trainer before, for negative controls.
        steps: by their numbers.
        resume: checkpoint to start from.
        save: folders of the checkpoints to write after so many steps.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices.KINDS, "cpu", replace(devices.CPU, supports_reduction=case.native))
        trainer = Trainer(case.profile(), start=False)
    try:
        optimizer = make_optimizer(trainer)
        if fault:
            fault(trainer, optimizer)
        if resume:
            checkpoint.load(resume, optimizer)
        results = Results()
        own = BATCH // trainer.mesh.data.size
        first = trainer.mesh.data.rank * own
        for step in steps:
            optimizer.begin_step(trainer.profile.accumulation_steps)
            mine = batch(step)[first : first + own] if trainer.reads_samples else None
            starts = document_starts(first, own) if case.documents else None
            loss = trainer.forward_backward(mine, 1 / (BATCH * SEQUENCE), step * BATCH + first, starts)
            if step == steps[0]:
                optimizer.reduce()
                results.pieces += kept("gradients", optimizer.gradient_boxes())
            results.norms.append(optimizer.step(RATE).gradient_norm)
            results.losses += trainer.sum(loss[None])
            if save and step + 1 in save:
                checkpoint.save(save[step + 1], optimizer, {"step": step + 1})
        results.pieces += kept("weights", ((p, states["master"]) for p, states in optimizer.state_boxes()))
        return results
    finally:
        trainer.mesh.close()


def document_starts(first: int, samples: int, known: Sequence[Sequence[int]] = BOUNDARIES) -> Tensor:
    """Where each token's document begins (samples, s), in the samples from `first` on."""
    starts = torch.zeros(samples, SEQUENCE, dtype=torch.int64)
    for i in range(samples):
        for boundary in known[(first + i) % len(known)]:
            starts[i, boundary:] = boundary
    return starts


def kept(kind: str, pieces: Iterable[tuple[ShardBox, Tensor]]) -> list[tuple[str, ShardBox, Tensor]]:
    """Copies of the pieces that this rank is to save."""
    return [(kind, piece, view.clone()) for piece, view in pieces if piece.saved]


def assemble(ranks: list[Results]) -> Results:
    """Global tensors from the pieces of all ranks, each element from exactly one."""
    whole = replace(ranks[0], pieces=[])
    for kind, piece, view in (entry for rank in ranks for entry in rank.pieces):
        tensors: dict[str, Tensor] = getattr(whole, kind)
        tensor = tensors.setdefault(piece.name, torch.full(piece.shape, math.nan))
        index = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
        assert tensor[index].isnan().all(), f"{kind}: {piece.name} comes from two ranks"
        tensor[index] = view
    for tensors in (whole.gradients, whole.weights):
        assert not any(tensor.isnan().any() for tensor in tensors.values()), "a piece comes from no rank"
    return whole


@cache
def one_process(case: Case) -> Results:
    """A case's reference."""
    assert case.world == 1
    return assemble([train(case)])


def run(case: Case, pool: Pool, fault: Callable | None = None) -> Results:
    """A case on a pool of processes."""
    return assemble(pool.run(train, case.world, case=case, fault=fault))


def differences(results: Results, reference: Results) -> list[str]:
    """Where a tolerance is not kept: the kind, the step or tensor, and how far apart."""
    found = []
    for kind, tolerance in (("losses", LOSS), ("norms", NORM)):
        pairs = zip(getattr(results, kind), getattr(reference, kind), strict=True)
        for step, (ours, exact) in enumerate(pairs):
            if not math.isclose(ours, exact, rel_tol=tolerance):
                found.append(f"{kind}, step {step}: {ours} for {exact}")
    whole = math.sqrt(sum(float(gradient.square().sum()) for gradient in reference.gradients.values()))
    # Of exact zeros AdamW makes steps of full size in any direction, out of rounding errors; they change no output.
    furthest = 2 * RATE * STEPS
    for kind, tolerance, zero in (("gradients", GRADIENT, GRADIENT * whole), ("weights", WEIGHT, furthest)):
        ours, exact = getattr(results, kind), getattr(reference, kind)
        assert ours.keys() == exact.keys()
        for name, tensor in exact.items():
            distance = (ours[name] - tensor).norm()
            allowed = tolerance * tensor.norm()
            if is_exactly_zero(name, reference):
                allowed = zero * math.sqrt(tensor.numel())
            if not distance <= allowed:
                found.append(f"{kind}, {name}: {distance:.1e} from a tensor of norm {tensor.norm():.1e}")
    return found


def is_exactly_zero(name: str, reference: Results) -> bool:
    """Whether a gradient is rounding errors alone: a bias of all keys shifts a query's scores alike, where none are turned."""
    return name.endswith("qkv.k.bias") and "positions.weight" in reference.gradients
