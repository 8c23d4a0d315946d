"""DeepSeek-V3 (arXiv 2412.19437): latent attention, experts balanced by a bias; and GLM-4 MoE.

    x = x + attention(norm(x));  x = x + shared(norm(x)) + Σ over the token's k experts of weight · expert(norm(x))

    latents    c = norm(Wc x) of queries, l = norm(Wl x) of keys and values, and r = rotate(Wr x), the same key for all heads
    head i     q_i = [Q_i c, rotate(Q'_i c)];   k_i = [K_i l, r];   v_i = V_i l;   softmax(scale · q_i k_iᵀ) v_i
    experts    the k largest sigmoids of the router's logits plus the selection bias, among the experts of the best groups; their
               weights are the sigmoids, divided by their sum, times a factor (parallel/experts/router.py)

The first layers have an MLP instead of experts. Without `q_lora_rank`, Q is applied to x. GLM-4 MoE (arXiv 2508.06471) has
Llama's attention. Modules for multi-token prediction are described in `language_model.py`.

Shapes as in `llama.py`, with query and key heads of d = p + r elements, of which r are rotated, and value heads of u; heads are
sharded over tensor ranks, and each rank has the complete latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor, nn

from modeling.models import parametrization
from modeling.models.families import llama, mixtral
from modeling.models.families.llama import MLP
from modeling.models.language_model import (
    AttentionLayer,
    LayerOptions,
    NormOptions,
    weight_options,
)
from modeling.models.rope import rotate, score_factor, split_pairs
from modeling.models.weight_names import HuggingFaceTensor, renamed
from parallel import ColumnParallelLinear, Mesh, RMSNorm, RowParallelLinear, collectives
from parallel.attention.attention import attention
from parallel.experts.router import Routing
from parallel.layers.linear import ReplicatedLinear
from parallel.random import Keys
from profiles.sections.base import required
from profiles.sections.model import Model

LATENT_EPSILON = 1e-6  # of the latents' norms, whatever that of the others


class Attention(AttentionLayer):
    def __init__(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        h, n, axis = model.hidden_size, model.num_attention_heads, mesh.tensor
        self.plain, self.rotated = required(model.qk_nope_head_dim), required(model.qk_rope_head_dim)
        self.value, latent = required(model.v_head_dim), required(model.kv_lora_rank)
        self.heads, self.axis, self.context = n // axis.size, axis, mesh.context
        self.scale = score_factor(model) * model.head_dim**-0.5
        self.maxima = None
        self.sequence_parallel = options["sequence_parallel"] and axis.size > 1
        norm: NormOptions = {
            "epsilon": LATENT_EPSILON,
            "sequence_parallel": options["sequence_parallel"],
            "dtype": options["dtype"],
            "device": options["device"],
        }
        queries, ranks = {"": n * model.head_dim}, {"kv": latent + self.rotated}
        if model.q_lora_rank:
            ranks = {"q": model.q_lora_rank, **ranks}
            self.q_norm = RMSNorm(model.q_lora_rank, axis, **norm)
        self.latents = ReplicatedLinear(h, ranks, axis, **weight_options(options))
        self.ranks = [*ranks.values()]
        rows: tuple[int, ...] = (model.head_dim,)
        self.q = ColumnParallelLinear(model.q_lora_rank or h, queries, axis, head_rows=rows, **options)
        self.kv_norm = RMSNorm(latent, axis, **norm)
        rows = self.plain, self.value
        self.kv = ColumnParallelLinear(latent, {"": n * sum(rows)}, axis, head_rows=rows, **options)
        options["initializer"] = parametrization.residual(model)
        self.output = RowParallelLinear(n * self.value, h, axis, **options)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None, keys: Keys | None = None
    ) -> Tensor:
        *query, kv = self.latents(x).split(self.ranks, -1)  # (b·s/c, ·) or (b·s/(c·t), ·) each
        kv, shared = kv.split((kv.shape[-1] - self.rotated, self.rotated), -1)
        # The gradient of the shared key is summed over the heads of all tensor ranks.
        to_all_heads = collectives.gather if self.sequence_parallel else collectives.copy
        shared = to_all_heads(shared.contiguous(), self.axis)  # (b·s/c, r)
        q = self.q(self.q_norm(query[0]) if query else x)  # (b·s/c, n/t·(p + r))
        kv = self.kv(self.kv_norm(kv))  # (b·s/c, n/t·(p + u))
        s, n = cos.shape[1], self.heads
        q, rotated = q.view(-1, s, n, self.plain + self.rotated).split((self.plain, self.rotated), -1)
        k, v = kv.view(-1, s, n, self.plain + self.value).split((self.plain, self.value), -1)
        rotated = torch.cat((rotated, shared.view(-1, s, 1, self.rotated)), 2)  # (b, s/c, n/t + 1, r)
        rotated = rotate(split_pairs(rotated), cos, sin)
        q = torch.cat((q, rotated[:, :, :n]), -1)  # (b, s/c, n/t, d)
        k = torch.cat((k, rotated[:, :, n:].expand(-1, -1, n, -1)), -1)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (b, n/t, s/c, ·)
        y = attention(q, k, v, self.context, scale=self.scale, documents=documents)  # (b, n/t, s/c, u)
        if self.maxima is not None:
            y = self.maxima(y, q, k, self.context, scale=self.scale, documents=documents)
        return self.output(y.transpose(1, 2).reshape(-1, n * self.value), keys)  # (b·s/c, h)


class Block(mixtral.Block):
    attention_layer: type[nn.Module] = Attention

    def __init__(
        self, model: Model, mesh: Mesh, layer: int, norm: NormOptions, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(model, mesh, layer, norm, **options)
        self.shared = None
        if model.has_experts(layer):
            width = required(model.n_shared_experts) * model.expert_width
            self.shared = MLP(model, mesh, width, **options)

    def build_mlp(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> nn.Module:
        if not model.has_experts(layer):
            return MLP(model, mesh, **options)
        return super().build_mlp(model, mesh, layer, **options)

    def routing(self, model: Model) -> Routing:
        return Routing(
            required(model.num_experts),
            required(model.num_experts_per_tok),
            score="sigmoid",
            normalize=model.norm_topk_prob,
            scale=model.routed_scaling_factor or 1.0,
            groups=model.n_group or 1,
            top_groups=model.topk_group or 1,
            selection_bias=True,
        )

    def feed_forward(self, x: Tensor, length: int, keys: Keys | None, padding: Tensor | None) -> Tensor:
        y = self.mlp_norm(x)
        if self.shared is None:
            return x + self.mlp(y, keys)
        experts = self.mlp.start(y, length, padding)
        return x + self.shared(y, keys) + experts()


class GlmBlock(Block):
    attention_layer = llama.Attention


_LAYER = "model.layers.{}"
_MODULE = {  # for multi-token prediction
    "layers.{}.embedding_norm": f"{_LAYER}.enorm",
    "layers.{}.hidden_norm": f"{_LAYER}.hnorm",
    "layers.{}.projection": f"{_LAYER}.eh_proj",
    "layers.{}.output_norm": f"{_LAYER}.shared_head.norm",
}
_LATENTS = {
    "layers.{}.attention.kv_norm": f"{_LAYER}.self_attn.kv_a_layernorm",
    "layers.{}.attention.kv": f"{_LAYER}.self_attn.kv_b_proj",
    "layers.{}.attention.latents.kv": f"{_LAYER}.self_attn.kv_a_proj_with_mqa",
    "layers.{}.attention.q_norm": f"{_LAYER}.self_attn.q_a_layernorm",
    "layers.{}.attention.latents.q": f"{_LAYER}.self_attn.q_a_proj",
}
COPIES = {"embed_tokens": "embedding", "shared_head.head": "head"}
WEIGHTS = {
    **llama.WEIGHTS,
    **{name: entry for name, entry in mixtral.Qwen3Moe.weights.items() if ".mlp." in name},
    **renamed(_MODULE),
    **mixtral.shared_weights("mlp.shared_experts"),
    "layers.{}.mlp.router.selection_bias": HuggingFaceTensor(f"{_LAYER}.mlp.gate.e_score_correction_bias"),
}


class DeepseekV3(llama.Llama):
    """DeepSeek-V3, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
    weights = WEIGHTS | renamed(_LATENTS)
    copies = COPIES

    @classmethod
    def huggingface_tensors(cls, model: Model) -> Mapping[str, HuggingFaceTensor]:
        queries = "q_b_proj" if model.q_lora_rank else "q_proj"  # from a latent, or without one
        where = HuggingFaceTensor(f"model.layers.{{}}.self_attn.{queries}.weight")
        return {**cls.weights, "layers.{}.attention.q.weight": where}


class Glm4Moe(llama.Llama):
    """GLM-4 MoE, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = GlmBlock
    weights = WEIGHTS
    copies = COPIES
