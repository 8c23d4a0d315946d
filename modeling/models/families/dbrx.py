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
from modeling.models.weight_names import HuggingFaceTensor, Index, locate_rows
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


_DBRX = "transformer.blocks.{}"
WEIGHTS = {
    "embedding.weight": HuggingFaceTensor("transformer.wte.weight"),
    "layers.{}.attention_norm.weight": HuggingFaceTensor(f"{_DBRX}.norm_attn_norm.norm_1.weight"),
    **{
        f"layers.{{}}.attention.qkv.{letter}.weight": HuggingFaceTensor(
            f"{_DBRX}.norm_attn_norm.attn.Wqkv.weight",
            locate=partial(locate_rows, part),
        )
        for part, letter in enumerate("qkv")
    },
    "layers.{}.attention.output.weight": HuggingFaceTensor(f"{_DBRX}.norm_attn_norm.attn.out_proj.weight"),
    "layers.{}.mlp_norm.weight": HuggingFaceTensor(f"{_DBRX}.norm_attn_norm.norm_2.weight"),
    "layers.{}.mlp.router.weight": HuggingFaceTensor(f"{_DBRX}.ffn.router.layer.weight"),
    "layers.{}.mlp.gate_up.{}.gate.weight": HuggingFaceTensor(
        f"{_DBRX}.ffn.experts.mlp.w1", locate=_expert_rows
    ),
    "layers.{}.mlp.gate_up.{}.up.weight": HuggingFaceTensor(
        f"{_DBRX}.ffn.experts.mlp.v1", locate=_expert_rows
    ),
    "layers.{}.mlp.down.{}.weight": HuggingFaceTensor(f"{_DBRX}.ffn.experts.mlp.w2", True, _expert_rows),
    "norm.weight": HuggingFaceTensor("transformer.norm_f.weight"),
    "head.weight": HuggingFaceTensor("lm_head.weight"),
}


class Dbrx(llama.Llama):
    """DBRX, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
    weights = WEIGHTS
