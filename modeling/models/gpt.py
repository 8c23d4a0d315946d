"""GPT-3 (arXiv 2005.14165), as GPT-2 built with dense attention.

    x = dropout(embed(tokens) + embed(positions))
    for each layer:  x = x + dropout(attention(norm(x)));  x = x + dropout(mlp(norm(x)))
    logits = embed(norm(x)), transposed

with LayerNorm, learned positions, multi-head attention with dropout of its probabilities, mlp(x) = down(gelu(up(x))) and
biases throughout. Projections onto the residual stream start smaller by √(2 · layers).

Shapes as in llama.py: b batch, s sequence, h hidden, n heads, d head size, v vocabulary, t tensor degree, c context degree.
Between layers hidden states are (b·s/c, h), or (b·s/(c·t), h) with sequence parallelism.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.models.language_model import LanguageModel
from parallel import (
    ColumnParallelLinear,
    Embedding,
    GQAQKVColumnParallelLinear,
    LayerNorm,
    Mesh,
    Normal,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from parallel.attention.attention import attention
from parallel.attention.dropout import dropout_attention
from parallel.random import Keys, dropout, token_keys
from profiles.model import Model


class Attention(nn.Module):
    def __init__(self, model: Model, mesh: Mesh, residual: Normal, **layer: object) -> None:
        super().__init__()
        self.d, self.dropout = model.head_dim, model.dropout
        self.context = mesh.context
        n, h = model.num_attention_heads, model.hidden_size
        self.qkv = GQAQKVColumnParallelLinear(h, n, n, self.d, mesh, bias=model.attention_bias, **layer)
        layer["initializer"] = residual
        self.output = RowParallelLinear(n * self.d, h, mesh.tensor, bias=model.attention_bias, **layer)
        own = torch.arange(self.qkv.heads, device=layer["device"]) + mesh.tensor.rank * self.qkv.heads
        self.register_buffer("heads", own, persistent=False)  # their global numbers

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, keys: Keys | None) -> Tensor:
        heads = self.qkv.heads  # of this rank: n/t
        qkv = self.qkv(x).view(-1, positions.shape[-1], 3 * heads, self.d)  # (b, s/c, 3n/t, d)
        q, k, v = qkv.transpose(1, 2).split(heads, 1)  # (b, n/t, s/c, d) each
        if keys is None:
            y = attention(q, k, v, self.context, documents=documents)  # (b, n/t, s/c, d)
        else:
            places = {"positions": positions, "keys": keys.whole, "heads": self.heads}
            y = dropout_attention(
                q, k, v, self.context, **places, rate=self.dropout, documents=documents
            )  # (b, n/t, s/c, d)
        return self.output(y.transpose(1, 2).reshape(-1, heads * self.d))  # (b·s/c, h)


class MLP(nn.Module):
    def __init__(self, model: Model, mesh: Mesh, residual: Normal, **layer: object) -> None:
        super().__init__()
        h, f = model.hidden_size, model.intermediate_size
        self.approximate = {"gelu": "none", "gelu_new": "tanh"}[model.hidden_act]
        self.up = ColumnParallelLinear(h, f, mesh.tensor, bias=model.mlp_bias, **layer)
        layer["initializer"] = residual
        self.down = RowParallelLinear(f, h, mesh.tensor, bias=model.mlp_bias, **layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, model: Model, mesh: Mesh, norm: dict[str, object], **layer: object) -> None:
        super().__init__()
        self.dropout = model.dropout
        residual = Normal(model.initializer_range / math.sqrt(2 * model.num_hidden_layers))
        self.attention_norm = LayerNorm(model.hidden_size, mesh.tensor, **norm)
        self.attention = Attention(model, mesh, residual, **layer)
        self.mlp_norm = LayerNorm(model.hidden_size, mesh.tensor, **norm)
        self.mlp = MLP(model, mesh, residual, **layer)

    def forward(
        self, x: Tensor, positions: Tensor, documents: Tensor | None = None, keys: Keys | None = None
    ) -> Tensor:
        y = self.attention(self.attention_norm(x), positions, documents, keys and keys.fold(0))
        x = x + self._drop(y, keys, 1)
        y = self.mlp(self.mlp_norm(x))
        return x + self._drop(y, keys, 2)

    def _drop(self, y: Tensor, keys: Keys | None, place: int) -> Tensor:
        return y if keys is None else dropout(y, keys.fold(place).own, self.dropout)


class GPT(LanguageModel):
    """The model, or the pipeline stage of it that holds `layers`. Arguments as for Llama."""

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
        if self.first:
            self.positions = Embedding(model.max_position_embeddings, model.hidden_size, mesh.tensor, **layer)
        self.layers = nn.ModuleDict({str(i): Block(model, mesh, norm, **layer) for i in layers})
        if self.last:
            self.norm = LayerNorm(model.hidden_size, mesh.tensor, **norm)
            if not model.tie_word_embeddings:
                self.head = VocabParallelEmbedding(model.vocab_size, model.hidden_size, mesh.tensor, **layer)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """Token ids (b, s/c), or a former stage's hidden states, to hidden states.

        Args:
            positions: (s/c), of this context rank's tokens.
            documents: (b, s/c) the position that each token's document begins at, where attention stays within one and
                learned positions begin again with it.
            samples: (b) keys of the samples (`sample_keys`), for dropout; without them there is none.
        """
        keys = None
        if samples is not None and self.model.dropout:
            keys = token_keys(samples, positions, self.axis, self.sequence)
        if self.first:
            own = positions if documents is None else positions - documents
            x = self.embedding(x) + self.positions(own.expand(x.shape))
            if keys:
                x = dropout(x, keys.own, self.model.dropout)
        for number, layer in self.layers.items():
            x = layer(x, positions, documents, keys and keys.fold(int(number)))
        return self.norm(x) if self.last else x
