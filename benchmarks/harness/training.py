"""Train a profile in this process, without steps, checkpoints or metrics, and evaluate it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import yaml

from modeling.data.prefetch import Batch
from modeling.training.evaluate import Evaluation, evaluate_split
from modeling.training.learning_rate import learning_rate
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from profiles.schema import Profile

LENGTH, BATCH = 64, 8  # of `write_profile`


def write_profile(file: Path, texts: list[Path], vocabulary: int, **train: Any) -> None:
    """Write the profile of a model of 64 features on one core; a tenth of the texts is held out."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": vocabulary}  # fmt: skip
    common = {"warmup_steps": 20, "global_batch_size": BATCH, "micro_batch_size": BATCH, "sequence_length": LENGTH,
              "precision": "float32", "learning_rate": 6e-3}  # fmt: skip
    profile = {
        "extends": "tiny",
        "model": sizes,
        "tokenizer": {"vocabulary_size": vocabulary},
        "data": {
            "sources": [{"kind": "files", "path": str(text)} for text in texts],
            "validation_fraction": 0.1,
        },
        "parallel": {"tensor": 1},
        "train": {**common, **train},
        "compile": {"enabled": False},
        "checkpoint": {"every": 0},
        "cluster": {"devices_per_node": 1, "threads": 1},
    }
    file.write_text(yaml.safe_dump(profile))


class Windows(Protocol):
    """Numbered samples, such as `modeling.data.corpus.Samples`; `windows` is their number in one epoch."""

    windows: int

    def batch(self, first: int, count: int) -> np.ndarray:
        """Tokens (count, s + 1), int64, of the samples [first, first + count)."""


def train(trainer: Trainer, optimizer: Any, samples: Windows) -> Iterator[int]:
    """Train all steps, each of one microbatch; yields their numbers."""
    settings = trainer.profile.train
    size = settings.global_batch_size
    for step in range(1, settings.last_step + 1):
        optimizer.begin_step(1)
        batch = Batch(torch.from_numpy(samples.batch((step - 1) * size, size)))
        trainer.forward_backward(batch, 1 / (size * settings.sequence_length))
        optimizer.step(learning_rate(settings, step))
        yield step


def train_and_evaluate(
    profile: Profile, samples: Windows, validation: Windows, batches: int | None = None
) -> Evaluation:
    """Train all steps, and evaluate the first `batches` validation batches, or the complete split."""
    with Trainer(profile) as trainer:
        for _ in train(trainer, make_optimizer(trainer), samples):
            pass
        evaluated: Any = validation  # of samples without sources, only these attributes are used
        return evaluate_split(trainer, evaluated, batches)
