"""DBRX (databricks.com/blog/introducing-dbrx-new-state-art-open-llm): Mixtral with clipped heads and centred norms.

    q, k, v = clip(W x, ±c)        before q and k are rotated
    norm(x) = (x - mean) / sqrt(var + ε) · w

Shapes as in `llama.py`.
"""

from __future__ import annotations

from torch import Tensor

from modeling.models.families import llama, mixtral
from parallel import Mesh
from parallel.layers.norms import CenteredNorm
from parallel.random import Keys
from profiles.sections.model import Model


class Attention(llama.Attention):
    def __init__(self, model: Model, mesh: Mesh, layer: int, **options: object) -> None:
        super().__init__(model, mesh, layer, **options)
        self.clip = model.clip_qkv

    def project(self, x: Tensor, keys: Keys | None) -> Tensor:
        qkv = self.qkv(x, keys)
        return qkv if self.clip is None else qkv.clamp(-self.clip, self.clip)


class Block(mixtral.Block):
    attention_layer, norm_layer = Attention, CenteredNorm


class Dbrx(llama.Llama):
    """DBRX, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block, norm_layer = Block, CenteredNorm
