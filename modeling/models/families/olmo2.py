"""OLMo 2 (arXiv 2501.00656): Llama with norms after attention and MLP, and with QK-norms.

    x = x + norm(attention(x));  x = x + norm(mlp(x))
    q, k = norm(q), norm(k)        over all heads of a token, before they are rotated

Shapes as in `llama.py`.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from modeling.models.families import llama
from modeling.models.language_model import LayerOptions
from modeling.models.weight_names import HuggingFaceTensor
from parallel import Mesh
from parallel.layers.norms import ProjectionNorm
from parallel.random import Keys
from profiles.sections.model import Model


class Attention(llama.Attention):
    def __init__(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(model, mesh, layer, **options)
        norm = {"epsilon": model.norm_eps, **{name: options[name] for name in ("dtype", "device")}}
        self.q_norm = ProjectionNorm(model.num_attention_heads, self.d, mesh, **norm)
        self.k_norm = ProjectionNorm(model.num_key_value_heads, self.d, mesh, mesh.kv_replicas, **norm)

    def normalize(self, qk: Tensor) -> Tensor:
        q, k = qk[:, :, : self.qkv.heads], qk[:, :, self.qkv.heads :]  # (b, s/c, n/t, d), (b, s/c, k/t, d)
        return torch.cat((self.q_norm(q), self.k_norm(k)), 2)


class Block(llama.Block):
    attention_layer = Attention

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None = None, keys: Keys | None = None
    ) -> Tensor:
        x = x + self.attention_norm(self.attention(x, cos, sin, documents, keys))
        return x + self.mlp_norm(self.mlp(x, keys))


WEIGHTS = {
    **llama.WEIGHTS,
    "layers.{}.attention.q_norm.weight": HuggingFaceTensor("model.layers.{}.self_attn.q_norm.weight"),
    "layers.{}.attention.k_norm.weight": HuggingFaceTensor("model.layers.{}.self_attn.k_norm.weight"),
    "layers.{}.attention_norm.weight": HuggingFaceTensor("model.layers.{}.post_attention_layernorm.weight"),
    "layers.{}.mlp_norm.weight": HuggingFaceTensor("model.layers.{}.post_feedforward_layernorm.weight"),
}


class Olmo2(llama.Llama):
    """OLMo 2, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
    weights = WEIGHTS
