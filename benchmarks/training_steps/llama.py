"""Plain torch Llama with Hugging Face's parameter names and a replaceable attention function."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.sections.model import Model

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's causal attention of q (b, n, s, d), k and v (b, k, s, d)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, model: Model, attend: AttentionFunction) -> None:
        super().__init__()
        h, self.d, self.attend = model.hidden_size, model.head_dim, attend
        query, key = model.num_attention_heads * self.d, model.num_key_value_heads * self.d
        self.q_proj = nn.Linear(h, query, bias=False)
        self.k_proj = nn.Linear(h, key, bias=False)
        self.v_proj = nn.Linear(h, key, bias=False)
        self.o_proj = nn.Linear(query, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.d)).transpose(1, 2)  # (b, heads, s, d)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (b, s, h)


class MLP(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        h, f = model.hidden_size, model.intermediate_size
        self.gate_proj = nn.Linear(h, f, bias=False)
        self.up_proj = nn.Linear(h, f, bias=False)
        self.down_proj = nn.Linear(f, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, model: Model, attend: AttentionFunction) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.self_attn = Attention(model, attend)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.mlp = MLP(model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """What is before the head."""

    def __init__(self, model: Model, attend: AttentionFunction) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Block(model, attend) for _ in range(model.num_hidden_layers))
        self.norm = nn.RMSNorm(model.hidden_size, model.norm_eps)


class Llama(nn.Module):
    """Token ids (b, s) to logits (b, s, v).

    Args:
        positions: (s) of the tokens in the input; by default 0, 1, 2, ...
        attend: attention of q (b, n, s, d) and k, v (b, k, s, d).
    """

    def __init__(
        self, model: Model, positions: Tensor | None = None, attend: AttentionFunction = causal_attention
    ) -> None:
        super().__init__()
        self.model = Body(model, attend)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        if model.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        positions = torch.arange(model.max_position_embeddings) if positions is None else positions
        cos, sin = rotary_tables(model, positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.model.norm(x))


def rotary_tables(model: Model, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (s, d) of rotary embeddings; both halves of a head have the same angles."""
    d = model.head_dim
    angles = torch.outer(positions.float(), model.rope_theta ** (-torch.arange(0, d, 2) / d)).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to (b, heads, s, d), in float32."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over tokens, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
