"""Validation loss, one process per device: `python -m modeling.training.evaluate --run-folder RUN ...`

Evaluates the latest complete checkpoint, or that of --step, on the complete validation split and writes {step, validation_loss,
perplexity, tokens, metrics, samples, sets} as JSON, atomically; `metrics` has the user metrics by name, `samples` generated text,
and `sets`, with --sets, the loss and tokens of each source of the split. The exit code says why it failed (exit_codes.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from modeling.data import shard_cache
from modeling.data.corpus import Samples
from modeling.data.records import RecordSamples, open_samples
from modeling.models.build import build_optimizer
from modeling.training.generate import generate_samples
from modeling.training.recovery.checkpoints import load_base, load_reference
from modeling.training.recovery.resume import reject_beyond_last_step
from modeling.training.trainer import Trainer, job_parser, start_job
from parallel.checkpoint import checkpoint, locations
from parallel.device import Download
from profiles.files import exit_codes, run_files, state_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    loss: float  # mean per token, or pair: cross-entropy in nats, or the user's `train.loss`
    tokens: int  # number of tokens, or pairs, evaluated
    metrics: dict[str, float]  # mean per token or pair of each metric, by name
    graphs: dict[str, int]  # compile cache statistics
    sources: dict[str, float] = field(default_factory=dict)  # loss of each data source, by name
    sets: dict[str, dict[str, float]] = field(default_factory=dict)  # loss and tokens of each set, by name

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))

    @property
    def by_source(self) -> dict[str, float]:
        """The data sources' losses by metric name: validation_loss/<source>."""
        return {f"validation_loss/{name}": loss for name, loss in self.sources.items()}


def evaluate_samples(
    trainer: Trainer,
    samples: Samples | RecordSamples,
    batches: int | None = None,
    after_pass: Callable[[], None] | None = None,
) -> Evaluation:
    """Evaluate `batches` global batches, or the complete split.

    `batches` are drawn in a fixed random order, since the split is in order of sources, or of the length of packed records. Every
    rank runs the same number of passes of one shape; rows of the last pass beyond the split's end are not counted.

    Args:
        after_pass: called after each pass, on every rank, while the pass is still running on the device and the previous one has
            finished; may raise, alike on all ranks, to stop the evaluation.
    """
    data = trainer.mesh.data
    size = trainer.profile.train.global_batch_size // data.size
    passes = math.ceil(samples.windows / (size * data.size))
    if batches is not None and batches < passes:
        samples, passes = samples.shuffled(size * data.size), batches
    local_sums: list[Tensor] = []
    queued: Download | None = None  # one pass runs while the next is queued
    pairs_per_token = 0.0
    if trainer.profile.objective.traits.odds_ratio:
        assert isinstance(samples, RecordSamples)
        pairs_per_token = samples.pairs_per_token(0, min(samples.windows, passes * size * data.size))
    for index in range(passes):
        first = (index * data.size + data.rank) * size
        # Beyond the split's end, samples wrap around.
        batch = trainer.read_batch(samples, first, size)
        rows = (samples.windows - first) * trainer.profile.rows_per_sample
        previous, queued = queued, Download(trainer.evaluate(batch, rows, pairs_per_token=pairs_per_token))
        if previous is not None:
            local_sums.append(previous.wait())
        if after_pass is not None:
            after_pass()
    if queued is not None:
        local_sums.append(queued.wait())
    # float32 counts the tokens of one pass exactly; their sum needs float64.
    local_sum = torch.stack(local_sums).double().sum(0)
    sums = trainer.sum_on_host(torch.cat((local_sum, trainer.compile_statistics.local_counts())))
    (tokens, *sums), graph_counts = sums[: len(local_sum)], sums[len(local_sum) :]
    loss, *metrics = (value / max(tokens, 1) for value in sums)
    return Evaluation(
        loss,
        round(tokens),
        dict(zip(trainer.metrics, metrics, strict=True)),
        trainer.compile_statistics.metrics(graph_counts),
    )


def evaluate_split(
    trainer: Trainer,
    samples: Samples | RecordSamples,
    batches: int | None = None,
    after_pass: Callable[[], None] | None = None,
) -> Evaluation:
    """`evaluate_samples`, with `evaluate.by_source` also on each data source separately."""
    result = evaluate_samples(trainer, samples, batches, after_pass)
    if not trainer.profile.evaluate.by_source or not isinstance(samples, Samples):
        return result
    parts = samples.by_source()
    losses = {name: evaluate_samples(trainer, part, batches, after_pass).loss for name, part in parts.items()}
    return replace(result, sources=losses)


def evaluate_sets(
    trainer: Trainer, samples: Samples | RecordSamples, after_pass: Callable[[], None] | None = None
) -> Evaluation:
    """Evaluate each source of a split separately, once; the loss and metrics of all are means per token.

    Raises ValueError if no source has a window.
    """
    parts = samples.by_source()
    if not parts:
        raise ValueError(f"train.sequence_length = {samples.sequence_length}: no held-out set has a window")
    found = {name: evaluate_samples(trainer, part, after_pass=after_pass) for name, part in parts.items()}
    tokens = sum(each.tokens for each in found.values())

    def mean(values: Iterable[float]) -> float:
        pairs = zip(values, found.values(), strict=True)
        return sum(value * each.tokens for value, each in pairs) / max(1, tokens)

    return Evaluation(
        mean(each.loss for each in found.values()),
        tokens,
        {name: mean(each.metrics[name] for each in found.values()) for name in trainer.metrics},
        [*found.values()][-1].graphs,  # counted since the start
        sets={name: {"loss": each.loss, "tokens": each.tokens} for name, each in found.items()},
    )


def main(arguments: list[str] | None = None) -> int:
    parser = job_parser("evaluate")
    parser.add_argument("--reference", type=Path, help="folder of the reference model's log-probabilities")
    parser.add_argument(
        "--weights", type=Path, help="checkpoint folder with the initial weights, for LoRA and dpo"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--step", type=int, help="step of the checkpoint to evaluate (default: the latest)")
    parser.add_argument("--profile", type=Path, help="profile of the evaluation (default: the run's)")
    parser.add_argument("--sets", action="store_true", help="evaluate each source of the split separately")
    options = parser.parse_args(arguments)
    try:
        with start_job(options) as trainer:
            step = load_checkpoint(trainer, options)
            profile = trainer.profile
            cache = shard_cache.from_arguments(options, profile.data.cache_gigabytes)
            samples = open_samples(profile, options.dataset, "validation", cache, reference=options.reference)
            evaluate_into(options.output, trainer, samples, step, sets=options.sets)
    except locations.CorruptCheckpoint as error:
        log.error(f"rejected: {error}")
        return exit_codes.REJECTED
    return 0


def load_checkpoint(trainer: Trainer, options: argparse.Namespace) -> int:
    """Load the weights of a complete checkpoint; returns its step. Raises ValueError if missing."""
    profile = trainer.profile
    folder = options.checkpoints or options.run_folder / run_files.CHECKPOINTS
    saved = dict(locations.complete_checkpoints(folder))
    if not saved:
        raise ValueError(f"run {options.run_folder.name} has no complete checkpoint to evaluate")
    reject_beyond_last_step(profile, saved)
    step = max(saved) if options.step is None else options.step
    if step not in saved:
        raise ValueError(f"run {options.run_folder.name} has no complete checkpoint of step {step}")
    location = saved[step]
    optimizer = build_optimizer(profile, [*trainer.stages.values()], trainer.mesh, trainer.compile)
    if profile.lora.rank:
        load_base(options.weights, optimizer)
    load_reference(options.weights, trainer.reference_model)
    try:
        checkpoint.load(location, optimizer, weights_only=True)
    except locations.CorruptCheckpoint as error:
        others = ", ".join(f"{options.run_folder.name}@{other}" for other in sorted(saved) if other != step)
        instead = f", or evaluate another: {others}" if others else ""
        raise locations.CorruptCheckpoint(f"{error}; restore it from a backup{instead}") from error
    return step


def evaluate_into(
    output: Path,
    trainer: Trainer,
    samples: Samples | RecordSamples,
    step: int,
    after_pass: Callable[[], None] | None = None,
    *,
    sets: bool = False,
) -> Evaluation:
    """Evaluate a complete split, generate samples, and write both as JSON. Called on every rank.

    Args:
        step: step of the weights.
        after_pass: called after each forward pass, as by `evaluate_samples`; if it raises, nothing is written.
        sets: evaluate each source of the split separately (`evaluate_sets`).
    """
    evaluate = evaluate_sets if sets else evaluate_split
    evaluation = evaluate(trainer, samples, after_pass=after_pass)
    generated = generate_samples(trainer, samples, after_pass)
    # The loss of pairs is no cross-entropy of tokens.
    perplexity = None if trainer.profile.objective.traits.pairs else evaluation.perplexity
    if trainer.leader:
        result = {
            "step": step,
            "validation_loss": evaluation.loss,
            "perplexity": perplexity,
            "tokens": evaluation.tokens,
            "metrics": {**evaluation.metrics, **evaluation.by_source},
            "samples": generated,
            "sets": evaluation.sets,
            **evaluation.graphs,
        }
        state_files.write(output, json.dumps(result, indent=1))
        suffix = "" if perplexity is None else f", perplexity {perplexity:.1f}"
        log.info(f"step {step}: validation loss {evaluation.loss:.4f}{suffix}")
    return evaluation


if __name__ == "__main__":
    exit_codes.leave(exit_codes.code_of(main))
