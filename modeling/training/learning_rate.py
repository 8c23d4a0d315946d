"""The learning rate by step: linear warm-up, an optional plateau, then decay to the minimum at the last step."""

from __future__ import annotations

import math

from profiles.schema import Train


def learning_rate(train: Train, step: int) -> float:
    """Learning rate of the update number `step`, counted from 1.

    With w warm-up and c constant steps of n: lr · step / w while step ≤ w; lr until w + c; then from lr to the minimum along
    half a cosine or a line, over the n - w - c steps that are left.
    """
    highest, lowest = train.learning_rate, train.minimum_learning_rate
    if step <= train.warmup_steps:
        return highest * step / train.warmup_steps
    after = step - train.warmup_steps - train.constant_steps
    decay = train.steps - train.warmup_steps - train.constant_steps
    if train.schedule == "constant" or after <= 0:
        return highest
    done = min(1.0, after / max(1, decay))
    if train.schedule == "linear":
        return highest + (lowest - highest) * done
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * done)) / 2
