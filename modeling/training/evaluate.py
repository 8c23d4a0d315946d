"""Held-out loss: `python -m modeling.training.evaluate --run-folder RUN --dataset FOLDER --output FILE`, one process a device.

Evaluates the newest complete checkpoint of the run on the whole validation split and writes
{step, validation_loss, perplexity, tokens, metrics, samples} as JSON, whole or not at all; metrics are the user's, by their
names. Why it failed is in its exit code (exits.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from modeling import exit_codes
from modeling.compilation.graph_cache import prepare_cache
from modeling.data import shard_cache
from modeling.data.corpus import Corpus, Samples
from modeling.data.prefetch import Batch, read_batch
from modeling.training.generate import continuations
from modeling.training.trainer import Trainer
from parallel import ZeRO1
from parallel.checkpoint import checkpoint
from profiles.resolve import load

log = logging.getLogger("trainshed")


@dataclass(frozen=True)
class HeldOut:
    """Mean loss a token (cross-entropy in nats, unless train.loss is the user's), of so many tokens, mean metrics, and what
    became of the graphs (`CompileStatistics.metrics`).
    """

    loss: float
    tokens: int
    metrics: dict[str, float]
    graphs: dict[str, int]

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))


def validation_loss(trainer: Trainer, samples: Samples, batches: int | None = None) -> HeldOut:
    """Mean loss over the first `batches` global batches, or over the whole split.

    Every rank runs the same number of passes of one shape; where the split does not fill the last, what is missing does not
    count.
    """
    data = trainer.mesh.data
    size = trainer.profile.train.global_batch_size // data.size
    passes = math.ceil(samples.windows / (size * data.size))
    total = torch.zeros(2 + len(trainer.metrics), dtype=torch.float64)
    for index in range(passes if batches is None else min(passes, batches)):
        first = (index * data.size + data.rank) * size
        # Past the end it begins again.
        batch = read_batch(trainer, samples, first, size) if trainer.reads_samples else Batch()
        counted = torch.arange(first, first + size) < samples.windows
        total += trainer.evaluate(batch.tokens, counted, batch.documents).cpu()
    sums = trainer.sum(torch.cat((total, trainer.compile_statistics.local_counts())))
    (tokens, *sums), graphs = sums[: len(total)], sums[len(total) :]
    loss, *metrics = (each / max(tokens, 1) for each in sums)
    return HeldOut(
        loss,
        round(tokens),
        dict(zip(trainer.metrics, metrics, strict=True)),
        trainer.compile_statistics.metrics(graphs),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.training.evaluate")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--checkpoints", help="folder or URI of the run's checkpoints (RUN/checkpoints)")
    parser.add_argument("--output", type=Path, required=True)
    shard_cache.add_arguments(parser)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    profile = load(str(options.run_folder / "profile.yaml"))
    graphs, precompiled = prepare_cache(profile, options.graphs, options.run_folder)
    try:
        with Trainer(profile, graphs, precompiled=precompiled) as trainer:
            evaluate(trainer, options)
    except (torch.OutOfMemoryError, MemoryError):
        log.exception("out of memory")
        return exit_codes.OUT_OF_MEMORY
    except ValueError:  # of the profile, the data or the checkpoint, each in words of its own
        log.exception("rejected")
        return exit_codes.REJECTED
    return 0


def evaluate(trainer: Trainer, options: argparse.Namespace) -> None:
    """Measure the newest complete checkpoint, and write what came of it. Raises ValueError where there is none."""
    profile = trainer.profile
    saved = list(checkpoint.complete_checkpoints(options.checkpoints or options.run_folder / "checkpoints"))
    if not saved:
        raise ValueError(f"run {options.run_folder.name} has no complete checkpoint to evaluate")
    step, folder = saved[-1]
    optimizer = ZeRO1(trainer.named_parameters(), trainer.mesh, shard=profile.parallel.zero1)
    checkpoint.load(folder, optimizer, weights_only=True)
    cache = shard_cache.from_arguments(options, profile.data.cache_gigabytes)
    corpus = Corpus.open(options.dataset, "validation", cache)
    samples = Samples(corpus, profile.train.sequence_length, seed=None)
    held_out = validation_loss(trainer, samples)
    written = continuations(trainer, samples)
    if trainer.leader:
        result = {
            "step": step,
            "validation_loss": held_out.loss,
            "perplexity": held_out.perplexity,
            "tokens": held_out.tokens,
            "metrics": held_out.metrics,
            "samples": written,
            **held_out.graphs,
        }
        partial = options.output.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1))
        partial.replace(options.output)
        log.info(f"step {step}: validation loss {held_out.loss:.4f}, perplexity {held_out.perplexity:.1f}")


if __name__ == "__main__":
    exit_codes.leave(main())
