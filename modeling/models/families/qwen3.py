"""Qwen3, dense (arXiv 2505.09388): Llama with each query and key head normalized before it is rotated.

    q, k = norm(q), norm(k)        over the head size d, one weight for all query heads and one for all key heads

The head size is independent of hidden size / heads; small models tie the embedding. Shapes as in `llama.py`.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from modeling.models.families import llama
from modeling.models.language_model import LayerOptions
from modeling.models.weight_names import HuggingFaceTensor
from parallel import Mesh
from parallel.layers.norms import HeadNorm
from profiles.sections.model import Model


class Attention(llama.Attention):
    def __init__(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(model, mesh, layer, **options)
        placed = {name: options[name] for name in ("dtype", "device")}
        self.qk_norm = HeadNorm(model.head_dim, mesh.tensor, epsilon=model.norm_eps, **placed)

    def normalize(self, qk: Tensor) -> Tensor:
        return self.qk_norm(qk, self.qkv.heads)


class Block(llama.Block):
    attention_layer = Attention


WEIGHTS = {
    **llama.WEIGHTS,
    "layers.{}.attention.qk_norm.q.weight": HuggingFaceTensor("model.layers.{}.self_attn.q_norm.weight"),
    "layers.{}.attention.qk_norm.k.weight": HuggingFaceTensor("model.layers.{}.self_attn.k_norm.weight"),
}


class Qwen3(llama.Llama):
    """Qwen3, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
    weights = WEIGHTS
