"""The section `model`: fields of a Hugging Face config.json, with Llama's names for all architectures.

`Model` validates them; huggingface/config.py converts from and to each architecture's config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from parallel.constraints import valid_tensor_degrees
from profiles.errors import ProfileError
from profiles.sections import families, model_checks, roles
from profiles.sections.base import Count, Natural, Section, Size
from profiles.sections.model_checks import LINEAR
from profiles.sections.rope import RopeScaling

Multiplier = Annotated[float, Field(gt=0)] | None
NORM_EPS_ALIASES = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")


class Model(Section):
    """A model of one of the families in `profiles/sections/families.py`, or of a plugin."""

    default_role = roles.MODEL

    architecture: str = Field(
        default="llama",
        description=f"model architecture: {', '.join(families.OWN)}; or the name of a plugin (entry point of the group "
        f"{families.GROUP})",
    )
    hidden_size: Size
    """width of the residual stream"""
    intermediate_size: Size
    """width of the MLP; of an expert, for mixtral, dbrx and gpt_oss"""
    num_hidden_layers: Annotated[int, Field(ge=1, le=1024)]
    """number of layers"""
    num_attention_heads: Size
    """number of query heads"""
    num_key_value_heads: Size
    """number of KV heads (default: as many as query heads)"""
    head_dim: Size
    """size of an attention head (default: hidden_size / num_attention_heads; deepseek_v3: that of queries and keys,
    qk_nope_head_dim + qk_rope_head_dim)"""
    q_lora_rank: Size | None = None
    """width of the latent that queries are projected from; null: from the hidden state (deepseek_v3)"""
    kv_lora_rank: Size | None = None
    """width of the latent that keys and values are projected from (deepseek_v3)"""
    qk_nope_head_dim: Size | None = None
    """elements of a query or key head that are not rotated (deepseek_v3)"""
    qk_rope_head_dim: Size | None = None
    """rotated elements of a query or key head; all heads share the key's (deepseek_v3)"""
    v_head_dim: Size | None = None
    """size of a value head (deepseek_v3)"""
    vocab_size: Size
    """vocabulary size: number of token embeddings"""
    max_position_embeddings: Size
    """maximum sequence length, in training and of the export; for gpt, the number of learned positions"""
    norm_eps: float = Field(default=1e-5, gt=0)
    """epsilon of the norms; aliases: rms_norm_eps, layer_norm_eps, layer_norm_epsilon"""
    rope_theta: float = Field(default=10000.0, gt=0)
    """RoPE base (all but gpt)"""
    rope_scaling: RopeScaling | None = None
    """RoPE scaling for longer contexts (all but gpt)"""
    sliding_window: Count | None = None
    """number of tokens that a token attends to, itself included; null: all (mistral, qwen2, olmo3, gemma2, gemma3, phi3,
    ministral, starcoder2, mixtral, gpt_oss)"""
    full_attention_every: Count | None = None
    """n: every n-th layer has full attention, the others the sliding window (olmo3, gemma2, gemma3, ministral, gpt_oss) or
    linear attention (qwen3_next, qwen3_5, olmo_hybrid); counted after max_window_layers"""
    max_window_layers: Natural | None = None
    """number of leading layers with full attention, before those with the sliding window; null: none (qwen2, ministral)"""
    no_rope_layer_interval: Annotated[int, Field(ge=1)] | None = None
    """n: every n-th layer has no RoPE, 1: none has it; null: all have it (smollm3, olmo_hybrid)"""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """share of a query or key head that RoPE rotates; null: all of it (glm4, phi3, stablelm, gpt_neox, glm4_moe, qwen3_next,
    qwen3_5)"""
    rope_local_base_freq: Annotated[float, Field(gt=0)] | None = None
    """RoPE base of layers with a window; null: that of the others (gemma3)"""
    query_pre_attn_scalar: Size | None = None
    """number whose root divides attention scores; null: head_dim (gemma2, gemma3)"""
    attn_logit_softcapping: Multiplier = None
    """soft cap c of attention scores, c · tanh(score / c), which flash attention lacks; null: none (gemma2)"""
    final_logit_softcapping: Multiplier = None
    """soft cap c of the logits, c · tanh(logit / c); null: none (gemma2)"""
    linear_num_key_heads: Size | None = None
    """number of query and of key heads of linear attention (qwen3_next, qwen3_5, olmo_hybrid)"""
    linear_num_value_heads: Size | None = None
    """number of value heads of linear attention, a multiple of its key heads"""
    linear_key_head_dim: Size | None = None
    """size of a query or key head of linear attention"""
    linear_value_head_dim: Size | None = None
    """size of a value head of linear attention"""
    linear_conv_kernel_dim: Annotated[int, Field(ge=2, le=16)] | None = None
    """number of tokens that the short convolution of linear attention covers, the current one included"""
    linear_allow_neg_eigval: bool | None = None
    """whether the step size of the delta rule is up to 2 instead of 1; null: false (olmo_hybrid)"""
    embedding_multiplier: Multiplier = None
    """multiplies token embeddings; null: 1 (granite)"""
    attention_multiplier: Multiplier = None
    """multiplies attention scores; null: 1 / √head_dim (granite)"""
    residual_multiplier: Multiplier = None
    """multiplies what attention and MLP add to the residual stream; null: 1 (granite)"""
    logits_scaling: Multiplier = None
    """divides the logits; null: 1 (granite)"""
    use_parallel_residual: bool | None = None
    """whether attention and MLP of a layer have the same input, and are added to it together; null: no (gpt_neox)"""
    use_qk_norm: bool | None = None
    """RMSNorm of query and key heads before rotation; null: no (glm4_moe)"""
    clip_qkv: Annotated[float, Field(gt=0)] | None = None
    """bound that queries, keys and values are clipped to; null: none (dbrx)"""
    tie_word_embeddings: bool
    """share the embedding with the output projection (default: true for gpt, smollm3, gemma2, gemma3 and starcoder2)"""
    attention_bias: bool
    """biases in the attention projections (default: true for qwen2, glm4, starcoder2, gpt_neox, gpt and gpt_oss); not in that
    of the output for qwen2, glm4, stablelm and glm4_moe"""
    mlp_bias: bool
    """biases in the MLP (default: true for gpt, gpt_neox and starcoder2)"""
    hidden_act: str
    """MLP activation function (default: gelu for gpt and gpt_neox, gelu_pytorch_tanh for gemma2, gemma3 and starcoder2, else
    silu)"""
    initializer_range: float = Field(default=0.02, gt=0)
    """standard deviation of initial weights"""
    parametrization: Annotated[Literal["standard", "mup", "completep"], roles.INITIALIZATION] = "standard"
    """scaling of initial weights and learning rates. standard: none; mup: by width; completep: by width and depth, relative to
    a base model, for which train.learning_rate is tuned (llama, mistral, qwen3)"""
    base_hidden_size: Annotated[Size | None, roles.INITIALIZATION] = None
    """mup, completep: hidden_size of the base model"""
    base_num_hidden_layers: Annotated[Count | None, roles.INITIALIZATION] = None
    """completep: num_hidden_layers of the base model"""
    scaled_initialization: bool
    """divide initializer_range by √(2 · layers) for projections onto the residual stream (default: true for gpt)"""
    num_experts: Annotated[int, Field(ge=1, le=4096)] | None = None
    """experts per layer (mixtral, qwen3_moe, qwen3_next, dbrx, gpt_oss, deepseek_v3, glm4_moe); aliases: num_local_experts,
    n_routed_experts"""
    num_experts_per_tok: Count | None = None
    """experts per token"""
    moe_intermediate_size: Size | None = None
    """width of an expert (qwen3_moe, qwen3_next, deepseek_v3, glm4_moe)"""
    norm_topk_prob: bool = True
    """divide the weights of a token's experts by their sum (always true for mixtral and gpt_oss)"""
    n_shared_experts: Count | None = None
    """shared experts, used by every token in addition to its routed ones (deepseek_v3, glm4_moe)"""
    shared_expert_intermediate_size: Size | None = None
    """width of the shared expert, whose output is multiplied by the sigmoid of a gate (qwen3_next)"""
    first_k_dense_replace: Natural | None = None
    """number of leading layers with an MLP instead of experts; null: none (deepseek_v3, glm4_moe)"""
    n_group: Count | None = None
    """number of groups that the experts are divided into; null: one (deepseek_v3, glm4_moe)"""
    topk_group: Count | None = None
    """number of groups that a token's experts are chosen from; null: one (deepseek_v3, glm4_moe)"""
    routed_scaling_factor: Annotated[float, Field(gt=0)] | None = None
    """multiplies the weights of a token's experts; null: 1 (deepseek_v3, glm4_moe)"""
    num_nextn_predict_layers: Annotated[int, Field(ge=1, le=16)] | None = None
    """depth of multi-token prediction: number of modules, each of which predicts one token further ahead; null or 0: none
    (deepseek_v3, glm4_moe; at most 1 qwen3_next, qwen3_5)"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """dropout probability of embeddings, attention and residuals (gpt)"""
    mlp_dropout: float = Field(default=0.0, ge=0, lt=1)
    """dropout probability of the MLP's activations, Megatron's ffn_dropout (gpt)"""

    @property
    def family(self) -> families.Family:
        """The architecture's family."""
        return families.find(self.architecture)

    @property
    def has_dropout(self) -> bool:
        """Whether training has dropout."""
        return bool(self.dropout or self.mlp_dropout)

    @property
    def width_factor(self) -> float:
        """hidden_size relative to the base model's; 1 under the standard parametrization."""
        return 1.0 if self.parametrization == "standard" else self.hidden_size / (self.base_hidden_size or 1)

    @property
    def depth_factor(self) -> float:
        """num_hidden_layers relative to the base model's; 1 unless the parametrization depends on depth."""
        if self.parametrization != "completep":
            return 1.0
        return self.num_hidden_layers / (self.base_num_hidden_layers or 1)

    @property
    def residual_initializer_range(self) -> float:
        """Initial standard deviation of residual projections under the standard parametrization."""
        layers = self.base_num_hidden_layers or self.num_hidden_layers
        scale = math.sqrt(2 * layers) if self.scaled_initialization else 1.0
        return self.initializer_range / scale

    def window(self, layer: int) -> int | None:
        """Number of preceding tokens, itself included, that a token attends to in this layer; None: all."""
        every, following = self.full_attention_every, layer - (self.max_window_layers or 0)
        full = following < 0 or (every is not None and (following + 1) % every == 0)
        return None if full else self.sliding_window

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        if self.family.linear_attention == "none" or layer in self.prediction_layers:
            return False
        every = self.full_attention_every
        return every is None or (layer + 1) % every != 0

    @property
    def num_linear_layers(self) -> int:
        """Number of layers that have linear attention."""
        return sum(map(self.is_linear, range(self.num_hidden_layers)))

    def norm_position(self, layer: int) -> str:
        """Position of a layer's norms, as `Family.norm_position`."""
        return "before" if self.is_linear(layer) else self.family.norm_position

    def has_rope(self, layer: int) -> bool:
        """Whether a layer rotates its query and key heads."""
        every = self.no_rope_layer_interval
        rotated = every is None or (layer + 1) % every != 0
        return self.family.rotary and rotated and not self.is_linear(layer)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP."""
        return self.num_experts is not None and layer >= (self.first_k_dense_replace or 0)

    @property
    def prediction_layers(self) -> range:
        """Numbers of the layers in modules for multi-token prediction, which follow those of the model."""
        first = self.num_hidden_layers
        return range(first, first + (self.num_nextn_predict_layers or 0))

    @property
    def shares_embedding(self) -> bool:
        """Whether the last layers need the embedding too: as the head, or for multi-token prediction."""
        return self.tie_word_embeddings or len(self.prediction_layers) > 0

    @property
    def num_layers(self) -> int:
        """Number of layers with those for multi-token prediction."""
        return self.num_hidden_layers + len(self.prediction_layers)

    @property
    def num_expert_layers(self) -> int:
        """Number of layers that have experts, with those for multi-token prediction."""
        return sum(map(self.has_experts, range(self.num_layers)))

    @property
    def score_scale(self) -> float | None:
        """Factor of attention scores; None: 1 / √head_dim."""
        scalar = self.query_pre_attn_scalar
        return self.attention_multiplier if scalar is None else scalar**-0.5

    @property
    def qk_norm(self) -> Literal["none", "heads", "projections"]:
        """The kind of norm of query and key heads, `Family.qk_norm` unless the model does without."""
        optional = "use_qk_norm" in self.family.fields
        return "none" if optional and not self.use_qk_norm else self.family.qk_norm

    @property
    def rotary_dim(self) -> int:
        """Elements of a query or key head that RoPE rotates."""
        return self.qk_rope_head_dim or int(self.head_dim * (self.partial_rotary_factor or 1))

    @property
    def linear_widths(self) -> dict[str, int]:
        """Widths of linear attention's projections: queries, keys, values, gate, step size, decay."""
        k, n, d, u, _ = (getattr(self, name) or 0 for name in LINEAR)
        return {"q": k * d, "k": k * d, "v": n * u, "gate": n * u, "b": n, "a": n}

    def projection_weights(self, linear: bool = False) -> int:
        """Elements of a layer's attention projections, or of those of its linear attention, without biases."""
        h, n = self.hidden_size, self.num_attention_heads
        if linear:
            return h * (sum(self.linear_widths.values()) + self.linear_widths["v"])
        if self.kv_lora_rank is None:
            gates = n if self.family.gated_attention else 0
            return h * self.head_dim * (2 * n + gates + 2 * self.num_key_value_heads)
        widths: list[int] = [getattr(self, name) for name in model_checks.LATENT]
        latent, plain, rotated, value = widths
        queries = (h + n * self.head_dim) * self.q_lora_rank if self.q_lora_rank else h * n * self.head_dim
        return queries + h * (latent + rotated) + latent * n * (plain + value) + n * value * h

    def layer_weights(self, experts: int | None, linear: bool = False) -> int:
        """Elements of a layer's weight matrices.

        Args:
            experts: number of routed experts; None: it has an MLP instead.
            linear: whether it has linear attention, whose short convolution is not included.
        """
        h, mlp = self.hidden_size, self.family.mlp_matrices * self.hidden_size
        projections = self.projection_weights(linear)
        if experts is None:
            return projections + mlp * self.intermediate_size
        if self.shared_expert_intermediate_size is not None:
            projections += h  # of its gate
        used = experts * self.expert_width + self.shared_width
        return projections + mlp * used + h * (self.num_experts or 0)

    @property
    def shared_width(self) -> int:
        """Width of a layer's shared experts together; 0 without them."""
        several = self.n_shared_experts and self.n_shared_experts * self.expert_width
        return (several or 0) + (self.shared_expert_intermediate_size or 0)

    @property
    def tensor_degrees(self) -> list[int]:
        """Ascending tensor degrees that divide the heads of all layers, or replicate KV heads."""
        degrees = valid_tensor_degrees(self.num_attention_heads, self.num_key_value_heads)
        return [t for t in degrees if (self.linear_num_key_heads or t) % t == 0]

    @property
    def projection_of_module(self) -> int:
        """Elements of the projection in a module for multi-token prediction."""
        return 2 * self.hidden_size**2

    @property
    def expert_width(self) -> int:
        """Width of an expert, or of the MLP of a model without experts."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def mlp_widths(self) -> dict[str, int]:
        """Widths of the model's MLPs and experts, by profile key."""
        widths = {}
        if self.num_expert_layers < self.num_layers or self.moe_intermediate_size is None:
            widths["intermediate_size"] = self.intermediate_size
        for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
            if (width := getattr(self, name)) is not None:
                widths[name] = width
        return widths

    @property
    def parameters(self) -> int:
        """Parameter count by formula, for listings; the planner counts the layers' parameters."""
        return self._parameters(self.num_experts)

    @property
    def active_parameters(self) -> int:
        """Parameters that are active for a token: of the experts, only its own."""
        return self._parameters(self.num_experts_per_tok)

    def _parameters(self, experts: int | None) -> int:
        """Parameters of a model with this many experts per layer."""
        h, family, routed = self.hidden_size, self.family, self.num_expert_layers
        layers, dense, modules = self.num_layers, self.num_layers - routed, len(self.prediction_layers)
        linear = self.num_linear_layers
        weights = dense * self.layer_weights(None) + routed * self.layer_weights(experts)
        weights += linear * (self.projection_weights(linear=True) - self.projection_weights())
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        norm = 2 * h if family.norm == "layer" else h
        norms = norm * (4 if family.norm_position == "around" else 2)
        qk_norms = {"none": 0, "heads": 2 * self.head_dim, "projections": q + kv}[self.qk_norm]
        biases = self.attention_bias * (q + 2 * kv + h * family.output_bias + q * family.gated_attention)
        vectors = layers * (norms + family.further_parameters(self)) + (layers - linear) * (qk_norms + biases)
        if linear:
            _, n, _, u, width = (getattr(self, name) or 0 for name in LINEAR)
            convolved = sum(self.linear_widths[part] for part in "qkv")
            vectors += linear * (convolved * width + 2 * n + u)  # and decays, their biases, the norm
        if family.expert_bias or self.mlp_bias:
            inner, used = family.mlp_matrices - 1, (experts or 0) + (self.n_shared_experts or 0)
            vectors += dense * (inner * self.intermediate_size + h)
            vectors += routed * used * (inner * self.expert_width + h)
        if family.expert_bias or family.selection_bias:
            vectors += routed * (self.num_experts or 0)
        ends = self.vocab_size * h * (1 if self.tie_word_embeddings else 2) + norm
        ends += modules * (self.projection_of_module + 3 * norm)
        if not family.rotary:  # learned positions
            ends += self.max_position_embeddings * h
        return weights + vectors + ends

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        values = canonical(given)
        family = families.find(str(values.get("architecture", "llama")))
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        values = {name: value for name, value in values.items() if not (value is None and name in _DERIVED)}
        if isinstance(heads, int) and heads > 0:
            values.setdefault("num_key_value_heads", heads)
            parts = [values.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
            if len(known := [part for part in parts if isinstance(part, int)]) == len(parts):
                values.setdefault("head_dim", sum(known))
            if isinstance(hidden, int) and "head_dim" not in values:
                unit = 2 * heads if family.rotary else heads
                if hidden % unit:
                    below = hidden // unit * unit
                    sizes = "even heads, as RoPE rotates pairs" if family.rotary else "heads"
                    reason = f"does not split into {heads} {sizes}, and head_dim is not given"
                    raise ProfileError("hidden_size", hidden, reason, [n for n in (below, below + unit) if n])
                values["head_dim"] = hidden // heads
        if values.get("num_nextn_predict_layers") == 0:
            del values["num_nextn_predict_layers"]
        return {name: valid[0] for name, valid in family.supported.items()} | values

    @model_validator(mode="after")
    def _possible(self) -> Model:
        model_checks.check(self)
        return self


# Keys that only affect initial weights and learning rates.
PARAMETRIZATION = tuple(name for name, role in roles.roles(Model).items() if role == roles.INITIALIZATION)
_DERIVED = (
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "scaled_initialization",
)


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with aliases replaced. Raises ProfileError if norm_eps is given under two names."""
    given = [name for name in ("norm_eps", *NORM_EPS_ALIASES) if name in values]
    if len(given) > 1:
        raise ProfileError(
            given[1], values[given[1]], f"is an alias of {given[0]}, which is also set; set one", given[:1]
        )
    aliases = {
        **dict.fromkeys(NORM_EPS_ALIASES, "norm_eps"),
        **dict.fromkeys(("num_local_experts", "n_routed_experts"), "num_experts"),
    }
    return {aliases.get(name, name): value for name, value in values.items()}
