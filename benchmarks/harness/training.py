"""Train a profile in this process, without steps, checkpoints or metrics, and evaluate it."""

from typing import Any, Protocol

import numpy as np
import torch

from modeling.data.prefetch import Batch
from modeling.training.evaluate import Evaluation, evaluate_split
from modeling.training.learning_rate import learning_rate
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from profiles.schema import Profile


class Windows(Protocol):
    """Numbered samples, such as `modeling.data.corpus.Samples`; `windows` is their number in one epoch."""

    windows: int

    def batch(self, first: int, count: int) -> np.ndarray:
        """Tokens (count, s + 1), int64, of the samples [first, first + count)."""


def train_and_evaluate(
    profile: Profile, samples: Windows, validation: Windows, batches: int | None = None
) -> Evaluation:
    """Train all steps, and evaluate the first `batches` validation batches, or the complete split."""
    train = profile.train
    size = train.global_batch_size
    with Trainer(profile) as trainer:
        optimizer = make_optimizer(trainer)
        for step in range(1, train.last_step + 1):
            optimizer.begin_step(1)
            batch = Batch(torch.from_numpy(samples.batch((step - 1) * size, size)))
            trainer.forward_backward(batch, 1 / (size * train.sequence_length))
            optimizer.step(learning_rate(train, step))
        evaluated: Any = validation  # of samples without sources, only these attributes are used
        return evaluate_split(trainer, evaluated, batches)
