"""QK-clip (arXiv 2507.20534): scale down queries and keys whose logits exceed a threshold.

With S the largest logit of a head in a step, over all tokens of the global batch, and a threshold τ, after the update:

    γ = min(1, τ / S)

    Q, K and their biases                           √γ each
    latent attention: K and Q without rotation      √γ each
                      Q that is rotated             γ, because all heads share the rotated key, which stays

The logits of a head are multiplied by γ, those of heads within the threshold are not touched. Query heads that share a KV head
have the γ of the one with the largest logit, as in Megatron-LM (`SelfAttention.clip_qk`): the shared K can be scaled only once.
The report describes latent attention, whose heads share no K but the rotated part.

Flat factors, of L layers and k KV heads: 1, √γ (L·k), γ (L·k).
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from profiles.sections.model import Model

_NAME = re.compile(r"layers\.(\d+)\.attention\.(qkv\.q|qkv\.k|q|kv)\.(?:weight|bias)")


def factors(logits: Tensor, threshold: float, groups: int) -> Tensor:
    """The flat factors of the largest logits of each query head, (L, n), with `key_heads` as groups."""
    largest = logits.unflatten(1, (groups, -1)).amax(-1).flatten()  # (L·k)
    scale = torch.where(largest > threshold, threshold / largest, 1.0)
    return torch.cat((scale.new_ones(1), scale.sqrt(), scale))


def row_factors(model: Model, name: str) -> Tensor | None:
    """Index of the factor of each row of a global tensor; None for tensors that are not scaled."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    groups, heads = key_heads(model), model.num_attention_heads
    first, count, part = 1 + int(found[1]) * groups, model.num_layers * groups, found[2]
    if part == "qkv.k":
        return first + torch.arange(groups).repeat_interleave(model.head_dim)
    own = (first + torch.arange(groups).repeat_interleave(heads // groups))[:, None]  # (n, 1)
    if part == "qkv.q":
        return own.repeat(1, model.head_dim).flatten()
    assert model.qk_nope_head_dim
    assert model.qk_rope_head_dim
    assert model.v_head_dim
    plain = own.repeat(1, model.qk_nope_head_dim)
    if part == "q":
        rest = (own + count).repeat(1, model.qk_rope_head_dim)
    else:  # K without rotation, and V
        rest = torch.zeros(heads, model.v_head_dim, dtype=torch.int64)
    return torch.cat((plain, rest), 1).flatten()


def is_scaled(name: str) -> bool:
    """Whether some rows of a parameter are scaled."""
    return re.match(r"layers\.\d+\.attention\.(qkv|q|kv)\.", name) is not None


def key_heads(model: Model) -> int:
    """KV heads; in latent attention each head has its own key."""
    return model.num_attention_heads if model.qk_nope_head_dim else model.num_key_value_heads
