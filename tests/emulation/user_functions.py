"""A loss and a metric as users write them."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == targets).sum()
