"""Experts in NxD shards of Mixtral and DBRX: a rank's experts of a layer in two transposed tensors.

For E experts over n expert-parallel ranks, hidden size h, width f and t tensor ranks:

    <layer>.expert_mlps.mlp_op.gate_up_proj.weight    (E/n, h, 2f/t), the rank's [gate, up] side by side
    <layer>.expert_mlps.mlp_op.down_proj.weight       (E/n, f/t, h)
    <layer>.router.linear_router.weight               (E, h), the same on all ranks (layout.py)

With n above 1, file names contain `ep_rank_EE`, and the files of the first expert-parallel rank have all other tensors. This is
the form of NxD's layers, so of its training checkpoints, and of its converter for DBRX. Its converter for Mixtral does not
transpose: it splits gate and up, (E/n, f, 2h/t), and down, (E/n, h/t, f), along h. NxD's own layers cannot load that form; it is
recognized here by its shapes, and never written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from modeling.conversion.nxd.layout import layer_prefix, mlp_prefix
from modeling.conversion.tensor_files import TensorEntry
from modeling.conversion.torch_files import LazyTensor
from modeling.conversion.weights import Part, Weights
from profiles.files import state_files
from profiles.sections.model import Model

FIRST = "ep_rank_00"  # in the file names of the first expert-parallel rank
# With Megatron's names, NxD's converter renames the projections too; its layers use the other names.
EXPERTS = re.compile(
    r".*\.(?:layers|blocks)\.(\d+)\.(?:mlp|mlp\.moe|ffn)\.expert_mlps\.mlp_op\.(gate_up_proj|dense_h_to_4h|down_proj|dense_4h_to_h)\.weight"
)
GATE_UP = ("gate_up_proj", "dense_h_to_4h")


def expert_files(path: Path) -> list[Path]:
    """Files of all expert-parallel ranks, given the first rank's; only this one if there is one rank."""
    files = [path]
    while FIRST in path.name:
        other = path.with_name(path.name.replace(FIRST, f"ep_rank_{len(files):02}"))
        if not state_files.is_file(other):
            break
        files.append(other)
    return files


def parts(
    key: str, stored: LazyTensor, model: Model, rank: int, tensor: int, expert_rank: int, expert_ranks: int
) -> Iterator[tuple[str, Part]]:
    """Our tensors in a tensor of a rank's experts, by name.

    Raises:
        ValueError: its shape does not match the model, or is ambiguous.
    """
    match = EXPERTS.fullmatch(key)
    assert match
    h, f, prefix = model.hidden_size, model.expert_width, f"layers.{match[1]}.mlp"
    local, gate_up = (model.num_experts or 0) // expert_ranks, match[2] in GATE_UP
    proper = (local, h, 2 * f // tensor) if gate_up else (local, f // tensor, h)
    converted = (local, f, 2 * h // tensor) if gate_up else (local, h // tensor, f)
    if stored.shape not in ((proper, converted) if model.architecture == "mixtral" else (proper,)):
        raise ValueError(
            f"{key} has shape {stored.shape}; this model over {tensor} tensor and {expert_ranks} expert ranks has {proper}"
        )
    if model.architecture == "mixtral" and h == f:
        reason = f"hidden size and an expert's width are both {h}, so its shape does not show whether NxD's training wrote it, or"
        raise ValueError(f"{key}: {reason} its converter, which does not transpose experts")
    transposed = stored.shape == proper
    split = f // tensor if transposed else h // tensor  # length of the rank's shard
    for index in range(local):
        expert = expert_rank * local + index
        names = (f"gate_up.{expert}.gate", f"gate_up.{expert}.up") if gate_up else (f"down.{expert}",)
        for number, name in enumerate(names):
            along = 0 if gate_up == transposed else 1  # dim of our tensor that is split over tensor ranks
            sizes = [f, h] if gate_up else [h, f]
            sizes[along], offsets = split, [0, 0]
            offsets[along] = rank * split
            columns = slice(number * split, (number + 1) * split) if gate_up else slice(None)
            read = partial(_read, stored, index, columns, transposed)
            yield f"{prefix}.{name}.weight", Part(tuple(offsets), tuple(sizes), stored.dtype, read)


def _read(
    stored: LazyTensor, expert: int, columns: slice, transposed: bool, index: tuple[slice, ...]
) -> Tensor:
    own = stored.open()[expert, :, columns]
    return (own.t() if transposed else own)[index]


def entries(weights: Weights, layer: int, rank: int, tensor: int) -> Iterator[TensorEntry]:
    """The two tensors of a layer's experts in a tensor rank's file; none for a model without experts."""
    model = weights.model
    if model.num_experts is None:
        return
    prefix = f"{layer_prefix(model, layer)}.{mlp_prefix(model)}"
    experts, h, f = model.num_experts, model.hidden_size, model.expert_width // tensor
    for name, shape in (("gate_up_proj", (experts, h, 2 * f)), ("down_proj", (experts, f, h))):
        ours = f"layers.{layer}.mlp.{'gate_up' if name == 'gate_up_proj' else 'down'}"
        rows = partial(_gate_up_rows if name == "gate_up_proj" else _down_rows, weights, ours, rank * f, f)
        dtype = weights.dtype_of(f"layers.{layer}.mlp.down.0.weight")
        yield TensorEntry(f"{prefix}.expert_mlps.mlp_op.{name}.weight", shape, dtype, rows, leading=2)


def _gate_up_rows(
    weights: Weights, ours: str, first: int, width: int, low: int, high: int
) -> Iterator[Tensor]:
    """Rows [low, high) of (E·h, 2f/t)."""
    for expert, start, stop in _by_expert(low, high, weights.model.hidden_size):
        halves = [
            weights.read(f"{ours}.{expert}.{half}.weight", (first, start), (width, stop - start)).t()
            for half in ("gate", "up")
        ]
        yield torch.cat(halves, 1)  # (rows, 2f/t)


def _down_rows(weights: Weights, ours: str, first: int, width: int, low: int, high: int) -> Iterator[Tensor]:
    """Rows [low, high) of (E·f/t, h)."""
    for expert, start, stop in _by_expert(low, high, width):
        sizes = (weights.model.hidden_size, stop - start)
        yield weights.read(f"{ours}.{expert}.weight", (0, first + start), sizes).t().contiguous()  # (rows, h)


def _by_expert(low: int, high: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """Rows [low, high) of all experts, which have `rows` rows each, as (expert, start, stop)."""
    for expert in range(low // rows, -(-high // rows)):
        yield expert, max(low - expert * rows, 0), min(high - expert * rows, rows)
