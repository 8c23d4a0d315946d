"""Log-probabilities of a reference model: `python -m modeling.training.reference`.

Evaluates the answers of all preference pairs of both splits under the weights that the run starts from. Writes `reference.npz`:
for each split, log π(y) of each sequence's answer y, float32, in order of rows. One process per device, in the run's topology.
"""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modeling.data import shard_cache
from modeling.data.records import RecordSamples, open_samples
from modeling.models.build import build_optimizer
from modeling.training.recovery.checkpoints import load_base
from modeling.training.trainer import Trainer, job_parser, start_job
from parallel.checkpoint import checkpoint
from profiles.files import exit_codes

log = logging.getLogger(__name__)

LINE_SECONDS = 10.0  # at least between two lines on the progress


def log_probabilities(trainer: Trainer, samples: RecordSamples) -> np.ndarray:
    """Log-probabilities of all answers in row order, float32, on every rank; called on every rank.

    Args:
        samples: samples in corpus order.
    """
    data, size = trainer.mesh.data, trainer.profile.train.global_batch_size // trainer.mesh.data.size
    count, rows = size * data.size, size * samples.rows_per_sample
    found: list[np.ndarray] = []
    passes, shown_at = math.ceil(samples.windows / count), time.monotonic()
    for index in range(passes):
        first = index * count + data.rank * size
        # Beyond the split's end, samples wrap around.
        batch = trainer.read_batch(samples, first, size)
        sizes = samples.sizes(index * count, count)
        local = trainer.answer_log_probabilities(batch)[:, : sizes.max()].float().cpu()  # (rows, answers)
        padded = torch.zeros(rows * data.size, local.shape[1])  # with the rows of all data ranks
        padded[data.rank * rows : (data.rank + 1) * rows] = local
        everyone = np.array(trainer.sum_on_host(padded))
        found.append(everyone[np.arange(everyone.shape[1]) < sizes[:, None]])
        tenth = (index + 1) * 10 // passes > index * 10 // passes
        if trainer.leader and tenth and time.monotonic() - shown_at >= LINE_SECONDS:
            shown_at = time.monotonic()
            done = min((index + 1) * count, samples.windows)
            log.info(f"reference: {done:,} of {samples.windows:,} samples")
    return np.concatenate(found)[: samples.sizes(0, samples.windows).sum()].astype(np.float32)


def main(arguments: list[str] | None = None) -> int:
    parser = job_parser("reference")
    parser.add_argument(
        "--weights", type=Path, required=True, help="checkpoint folder of the reference model"
    )
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    with start_job(options) as trainer:
        profile = trainer.profile
        optimizer = build_optimizer(profile, [*trainer.stages.values()], trainer.mesh, trainer.compile)
        if profile.lora.rank:
            load_base(options.weights, optimizer)  # adapters are initially zero
        else:
            checkpoint.load(options.weights, optimizer, weights_only=True)
        cache = shard_cache.from_arguments(options, profile.data.cache_gigabytes)
        found: dict[str, Any] = {}
        for split in ("train", "validation"):
            samples = open_samples(profile, options.dataset, split, cache, ordered=True)
            assert isinstance(samples, RecordSamples)  # pairs
            found[split] = log_probabilities(trainer, samples)
        if trainer.leader:
            partial = options.output.with_suffix(".partial")
            with partial.open("wb") as file:
                np.savez(file, **found)
            os.replace(partial, options.output)
    return 0


if __name__ == "__main__":
    exit_codes.leave(exit_codes.code_of(main))
