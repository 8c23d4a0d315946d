"""Float8 weights with a scale for each 128 × 128 block, as of DeepSeek-V3, Qwen3 and their hybrids.

They are read as bfloat16, a slice at a time. Besides `<layer>.weight` (o, i) in float8_e4m3fn, files have
`<layer>.weight_scale_inv` (⌈o/128⌉, ⌈i/128⌉) in float32 or, those of Qwen, bfloat16, and

    weight[a, b] = stored[a, b] · weight_scale_inv[⌊a/128⌋, ⌊b/128⌋]

The last blocks may be smaller. The float32 product is rounded to bfloat16. Source: README_WEIGHTS.md of deepseek-ai/DeepSeek-V3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.conversion.torch_files import LazyTensor
from modeling.models.weight_names import HuggingFaceTensor

SCALES = "_scale_inv"
BLOCK = 128


@dataclass(frozen=True)
class ScaledTensor:
    """A weight and its scales, mapped from their files."""

    stored: LazyTensor  # (o, i)
    scales: LazyTensor  # (⌈o/128⌉, ⌈i/128⌉)

    def read(self, mapped: HuggingFaceTensor, index: tuple[slice, ...]) -> Tensor:
        """Rows and columns of our tensor.

        Args:
            mapped: the rows of the stored weight that are our tensor's.
        """
        numbers = torch.arange(self.stored.shape[0])[:, None]  # (o, 1)
        rows, columns = mapped.read(numbers)[index[0], 0], index[1]
        factors = self.scales.open().float().index_select(0, rows // BLOCK)
        blocks = torch.arange(columns.start, columns.stop) // BLOCK
        stored = self.stored.open().view(torch.uint8)[rows, columns].view(self.stored.dtype)
        return stored.float().mul_(factors.index_select(1, blocks)).bfloat16()


def find_scaled(found: Mapping[str, LazyTensor], key: str) -> ScaledTensor | None:
    """The weight `key` if it has scales; None if it is not in float8.

    Raises:
        ValueError: the weight is in float8 without scales, or its scales have another shape or dtype.
    """
    stored, scales = found.get(key), found.get(key + SCALES)
    if stored is None or (scales is None and stored.dtype.itemsize > 1):
        return None
    if scales is None:
        raise ValueError(f"{key}: is in {_kind(stored)}, but the files have no {key}{SCALES}")
    if stored.dtype != torch.float8_e4m3fn or scales.dtype not in (torch.float32, torch.bfloat16):
        reason = "only float8_e4m3fn with float32 or bfloat16 is supported"
        raise ValueError(f"{key}: is in {_kind(stored)}, its scales in {_kind(scales)}; {reason}")
    blocks = tuple(math.ceil(size / BLOCK) for size in stored.shape)
    if scales.shape != blocks:
        reason = f"blocks of {BLOCK} × {BLOCK} have {blocks}"
        raise ValueError(f"{key}: scales of shape {scales.shape}; {reason}")
    return ScaledTensor(stored, scales)


def _kind(tensor: LazyTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
