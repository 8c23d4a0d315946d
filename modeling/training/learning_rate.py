"""Learning rate schedule: linear warm-up, optional plateau, then decay to the minimum.

Another shape is a case of `_decayed`, and a value of `schedule` in profiles/sections/train.py.
"""

from __future__ import annotations

import math

from profiles.schema import Train


def learning_rate(train: Train, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

    With w warm-up steps, c constant steps, m steps at the minimum and n steps in total: lr · step / w up to step w; lr up to
    step w + c; then a half cosine or a line from lr to the minimum, which is reached at step n - m.
    """
    peak = train.learning_rate
    if step <= train.warmup_steps:
        return peak * step / train.warmup_steps
    decayed = step - train.warmup_steps - train.constant_steps
    decay_steps = train.last_step - train.warmup_steps - train.constant_steps - train.minimum_rate_steps
    if decayed <= 0:
        return peak
    return _decayed(train, min(1.0, decayed / max(1, decay_steps)))


def _decayed(train: Train, progress: float) -> float:
    """Learning rate after a share of the decay."""
    peak, minimum = train.learning_rate, train.minimum_learning_rate
    match train.schedule:
        case "constant":
            return peak
        case "linear":
            return peak + (minimum - peak) * progress
        case "cosine":
            return minimum + (peak - minimum) * (1 + math.cos(math.pi * progress)) / 2


def same_until(one: Train, other: Train, step: int) -> bool:
    """Whether two schedules have the same learning rate at every step up to this one."""
    return step <= min(one.last_step, other.last_step) and all(
        learning_rate(one, number) == learning_rate(other, number) for number in range(1, step + 1)
    )
