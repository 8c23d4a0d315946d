"""MXFP4 weights, as published for GPT-OSS: read as bfloat16, a slice at a time.

A weight (E, rows, columns) is stored as two tensors of bytes. 32 consecutive columns share a scale:

    <name>_blocks (E, rows, columns/32, 16)   two 4-bit values (E2M1) per byte, the first in the low half
    <name>_scales (E, rows, columns/32)       exponent of a power of two (E8M0), with a bias of 127
    value = E2M1 · 2^(scale - 127)            exact in bfloat16

The weight is the transpose of the tensor <name> of a model in bfloat16: its rows are our rows. 17 bytes of a file become 64.
Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.conversion.torch_files import LazyTensor
from modeling.models.weight_names import HuggingFaceTensor

BLOCK = 32  # columns that share a scale
BLOCKS, SCALES = "_blocks", "_scales"
FINITE = 252  # largest scale for which every value is finite in bfloat16
_HALVES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # E2M1 without its sign, times 2


def _value_pairs() -> Tensor:
    """(256) both values of each byte, times 2 and in bfloat16, as one int32."""
    values = torch.tensor([*_HALVES, *(-value for value in _HALVES)], dtype=torch.bfloat16)
    codes = torch.arange(256)
    return torch.stack((values[codes % 16], values[codes // 16]), 1).view(torch.int32).flatten()


PAIRS = _value_pairs()
# half of each scale's power of two, because 2^128 is not finite
POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 128).bfloat16()


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks (..., g, 16) with scales (..., g), uint8, to bfloat16 (..., 32·g); infinite if too large."""
    values = PAIRS[blocks.int()].view(torch.bfloat16)  # (..., g, 32)
    return values.mul_(POWERS[scales.int()][..., None]).flatten(-2)


@dataclass(frozen=True)
class PackedTensor:
    """A weight of all experts of a layer in MXFP4, mapped from its files."""

    name: str  # in the files, without the suffix
    blocks: LazyTensor  # (E, rows, columns/32, 16)
    scales: LazyTensor  # (E, rows, columns/32)

    def read(self, mapped: HuggingFaceTensor, index: tuple[slice, ...]) -> Tensor:
        """Elements of our tensor, an expert's weight.

        Args:
            mapped: its position in the dequantized tensor (E, columns, rows).
            index: rows and columns to read.

        Raises:
            ValueError: they are not finite.
        """
        expert, *position = mapped.index
        assert isinstance(expert, int)
        chosen, (rows, columns) = position[1] if position else slice(None), index
        first, stop = columns.start // BLOCK, math.ceil(columns.stop / BLOCK)
        blocks, scales = (
            each.open()[expert, chosen][rows, first:stop] for each in (self.blocks, self.scales)
        )
        start = columns.start - first * BLOCK
        values = dequantize(blocks, scales)[:, start : start + columns.stop - columns.start]
        if scales.max() > FINITE and not values.isfinite().all():
            reason = f"weights of expert {expert} are not finite in bfloat16; the file is corrupted"
            raise ValueError(f"{self.name}{SCALES}: {reason}")
        return values


def find_packed(found: Mapping[str, LazyTensor], key: str, shape: tuple[int, ...]) -> PackedTensor | None:
    """A weight that is stored as blocks and scales; None if it is not in MXFP4.

    Args:
        found: the tensors of all files, by name.
        key: name of the dequantized tensor.
        shape: shape of the dequantized tensor, (E, columns, rows).

    Raises:
        ValueError: one of the two is missing, or their shapes or dtypes do not match the model.
    """
    blocks, scales = found.get(key + BLOCKS), found.get(key + SCALES)
    if blocks is None and scales is None:
        return None
    if blocks is None or scales is None:
        there, missing = (SCALES, BLOCKS) if blocks is None else (BLOCKS, SCALES)
        raise ValueError(f"{key}{missing}: missing, but the files have {key}{there}")
    if key in found:
        raise ValueError(f"{key}: stored twice, once in MXFP4")
    experts, columns, rows = shape
    if columns % BLOCK:
        raise ValueError(f"{key}{BLOCKS}: the model's {columns} columns are not a multiple of {BLOCK}")
    expected = (experts, rows, columns // BLOCK)
    for name, stored, needed in ((BLOCKS, blocks, (*expected, BLOCK // 2)), (SCALES, scales, expected)):
        if stored.shape != needed:
            raise ValueError(f"{key}{name}: shape {stored.shape}; the model has {needed}")
        if stored.dtype != torch.uint8:
            kind = str(stored.dtype).removeprefix("torch.")
            raise ValueError(f"{key}{name}: dtype {kind}; MXFP4 is stored as uint8")
    return PackedTensor(key, blocks, scales)
