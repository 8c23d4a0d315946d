"""Llama 2, 3 and 3.1 (arXiv 2307.09288, 2407.21783), and models built like them (deepseek-coder).

    x = embed(tokens)
    for each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = head(norm(x))

with RMSNorm, rotary positions, grouped-query attention and mlp(x) = down(silu(gate(x)) · up(x)).

Shapes: b batch, s sequence, h hidden, f MLP width, n query heads, k KV heads, d head size, v vocabulary, t tensor
degree, c context degree. Hidden states between layers are (b·s/c, h), or (b·s/(c·t), h) with sequence parallelism.
"""

from __future__ import annotations

from typing import Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from modeling.models import parametrization
from modeling.models.language_model import LanguageModel, LayerOptions, ModelOptions, NormOptions
from modeling.models.rope import attention_factor, cos_sin, inverse_frequencies, rotate
from modeling.models.weight_names import HuggingFaceTensor
from parallel import ColumnParallelLinear, GQAQKVColumnParallelLinear, Mesh, RMSNorm, RowParallelLinear
from parallel.attention.attention import attention
from parallel.random import Keys
from profiles.sections.model import Model


class Attention(nn.Module):
    def __init__(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        self.d, self.window = model.head_dim, model.window(layer)
        self.context = mesh.context
        h, n, k = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
        options["bias"] = model.attention_bias
        self.qkv = GQAQKVColumnParallelLinear(h, n, k, self.d, mesh, **options)
        self.register_parameter("sinks", None)  # only some families have them
        options["initializer"] = parametrization.residual(model)
        self.output = RowParallelLinear(n * self.d, h, mesh.tensor, **options)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None, keys: Keys | None = None
    ) -> Tensor:
        heads, kv_heads = self.qkv.heads, self.qkv.kv_heads  # on this rank: n/t and k/t
        qkv = self.project(x, keys)  # (b·s/c, (n + 2k)/t·d)
        qkv = qkv.view(-1, cos.shape[1], heads + 2 * kv_heads, self.d)  # (b, s/c, (n + 2k)/t, d)
        qk = self.normalize(qkv[:, :, : heads + kv_heads])
        qk = rotate(qk, cos, sin).transpose(1, 2)  # (b, (n + k)/t, s/c, d)
        q, k = qk[:, :heads], qk[:, heads:]  # (b, n/t, s/c, d), (b, k/t, s/c, d)
        v = qkv[:, :, heads + kv_heads :].transpose(1, 2)  # (b, k/t, s/c, d)
        masks = {"documents": documents, "window": self.window, "sinks": self.sinks}
        y = attention(q, k, v, self.context, **masks)  # (b, n/t, s/c, d)
        return self.output(y.transpose(1, 2).reshape(-1, heads * self.d), keys)  # (b·s/c, h)

    def project(self, x: Tensor, keys: Keys | None) -> Tensor:
        """Hidden states to Q, K and V heads (b·s/c, (n + 2k)/t·d); overridden by families that clip them."""
        return self.qkv(x, keys)

    def normalize(self, qk: Tensor) -> Tensor:
        """Query and key heads (b, s/c, (n + k)/t, d) before rotation; overridden by families with QK-norms."""
        return qk


class MLP(nn.Module):
    def __init__(
        self, model: Model, mesh: Mesh, width: int | None = None, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__()
        h, f = model.hidden_size, width or model.intermediate_size
        options["bias"] = model.mlp_bias
        self.gate_up = ColumnParallelLinear(h, {"gate": f, "up": f}, mesh.tensor, **options)
        options["initializer"] = parametrization.residual(model)
        self.down = RowParallelLinear(f, h, mesh.tensor, **options)

    def forward(self, x: Tensor, keys: Keys | None = None) -> Tensor:
        gate, up = self.gate_up(x, keys).chunk(2, -1)  # (b·s/c, f/t) each
        return self.down(F.silu(gate) * up, keys)  # (b·s/c, h)


class Block(nn.Module):
    attention_layer: type[Attention] = Attention
    norm_layer: type[RMSNorm] = RMSNorm

    def __init__(
        self, model: Model, mesh: Mesh, layer: int, norm: NormOptions, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__()
        self.attention_norm = self.norm_layer(model.hidden_size, mesh.tensor, **norm)
        self.attention = self.attention_layer(model, mesh, layer, **options)
        self.mlp_norm = self.norm_layer(model.hidden_size, mesh.tensor, **norm)
        self.mlp = self.build_mlp(model, mesh, layer, **options)

    def build_mlp(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> nn.Module:
        """The layer after attention; overridden by families with experts."""
        return MLP(model, mesh, **options)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None = None, keys: Keys | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, documents, keys)
        return x + self.mlp(self.mlp_norm(x), keys)


WEIGHTS = {
    "embedding.weight": HuggingFaceTensor("model.embed_tokens.weight"),
    "layers.{}.attention_norm.weight": HuggingFaceTensor("model.layers.{}.input_layernorm.weight"),
    "layers.{}.attention.qkv.q.weight": HuggingFaceTensor("model.layers.{}.self_attn.q_proj.weight"),
    "layers.{}.attention.qkv.k.weight": HuggingFaceTensor("model.layers.{}.self_attn.k_proj.weight"),
    "layers.{}.attention.qkv.v.weight": HuggingFaceTensor("model.layers.{}.self_attn.v_proj.weight"),
    "layers.{}.attention.qkv.q.bias": HuggingFaceTensor("model.layers.{}.self_attn.q_proj.bias"),
    "layers.{}.attention.qkv.k.bias": HuggingFaceTensor("model.layers.{}.self_attn.k_proj.bias"),
    "layers.{}.attention.qkv.v.bias": HuggingFaceTensor("model.layers.{}.self_attn.v_proj.bias"),
    "layers.{}.attention.output.weight": HuggingFaceTensor("model.layers.{}.self_attn.o_proj.weight"),
    "layers.{}.attention.output.bias": HuggingFaceTensor("model.layers.{}.self_attn.o_proj.bias"),
    "layers.{}.mlp_norm.weight": HuggingFaceTensor("model.layers.{}.post_attention_layernorm.weight"),
    "layers.{}.mlp.gate_up.gate.weight": HuggingFaceTensor("model.layers.{}.mlp.gate_proj.weight"),
    "layers.{}.mlp.gate_up.up.weight": HuggingFaceTensor("model.layers.{}.mlp.up_proj.weight"),
    "layers.{}.mlp.gate_up.gate.bias": HuggingFaceTensor("model.layers.{}.mlp.gate_proj.bias"),
    "layers.{}.mlp.gate_up.up.bias": HuggingFaceTensor("model.layers.{}.mlp.up_proj.bias"),
    "layers.{}.mlp.down.weight": HuggingFaceTensor("model.layers.{}.mlp.down_proj.weight"),
    "layers.{}.mlp.down.bias": HuggingFaceTensor("model.layers.{}.mlp.down_proj.bias"),
    "norm.weight": HuggingFaceTensor("model.norm.weight"),
    "head.weight": HuggingFaceTensor("lm_head.weight"),
}


class Llama(LanguageModel):
    """Llama, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block, norm_layer = Block, RMSNorm
    weights = WEIGHTS

    def __init__(
        self, model: Model, mesh: Mesh, layers: range | None = None, **options: Unpack[ModelOptions]
    ) -> None:
        super().__init__(model, mesh, layers, **options)
        theta = inverse_frequencies(model).to(options.get("device"))
        self.register_buffer("theta", theta, persistent=False)

    def block_arguments(self, positions: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.rotations(positions, documents)

    def rotations(self, positions: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rotation tables (1 or b, s/c, 1, d) of tokens at these positions in their documents."""
        offsets = positions if documents is None else positions - documents
        return cos_sin(offsets, self.theta, attention_factor(self.model))
