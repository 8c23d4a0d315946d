"""Llama 2, 3 and 3.1 (arXiv 2307.09288, 2407.21783), and all dense models of the table of families.

    x = embed(tokens)
    for each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = head(norm(x))

with RMSNorm, rotary positions, grouped-query attention and mlp(x) = down(silu(gate(x)) · up(x)). `Family`
(profiles/sections/families.py) lists in what another family differs: kind and position of its norms, norms of queries and keys,
biases, which layers and elements of a head are rotated, windows, multipliers, and an MLP without gate, down(act(up(x))). WEIGHTS
and MODULES are the weights' names in Hugging Face files.

Shapes: b batch, s sequence, h hidden, f MLP width, n query heads, k KV heads, d head size, v vocabulary, t tensor
degree, c context degree. Hidden states between layers are (b·s/c, h), or (b·s/(c·t), h) with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.models import parametrization
from modeling.models.language_model import (
    NORMS,
    AttentionLayer,
    LanguageModel,
    LayerOptions,
    ModelOptions,
    NormOptions,
)
from modeling.models.rope import (
    attention_factor,
    cos_sin,
    inverse_frequencies,
    rotate,
    split_pairs,
    split_rotated,
)
from modeling.models.weight_names import HuggingFaceTensor, Index, Locate, locate_rows
from parallel import ColumnParallelLinear, GQAQKVColumnParallelLinear, Mesh, RMSNorm, RowParallelLinear
from parallel.attention.attention import attention
from parallel.host_products import runs_on_host
from parallel.layers.gated import silu_gated
from parallel.layers.norms import HeadNorm, ProjectionNorm
from parallel.random import Keys
from profiles.sections.model import Model

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class Attention(AttentionLayer):
    sinks: nn.Parameter | None

    def __init__(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        family = model.family
        self.d, self.window = model.head_dim, model.window(layer)
        self.context, self.scale = mesh.context, model.score_scale
        self.soft_cap, self.clip = model.attn_logit_softcapping, model.clip_qkv
        self.rotates, self.adjacent = model.has_rope(layer), family.adjacent_pairs
        h, n, k = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
        options["bias"] = model.attention_bias
        self.gated = family.gated_attention
        self.qkv = GQAQKVColumnParallelLinear(h, n, k, self.d, mesh, gated=self.gated, **options)
        self.register_parameter("sinks", None)  # only some families have them
        self.maxima = None
        options["initializer"] = parametrization.residual(model)
        options["bias"] = model.attention_bias and family.output_bias
        self.output = RowParallelLinear(n * self.d, h, mesh.tensor, **options)
        self.norm_kind = model.qk_norm
        norm: dict[str, Any] = {name: options[name] for name in ("dtype", "device")}
        norm["epsilon"] = model.norm_eps
        if self.norm_kind == "heads":
            self.qk_norm = HeadNorm(self.d, mesh.tensor, unit_offset=family.norm == "unit_offset", **norm)
        if self.norm_kind == "projections":
            self.q_norm = ProjectionNorm(n, self.d, mesh, **norm)
            self.k_norm = ProjectionNorm(k, self.d, mesh, mesh.kv_replicas, **norm)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None, keys: Keys | None = None
    ) -> Tensor:
        heads = self.qkv.heads  # on this rank: n/t
        qkv = self.qkv(x, keys)  # (b·s/c, (n + 2k)/t·d), with gates (b·s/c, (2n + 2k)/t·d)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        qkv = qkv.view(-1, cos.shape[1], qkv.shape[-1] // self.d, self.d)  # (b, s/c, (n + 2k)/t, d)
        if self.gated:
            gate, qkv = qkv[:, :, :heads], qkv[:, :, heads:]  # (b, s/c, n/t, d), (b, s/c, (n + 2k)/t, d)
        q, k, v = self.split(qkv, cos, sin)  # (b, n/t, s/c, d), (b, k/t, s/c, d), (b, k/t, s/c, d)
        y = attention(  # (b, n/t, s/c, d)
            q,
            k,
            v,
            self.context,
            scale=self.scale,
            documents=documents,
            window=self.window,
            sinks=self.sinks,
            soft_cap=self.soft_cap,
        )
        if self.maxima is not None:
            y = self.maxima(y, q, k, self.context, scale=self.scale, documents=documents, window=self.window)
        y = y.transpose(1, 2)  # (b, s/c, n/t, d)
        if self.gated:
            y = y * gate.sigmoid()
        return self.output(y.reshape(-1, heads * self.d), keys)  # (b·s/c, h)

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q and K heads, normalized and rotated, and V heads (b, heads, s/c, d) of (b, s/c, (n + 2k)/t, d)."""
        heads, both = self.qkv.heads, self.qkv.heads + self.qkv.kv_heads
        plain = self.rotates and not (self.adjacent or self.norm_kind) and cos.shape[-1] == self.d
        if plain and runs_on_host(qkv) and qkv.dtype == cos.dtype:
            return split_rotated(qkv, heads, both, cos, sin)
        qk = self.normalize(qkv[:, :, :both])
        qk = self.rotate(qk, cos, sin).transpose(1, 2)  # (b, (n + k)/t, s/c, d)
        return qk[:, :heads], qk[:, heads:], qkv[:, :, both:].transpose(1, 2)

    def normalize(self, qk: Tensor) -> Tensor:
        """Query and key heads (b, s/c, (n + k)/t, d) before rotation, normalized in families with QK-norms."""
        heads = self.qkv.heads
        if self.norm_kind == "heads":
            return self.qk_norm(qk, heads)
        if self.norm_kind == "projections":
            return torch.cat((self.q_norm(qk[:, :, :heads]), self.k_norm(qk[:, :, heads:])), 2)
        return qk

    def rotate(self, qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first elements of query and key heads (b, s/c, (n + k)/t, d), as many as the tables have."""
        if not self.rotates:
            return qk
        size = cos.shape[-1]
        rotated = qk if size == self.d else qk[..., :size]
        if self.adjacent:  # the same order in queries and keys, so scores stay
            rotated = split_pairs(rotated)
        rotated = rotate(rotated, cos, sin)
        return rotated if size == self.d else torch.cat((rotated, qk[..., size:]), -1)


class MLP(nn.Module):
    def __init__(
        self, model: Model, mesh: Mesh, width: int | None = None, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__()
        h, f = model.hidden_size, width or model.intermediate_size
        self.activation = ACTIVATIONS[model.hidden_act]
        self.gated = model.family.mlp_matrices == 3
        options["bias"] = model.mlp_bias
        if self.gated:
            self.gate_up = ColumnParallelLinear(h, {"gate": f, "up": f}, mesh.tensor, **options)
        else:
            self.up = ColumnParallelLinear(h, f, mesh.tensor, **options)
        options["initializer"] = parametrization.residual(model)
        self.down = RowParallelLinear(f, h, mesh.tensor, **options)

    def forward(self, x: Tensor, keys: Keys | None = None) -> Tensor:
        if not self.gated:
            return self.down(self.activation(self.up(x, keys)), keys)  # (b·s/c, h)
        gate_up = self.gate_up(x, keys)  # (b·s/c, 2f/t)
        if self.activation is F.silu:
            return self.down(silu_gated(gate_up), keys)  # (b·s/c, h)
        gate, up = gate_up.chunk(2, -1)  # (b·s/c, f/t) each
        return self.down(self.activation(gate) * up, keys)  # (b·s/c, h)


class Sublayers(nn.Module):
    """What a block consists of, without its forward pass."""

    attention_layer: type[nn.Module] = Attention

    def __init__(
        self, model: Model, mesh: Mesh, layer: int, norm: NormOptions, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__()
        self.norm_position, self.factor = model.norm_position(layer), model.residual_multiplier
        self.side_by_side = bool(model.use_parallel_residual)

        def build_norm() -> RMSNorm:
            return NORMS[model.family.norm](model.hidden_size, mesh.tensor, **norm)

        self.attention_norm = build_norm()
        self.attention = self.build_attention(model, mesh, layer, **options)
        self.mlp_norm = build_norm()
        self.mlp = self.build_mlp(model, mesh, layer, **options)
        if self.norm_position == "around":
            self.attention_output_norm, self.mlp_output_norm = build_norm(), build_norm()

    def build_attention(
        self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]
    ) -> nn.Module:
        """The layer that mixes tokens; overridden by families with several kinds."""
        return self.attention_layer(model, mesh, layer, **options)

    def build_mlp(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> nn.Module:
        """The layer after attention; overridden by families with experts."""
        return MLP(model, mesh, **options)

    def feed_forward(self, x: Tensor, length: int, keys: Keys | None, padding: Tensor | None) -> Tensor:
        """Hidden states after the MLP, or experts; `length`: tokens of a sample on this context rank, s/c."""
        return self.sublayer("mlp", x, keys)

    def sublayer(self, name: str, x: Tensor, *arguments: Any) -> Tensor:
        """Add the output of `attention` or `mlp` to the hidden states, with the norms of the family."""
        return x + self.added(name, x, *arguments)

    def added(self, name: str, x: Tensor, *arguments: Any) -> Tensor:
        """What `attention` or `mlp` adds to the hidden states, with the norms of the family."""
        norm, layer = getattr(self, f"{name}_norm"), getattr(self, name)
        y = layer(x if self.norm_position == "after" else norm(x), *arguments)
        if self.norm_position == "after":
            y = norm(y)
        if self.norm_position == "around":
            y = getattr(self, f"{name}_output_norm")(y)
        return y if self.factor is None else y * self.factor


class Block(Sublayers):
    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Tensor | None = None,
        keys: Keys | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        if self.side_by_side:
            return x + self.added("attention", x, cos, sin, documents, keys) + self.added("mlp", x, keys)
        x = self.sublayer("attention", x, cos, sin, documents, keys)
        return self.feed_forward(x, cos.shape[1], keys, padding)


MODULES = {  # of a layer: ours, and Llama's in transformers
    "attention_norm": "input_layernorm",
    "attention.qkv.q": "self_attn.q_proj",
    "attention.qkv.k": "self_attn.k_proj",
    "attention.qkv.v": "self_attn.v_proj",
    "attention.qk_norm.q": "self_attn.q_norm",
    "attention.qk_norm.k": "self_attn.k_norm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_up.gate": "mlp.gate_proj",
    "mlp.gate_up.up": "mlp.up_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
PARTS: Mapping[str, Locate] = {  # rows of modules in one that holds several
    **{f"attention.qkv.{letter}": partial(locate_rows, part) for part, letter in enumerate("qkv")},
    "mlp.gate_up.gate": lambda model, _: (slice(0, model.intermediate_size),),
    "mlp.gate_up.up": lambda model, _: (slice(model.intermediate_size, 2 * model.intermediate_size),),
}


def locate_in_head(part: int, model: Model, numbers: Sequence[int]) -> Index:
    """Rows of a part with the size of a head in those of all parts of a head."""
    return (slice(part * model.head_dim, (part + 1) * model.head_dim),)


PARTS_OF_HEAD: Mapping[str, Locate] = {  # rows of modules in a head of one that holds several
    f"attention.qkv.{letter}": partial(locate_in_head, part) for part, letter in enumerate("qkv")
}


def layer_weights(modules: Mapping[str, str], *, by_head: bool = False) -> dict[str, HuggingFaceTensor]:
    """Weights and biases of a layer's modules, by our names.

    Modules with the same name in transformers are parts of one tensor there.

    Args:
        by_head: whether queries, keys and values in one tensor are parts of each head.
    """
    names = [*modules.values()]

    def where(name: str, ours: str, theirs: str) -> HuggingFaceTensor:
        if names.count(theirs) == 1:
            return HuggingFaceTensor(name)
        if by_head and ours in PARTS_OF_HEAD:
            return HuggingFaceTensor(
                name, locate=PARTS_OF_HEAD[ours], groups=attrgetter("num_attention_heads")
            )
        return HuggingFaceTensor(name, locate=PARTS[ours])

    return {
        f"layers.{{}}.{ours}.{kind}": where(f"model.layers.{{}}.{theirs}.{kind}", ours, theirs)
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }


WEIGHTS = {
    "embedding.weight": HuggingFaceTensor("model.embed_tokens.weight"),
    **{name: where for ours in MODULES for name, where in layer_weights({ours: MODULES[ours]}).items()},
    "norm.weight": HuggingFaceTensor("model.norm.weight"),
    "norm.bias": HuggingFaceTensor("model.norm.bias"),
    "head.weight": HuggingFaceTensor("lm_head.weight"),
}


class Llama(LanguageModel):
    """Llama, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block: type[nn.Module] = Block
    weights = WEIGHTS
    theta: Tensor
    local_theta: Tensor | None

    def __init__(
        self, model: Model, mesh: Mesh, layers: range | None = None, **options: Unpack[ModelOptions]
    ) -> None:
        super().__init__(model, mesh, layers, **options)
        device = options.get("device")
        self.register_buffer("theta", inverse_frequencies(model).to(device), persistent=False)
        local = None  # of layers with a window, if it differs
        base = model.rope_local_base_freq or model.rope_theta
        if model.family.local_rope and (model.rope_scaling is not None or base != model.rope_theta):
            unscaled = {"rope_scaling": None, "rope_theta": base}
            local = inverse_frequencies(model.model_copy(update=unscaled)).to(device)
        self.register_buffer("local_theta", local, persistent=False)

    @classmethod
    def huggingface_tensors(cls, model: Model) -> Mapping[str, HuggingFaceTensor]:
        family = model.family
        found = {**cls.weights, **layer_weights(family.tensors, by_head=family.qkv_by_head)}
        if not family.ends:
            return found
        found = {
            name: replace(where, name=where.name.replace("model.", f"{family.root}.", 1))
            for name, where in found.items()
        }
        ends = ((ours, theirs, kind) for ours, theirs in family.ends.items() for kind in ("weight", "bias"))
        return found | {
            f"{ours}.{kind}": HuggingFaceTensor(f"{theirs}.{kind}") for ours, theirs, kind in ends
        }

    def block_arguments(self, positions: Tensor, documents: Tensor | None) -> tuple[Tensor, ...]:
        return self.rotations(positions, documents)

    def rotations(self, positions: Tensor, documents: Tensor | None) -> tuple[Tensor, ...]:
        """The rotation tables (1 or b, s/c, 1, d) of tokens at these positions in their documents."""
        offsets = positions if documents is None else positions - documents
        tables = cos_sin(offsets, self.theta, attention_factor(self.model))
        return tables if self.local_theta is None else (*tables, *cos_sin(offsets, self.local_theta))

    def arguments_of(self, layer: int, shared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return shared[-2:] if self.model.window(layer) else shared[:2]
