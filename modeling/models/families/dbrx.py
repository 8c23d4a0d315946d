"""DBRX: Mixtral with clipped heads and centred norms.

    q, k, v = clip(W x, ±c)        before q and k are rotated
    norm(x) = (x - mean) / sqrt(var + ε) · w

Shapes as in `llama.py`. Described in databricks.com/blog/introducing-dbrx-new-state-art-open-llm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from torch import Tensor

from modeling.models.families import llama, mixtral
from modeling.models.language_model import LayerOptions
from modeling.models.weight_names import HuggingFaceTensor, Index, locate_rows, renamed
from parallel import Mesh
from parallel.random import Keys
from profiles.sections.model import Model


class Attention(llama.Attention):
    def __init__(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(model, mesh, layer, **options)
        self.clip = model.clip_qkv

    def project(self, x: Tensor, keys: Keys | None) -> Tensor:
        qkv = self.qkv(x, keys)
        return qkv if self.clip is None else qkv.clamp(-self.clip, self.clip)


class Block(mixtral.Block):
    attention_layer = Attention


def _expert_rows(model: Model, numbers: Sequence[int]) -> Index:
    """Rows of an expert in the matrix of all experts."""
    return (slice(numbers[1] * model.expert_width, (numbers[1] + 1) * model.expert_width),)


_BLOCK = "transformer.blocks.{}"
WEIGHTS = {
    **renamed(
        {
            "embedding": "transformer.wte",
            "layers.{}.attention_norm": f"{_BLOCK}.norm_attn_norm.norm_1",
            "layers.{}.attention.output": f"{_BLOCK}.norm_attn_norm.attn.out_proj",
            "layers.{}.mlp_norm": f"{_BLOCK}.norm_attn_norm.norm_2",
            "layers.{}.mlp.router": f"{_BLOCK}.ffn.router.layer",
            "norm": "transformer.norm_f",
            "head": "lm_head",
        }
    ),
    **{
        f"layers.{{}}.attention.qkv.{letter}.weight": HuggingFaceTensor(
            f"{_BLOCK}.norm_attn_norm.attn.Wqkv.weight", locate=partial(locate_rows, part)
        )
        for part, letter in enumerate("qkv")
    },
    **{
        f"layers.{{}}.mlp.{ours}.weight": HuggingFaceTensor(
            f"{_BLOCK}.ffn.experts.mlp.{theirs}", theirs == "w2", _expert_rows
        )
        for ours, theirs in {"gate_up.{}.gate": "w1", "gate_up.{}.up": "v1", "down.{}": "w2"}.items()
    },
}


class Dbrx(llama.Llama):
    """DBRX, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
    weights = WEIGHTS
