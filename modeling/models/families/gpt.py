"""GPT-3 with dense attention (arXiv 2005.14165), as built from GPT-2.

    x = dropout(embed(tokens) + embed(positions))
    for each layer:  x = x + dropout(attention(norm(x)));  x = x + dropout(mlp(norm(x)))
    logits = head(norm(x))

with LayerNorm, learned positions, multi-head attention with dropout of its probabilities, mlp(x) = down(gelu(up(x))),
biases throughout, and usually a head tied to the embedding. Megatron's GPT also has dropout of gelu(up(x)).

Shapes as in llama.py: b batch, s sequence, h hidden, f MLP width, n heads, d head size, v vocabulary, t tensor
degree, c context degree. Hidden states between layers are (b·s/c, h), or (b·s/(c·t), h) with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.models.language_model import (
    AttentionLayer,
    LanguageModel,
    LayerOptions,
    NormOptions,
    WeightOptions,
)
from modeling.models.weight_names import HuggingFaceTensor, Index, locate_rows, renamed
from parallel import (
    ColumnParallelLinear,
    Embedding,
    GQAQKVColumnParallelLinear,
    LayerNorm,
    Mesh,
    Normal,
    RowParallelLinear,
)
from parallel.attention.attention import attention
from parallel.attention.dropout import dropout_attention
from parallel.random import Keys, dropout
from profiles.sections.model import Model


class Attention(AttentionLayer):
    heads: Tensor

    def __init__(self, model: Model, mesh: Mesh, residual: Normal, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        self.d, self.dropout = model.head_dim, model.dropout
        self.context = mesh.context
        self.maxima = None
        n, h = model.num_attention_heads, model.hidden_size
        options["bias"] = model.attention_bias
        self.qkv = GQAQKVColumnParallelLinear(h, n, n, self.d, mesh, **options)
        options["initializer"] = residual
        self.output = RowParallelLinear(n * self.d, h, mesh.tensor, **options)
        # Global numbers of this rank's heads: they key dropout. A buffer, so that no graph depends on the rank.
        heads = torch.arange(self.qkv.heads, device=options["device"]) + mesh.tensor.rank * self.qkv.heads
        self.register_buffer("heads", heads, persistent=False)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None, keys: Keys | None) -> Tensor:
        heads = self.qkv.heads  # on this rank: n/t
        qkv = self.qkv(x, keys).view(-1, positions.shape[-1], 3 * heads, self.d)  # (b, s/c, 3n/t, d)
        q, k, v = qkv.transpose(1, 2).split(heads, 1)  # (b, n/t, s/c, d) each
        if keys is None or not self.dropout:
            y = attention(q, k, v, self.context, documents=documents)  # (b, n/t, s/c, d)
        else:
            y = dropout_attention(  # (b, n/t, s/c, d)
                q,
                k,
                v,
                self.context,
                positions=positions,
                keys=keys.attention,
                heads=self.heads,
                rate=self.dropout,
                documents=documents,
            )
        if self.maxima is not None:
            y = self.maxima(y, q, k, self.context, documents=documents)
        return self.output(y.transpose(1, 2).reshape(-1, heads * self.d), keys)  # (b·s/c, h)


class MLP(nn.Module):
    features: Tensor

    def __init__(self, model: Model, mesh: Mesh, residual: Normal, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        h, f = model.hidden_size, model.intermediate_size
        self.approximate = {"gelu": "none", "gelu_new": "tanh"}[model.hidden_act]
        self.dropout = model.mlp_dropout
        options["bias"] = model.mlp_bias
        # Global numbers of this rank's features: they key dropout. A buffer, so that no graph depends on the rank.
        local = f // mesh.tensor.size
        features = torch.arange(local, device=options["device"]) + mesh.tensor.rank * local
        self.register_buffer("features", features, persistent=False)
        self.up = ColumnParallelLinear(h, f, mesh.tensor, **options)
        options["initializer"] = residual
        self.down = RowParallelLinear(f, h, mesh.tensor, **options)

    def forward(self, x: Tensor, keys: Keys | None) -> Tensor:
        y = F.gelu(self.up(x, keys), approximate=self.approximate)  # (b·s/c, f/t)
        if keys is not None and self.dropout:
            y = dropout(y, keys.attention.flatten(), self.dropout, self.features)
        return self.down(y, keys)  # (b·s/c, h)


class Block(nn.Module):
    def __init__(
        self, model: Model, mesh: Mesh, layer: int, norm: NormOptions, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__()
        self.dropout = model.dropout
        residual = Normal(model.residual_initializer_range)
        self.attention_norm = LayerNorm(model.hidden_size, mesh.tensor, **norm)
        self.attention = Attention(model, mesh, residual, **options)
        self.mlp_norm = LayerNorm(model.hidden_size, mesh.tensor, **norm)
        self.mlp = MLP(model, mesh, residual, **options)

    def forward(
        self, x: Tensor, positions: Tensor, documents: Tensor | None = None, keys: Keys | None = None
    ) -> Tensor:
        y = self.attention(self.attention_norm(x), positions, documents, keys and keys.fold(0))
        x = x + self._dropout(y, keys, 1)
        y = self.mlp(self.mlp_norm(x), keys and keys.fold(3))
        return x + self._dropout(y, keys, 2)

    def _dropout(self, y: Tensor, keys: Keys | None, site: int) -> Tensor:
        if keys is None or not self.dropout:
            return y
        return dropout(y, keys.fold(site).hidden, self.dropout)


def _columns(part: int, model: Model, numbers: Sequence[int]) -> Index:
    """Where q, k or v, transposed, lies in one matrix of them all."""
    return (slice(None), *locate_rows(part, model, numbers))


_LAYER, _STORED = "layers.{}", "transformer.h.{}"
_ATTENTION = {
    f"{_LAYER}.attention.qkv.{letter}.{kind}": HuggingFaceTensor(
        f"{_STORED}.attn.c_attn.{kind}", kind == "weight", partial(locate, part)
    )
    for part, letter in enumerate("qkv")
    for kind, locate in (("weight", _columns), ("bias", locate_rows))
}
_PROJECTIONS = {
    f"{_LAYER}.attention.output": f"{_STORED}.attn.c_proj",
    f"{_LAYER}.mlp.up": f"{_STORED}.mlp.c_fc",
    f"{_LAYER}.mlp.down": f"{_STORED}.mlp.c_proj",
}
_NORMS = {
    f"{_LAYER}.attention_norm": f"{_STORED}.ln_1",
    f"{_LAYER}.mlp_norm": f"{_STORED}.ln_2",
    "norm": "transformer.ln_f",
}
WEIGHTS = {
    **renamed({"embedding": "transformer.wte", "positions": "transformer.wpe", "head": "lm_head"}),
    **renamed(_NORMS, ("weight", "bias")),
    **_ATTENTION,
    **renamed(_PROJECTIONS, transposed=True),
    **renamed(_PROJECTIONS, ("bias",)),
}


class GPT(LanguageModel):
    """GPT, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
    weights = WEIGHTS

    def add_position_embedding(self, **options: Unpack[WeightOptions]) -> None:
        rows, hidden = self.model.max_position_embeddings, self.model.hidden_size
        self.positions = Embedding(rows, hidden, self.axis, **options)

    def embed_tokens(
        self, ids: Tensor, positions: Tensor, documents: Tensor | None, keys: Keys | None
    ) -> Tensor:
        offsets = positions if documents is None else self.offsets(positions, documents)
        return self.embed(self.embedding(ids), self.positions(offsets.expand(ids.shape)), keys)

    def offsets(self, positions: Tensor, documents: Tensor) -> Tensor:
        """Positions (b, s/c) of tokens in their documents."""
        return positions - documents

    def embed(self, tokens: Tensor, positions: Tensor, keys: Keys | None) -> Tensor:
        """The sum of the embeddings of tokens and positions, with dropout."""
        x = tokens + positions
        return dropout(x, keys.hidden, self.model.dropout) if keys and self.model.dropout else x
