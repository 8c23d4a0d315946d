"""Sampled text of a run's checkpoint: `python -m modeling.training.sample --run-folder RUN ...`

Writes rows of `train.sequence_length` tokens as a numpy array (rows, s), atomically. Each row begins after an EOS token and is
sampled from the model's distribution. A row is a function of the weights and its number.
"""

from __future__ import annotations

import io
import json
import logging
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modeling.training.evaluate import load_checkpoint
from modeling.training.generate import FULL, next_tokens, sampled_rows
from modeling.training.trainer import Trainer, job_parser, start_job
from parallel.checkpoint import locations
from profiles.files import exit_codes, state_files

PROGRESS = 10  # log lines
log = logging.getLogger(__name__)


def sample_rows(trainer: Trainer, first: int, count: int, start: int) -> Tensor:
    """Sample rows [first, first + count) of tokens (count, s). Called on every rank.

    Args:
        start: token id that precedes each row.
    """
    s = trainer.profile.train.sequence_length
    rows, together = sampled_rows(trainer.profile)
    parts = math.ceil(count / together)
    found = []
    for part in range(parts):
        tokens = torch.full((rows, s + 1), start, dtype=torch.int64)  # (b, s + 1)
        for position in range(1, s + 1):
            positions = torch.full((together,), position - 1)
            drawn = next_tokens(trainer, tokens, positions, first + part * together, FULL)
            tokens[:together, position] = drawn
        found.append(tokens[:together, 1:])
        if trainer.leader and (part + 1) * PROGRESS // parts > part * PROGRESS // parts:
            log.info(f"sampled {min(count, (part + 1) * together):,} of {count:,} rows")
    return torch.cat(found)[:count]  # (count, s)


def main(arguments: list[str] | None = None) -> int:
    parser = job_parser("sample")
    parser.add_argument("--output", type=Path, required=True, help=".npy file to write")
    parser.add_argument("--first", type=int, required=True, help="number of the first row")
    parser.add_argument("--count", type=int, required=True, help="number of rows")
    parser.add_argument(
        "--step", type=int, help="step of the checkpoint to sample from (default: the latest)"
    )
    parser.add_argument("--profile", type=Path, help="profile of the job (default: the run's)")
    parser.add_argument("--weights", type=Path, help="checkpoint folder with the initial weights, for LoRA")
    options = parser.parse_args(arguments)
    try:
        with start_job(options) as trainer:
            eos = json.loads(state_files.contents(options.dataset / "corpus.json"))["eos"]
            load_checkpoint(trainer, options)
            rows = sample_rows(trainer, options.first, options.count, eos or 0)
            if trainer.leader:
                data = io.BytesIO()
                np.save(data, rows.numpy().astype(np.int32))
                state_files.write(options.output, data.getvalue())
    except locations.CorruptCheckpoint as error:
        log.error(f"rejected: {error}")
        return exit_codes.REJECTED
    return 0


if __name__ == "__main__":
    exit_codes.leave(exit_codes.code_of(main))
