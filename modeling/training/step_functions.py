"""Functions that steps and evaluations run around the model and the optimizer.

On devices that compile each operator at its first use, each of them is a compiled program; elsewhere torch runs them eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modeling.data.records import PADDING
from modeling.models import qk_clip
from modeling.training import user_functions
from modeling.training.anomalies import decide, record
from modeling.training.preference import loss as preference
from parallel.collectives import local_shard
from parallel.logits import full_logits, soft_capped
from parallel.loss import IGNORE_INDEX
from parallel.optimizer.arithmetic import Compile, Programs

if TYPE_CHECKING:
    from modeling.training.user_functions import UserFunction
    from parallel.mesh import Axis


class StepFunctions(Programs):
    """Functions of this module, preference pairs and the anomaly guard, compiled if `compile` is given."""

    def __init__(self, compile: Compile | None = None) -> None:
        super().__init__(compile)
        prepare = self.prepare
        self.shard, self.find_padding = prepare(shard), prepare(find_padding)
        self.count_targets, self.pack_evaluation = prepare(count_targets), prepare(pack_evaluation)
        self.add, self.multiply = prepare(add), prepare(multiply)
        self.pack, self.join = prepare(pack), prepare(join)
        self.to_table, self.clear, self.set_loads = prepare(to_table), prepare(clear), prepare(set_loads)
        self.logit_table, self.clip_logits = prepare(logit_table), prepare(clip_logits)
        self.next_logits = prepare(next_logits)
        self.user_sums, self.stack = prepare(user_sums), prepare(stack)
        self.split_targets = prepare(preference.split_targets)
        self.log_probabilities = prepare(preference.log_probabilities)
        self.score_pairs = prepare(preference.score_pairs)
        self.with_value, self.concatenate = prepare(preference.with_value), prepare(preference.concatenate)
        self.decide, self.record = prepare(decide), prepare(record)


def shard(
    samples: Tensor,
    positions: Tensor,
    documents: Tensor | None,
    answers: Tensor | None = None,
    kind: str = "texts",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A context rank's tokens, targets and documents (m·b, s/c) of samples (m·b, s + 1).

    Args:
        documents: (m·b, s).
        kind: of the samples. "texts": all tokens are ids. "records": negative ones, complements of ids and padding, are inputs
            but not targets (modeling/data/records.py). "pairs": targets keep negative tokens, and are followed by the local
            `answers` (m·b, s), if any, and the row's number.
    """
    documents, answers = (None if each is None else each[:, positions] for each in (documents, answers))
    tokens, targets = samples[:, positions], samples[:, positions + 1]
    if kind == "texts":
        return tokens, targets, documents
    tokens = input_ids(tokens)
    if kind == "records":
        return tokens, targets.where(targets >= 0, IGNORE_INDEX), documents
    rows = torch.arange(len(samples), device=samples.device)[:, None]
    return tokens, torch.cat((targets, *(() if answers is None else (answers,)), rows), 1), documents


def input_ids(tokens: Tensor) -> Tensor:
    """The ids of records' tokens, of which negative ones are complements, or padding, for which 0 stands."""
    return tokens.where(tokens >= 0, ~tokens).where(tokens != PADDING, 0)


def find_padding(samples: Tensor, positions: Tensor) -> Tensor:
    """Whether each of a context rank's tokens is padding, (m·b, s/c), of records' samples (m·b, s + 1)."""
    return samples[:, positions] == PADDING


def count_targets(
    targets: Tensor, rows: Tensor, kind: str = "texts", width: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """`shard`'s targets (m·b, ...), masked beyond the first `rows`; their number, float32, None for pairs.

    Args:
        width: number of leading columns to count; None: all.
    """
    kept = (torch.arange(len(targets), device=targets.device) < rows)[:, None]
    if kind == "pairs":
        return torch.cat((targets[:, :-1].where(kept, PADDING), targets[:, -1:]), 1), None
    targets = targets.where(kept, IGNORE_INDEX)
    counted = targets if width is None else targets[:, :width]  # a full slice would change the graph
    return targets, (counted != IGNORE_INDEX).sum().float()


def pack_evaluation(count: Tensor, sums: Tensor) -> Tensor:
    """The number of targets, their loss and metrics, flat, float32."""
    return torch.cat((count[None], sums.flatten().float()))


def add(total: Tensor, loss: Tensor) -> Tensor:
    """Add the losses of a microbatch to the sum of the earlier ones."""
    return total + loss


def multiply(total: Tensor, scale: Tensor) -> Tensor:
    """A loss, scaled as its gradients are."""
    return total * scale


def pack(loss: Tensor, degree: int, *numbers: Tensor) -> Tensor:
    """A rank's statistics, flat, divided by the tensor degree because all tensor ranks add the same."""
    return torch.cat((loss[None], *numbers)) / degree


def join(statistics: Tensor, *results: Tensor) -> Tensor:
    """Statistics and results of an update, flat, for one copy to the host."""
    return torch.cat((statistics, torch.stack(results)))


def to_table(rows: Sequence[Tensor], numbers: tuple[int, ...], count: int, degree: int = 1) -> Tensor:
    """Flat table of `count` rows: each of `rows`, divided by the tensor degree, at its number, else 0."""
    table = [torch.zeros_like(rows[0])] * count
    for number, row in zip(numbers, rows, strict=True):
        table[number] = row
    return torch.cat(table) / degree


def logit_table(found: Sequence[Tensor], numbers: tuple[int, ...], layers: int, tensor: Axis) -> Tensor:
    """Largest logits of each layer and query head, (L, n), -inf unless this rank has found them.

    Args:
        found: those of its heads (n/t), in the layers with these numbers.
    """
    # By the rank in a tensor, because a graph must not depend on it.
    ranks = torch.arange(tensor.size, dtype=torch.int32, device=found[0].device)
    own = (ranks == local_shard(ranks, tensor))[:, None]  # (t, 1)
    table = [torch.full_like(found[0], -torch.inf).repeat(tensor.size)] * layers
    for number, row in zip(numbers, found, strict=True):
        table[number] = torch.where(own, row, -torch.inf).flatten()
    return torch.stack(table)


def clip_logits(logits: Tensor, threshold: float, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """QK-clip of the largest logits of each layer and query head, (L, n).

    Returns:
        flat factors (`models.qk_clip.factors`), the largest logit, and the number of query heads beyond the threshold.
    """
    beyond = (logits > threshold).sum(dtype=torch.float32)
    return qk_clip.factors(logits, threshold, groups), logits.amax(), beyond


def clear(loads: Sequence[Tensor]) -> None:
    """Set the experts' loads to zero."""
    for load in loads:
        load.zero_()


def set_loads(loads: Sequence[Tensor], counts: Tensor, numbers: tuple[int, ...], rows_per_step: int) -> None:
    """Write each layer's choices per expert and row into its load (E), from a flat layer-expert table."""
    choices = counts.view(-1, len(loads[0]))
    for number, load in zip(numbers, loads, strict=True):
        load.copy_(choices[number] / rows_per_step)


def next_logits(
    hidden: Sequence[Tensor], weight: Tensor, states: Tensor, soft_cap: float | None = None
) -> Tensor:
    """Logits (v/t, n) of the tokens that follow n hidden states.

    Args:
        hidden: hidden states of each of the first microbatches, (b·s/c, h).
        states: indices (n) of those of all these microbatches.
        soft_cap: of the logits; None: none.
    """
    logits = weight @ torch.cat([*hidden]).index_select(0, states).t()
    return logits if soft_cap is None else soft_capped(logits.float(), soft_cap)


def user_sums(
    functions: Sequence[UserFunction],
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    vocabulary: int,
    sequence_parallel: bool,
    soft_cap: float | None,
) -> list[Tensor]:
    """Results, 0-dim, of user functions for a microbatch's logits and targets.

    Args:
        targets: (b, s/c); other arguments as for `full_logits`.
    """
    logits = full_logits(
        x, weight, axis, vocabulary=vocabulary, sequence_parallel=sequence_parallel, soft_cap=soft_cap
    )
    return [user_functions.call(function, logits, targets.flatten()) for function in functions]


def stack(sums: Sequence[Tensor]) -> Tensor:
    """0-dim sums as a vector, float32."""
    return torch.stack([each.float() for each in sums])
