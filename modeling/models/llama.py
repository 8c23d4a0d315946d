"""Llama 2, 3 and 3.1, and what shares their architecture (deepseek-coder).

    x = embed(tokens)
    for each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = head(norm(x))

with RMSNorm, rotary positions, grouped-query attention and mlp(x) = down(silu(gate(x)) · up(x)).

Shapes: b batch, s sequence, h hidden, n query heads, k KV heads, d head size, v vocabulary, t tensor degree, c context degree.
Between layers hidden states are (b·s/c, h), or (b·s/(c·t), h) with sequence parallelism.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.models.language_model import LanguageModel
from modeling.models.rope import frequencies, rotate, tables
from parallel import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    Mesh,
    Normal,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from parallel.attention.attention import attention
from profiles.model import Model


class Attention(nn.Module):
    def __init__(self, model: Model, mesh: Mesh, **layer: object) -> None:
        super().__init__()
        self.d = model.head_dim
        self.context = mesh.context
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
        self.qkv = GQAQKVColumnParallelLinear(
            model.hidden_size, heads, kv_heads, self.d, mesh, bias=model.attention_bias, **layer
        )
        self.output = RowParallelLinear(
            heads * self.d, model.hidden_size, mesh.tensor, bias=model.attention_bias, **layer
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None) -> Tensor:
        heads, kv_heads = self.qkv.heads, self.qkv.kv_heads  # of this rank: n/t and k/t
        qkv = self.qkv(x)  # (b·s/c, (n + 2k)/t·d)
        qkv = qkv.view(-1, cos.shape[1], heads + 2 * kv_heads, self.d)  # (b, s/c, (n + 2k)/t, d)
        turned = rotate(qkv[:, :, : heads + kv_heads], cos, sin).transpose(1, 2)  # (b, (n + k)/t, s/c, d)
        q, k = turned[:, :heads], turned[:, heads:]
        v = qkv[:, :, heads + kv_heads :].transpose(1, 2)  # (b, k/t, s/c, d)
        y = attention(q, k, v, self.context, documents=documents)  # (b, n/t, s/c, d)
        return self.output(y.transpose(1, 2).reshape(-1, heads * self.d))  # (b·s/c, h)


class MLP(nn.Module):
    def __init__(self, model: Model, mesh: Mesh, **layer: object) -> None:
        super().__init__()
        h, f = model.hidden_size, model.intermediate_size
        self.gate_up = ColumnParallelLinear(
            h, {"gate": f, "up": f}, mesh.tensor, bias=model.mlp_bias, **layer
        )
        self.down = RowParallelLinear(f, h, mesh.tensor, bias=model.mlp_bias, **layer)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)  # (b·s/c, f/t) each
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, model: Model, mesh: Mesh, norm: dict[str, object], **layer: object) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden_size, mesh.tensor, **norm)
        self.attention = Attention(model, mesh, **layer)
        self.mlp_norm = RMSNorm(model.hidden_size, mesh.tensor, **norm)
        self.mlp = MLP(model, mesh, **layer)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, documents)
        return x + self.mlp(self.mlp_norm(x))


class Llama(LanguageModel):
    """The model, or the pipeline stage of it that holds `layers`.

    Args:
        model: the architecture's numbers.
        mesh: where it lies.
        layers: this stage's; the first has the embedding, the last the head. All by default.
        sequence_parallel: whether hidden states are split over the tensor axis between layers.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        layers: range | None = None,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        layers = range(model.num_hidden_layers) if layers is None else layers
        self.model, self.axis = model, mesh.tensor
        self.sequence = sequence_parallel and mesh.tensor.size > 1
        layer = {"sequence_parallel": sequence_parallel, "dtype": dtype, "device": device}
        norm = {"epsilon": model.norm_eps, **layer}
        layer["initializer"] = Normal(model.initializer_range)
        self.first, self.last = 0 in layers, model.num_hidden_layers - 1 in layers
        if self.first or (self.last and model.tie_word_embeddings):
            shared = ("ends",) if model.tie_word_embeddings and mesh.pipeline.size > 1 else ()
            self.embedding = VocabParallelEmbedding(
                model.vocab_size, model.hidden_size, mesh.tensor, partial=shared, **layer
            )
        self.layers = nn.ModuleDict({str(i): Block(model, mesh, norm, **layer) for i in layers})
        if self.last:
            self.norm = RMSNorm(model.hidden_size, mesh.tensor, **norm)
            if not model.tie_word_embeddings:
                self.head = VocabParallelEmbedding(model.vocab_size, model.hidden_size, mesh.tensor, **layer)
        self.register_buffer("theta", frequencies(model).to(device), persistent=False)

    def forward(
        self, x: Tensor, positions: Tensor, documents: Tensor | None = None, samples: Tensor | None = None
    ) -> Tensor:
        """Token ids (b, s/c), or a former stage's hidden states, to hidden states.

        Args:
            positions: (s/c), of this context rank's tokens.
            documents: (b, s/c) the position that each token's document begins at, where attention stays within one and
                positions begin again with it.
            samples: (b) keys of the samples, for dropout, of which there is none here.
        """
        if documents is not None:
            positions = positions - documents  # (b, s/c)
        cos, sin = tables(positions, self.theta)  # (1 or b, s/c, 1, d)
        if self.first:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, cos, sin, documents)
        return self.norm(x) if self.last else x
