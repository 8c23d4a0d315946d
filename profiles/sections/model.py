"""Model section: the fields of a Hugging Face config.json, under Llama's names for all architectures.

`Model` validates them; huggingface_config.py converts from and to each architecture's config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from profiles.errors import ProfileError
from profiles.huggingface import dbrx_config

NORM_EPS_ALIASES = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
EXPERTS = ("mixtral", "qwen3_moe", "dbrx", "gpt_oss")  # architectures whose MLPs are mixtures of experts
# Architectures with Llama's fields; the others have GPT's.
ROTARY = ("llama", "mistral", "qwen3", "olmo2", *EXPERTS)
WINDOWED = ("mistral", "mixtral", "gpt_oss")  # architectures with a sliding window
# Keys on which initial weights and learning rates depend, and nothing else.
PARAMETRIZATION = ("parametrization", "base_hidden_size", "base_num_hidden_layers")
PARAMETRIZED = ("llama", "mistral", "qwen3")  # architectures with parametrizations other than standard
OPTIONAL = (  # fields of some architectures only
    ("sliding_window", WINDOWED, "sliding window"),
    ("full_attention_every", ("gpt_oss",), "layers of different windows"),
    ("clip_qkv", ("dbrx",), "clipped heads"),
)
ACTIVATIONS = {**dict.fromkeys(ROTARY, ("silu",)), "gpt": ("gelu", "gelu_new")}

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
LARGEST = 2**24  # of a tensor dimension, so that products of two fit 64-bit integers
Size = Annotated[int, Field(ge=1, le=LARGEST)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no type conversion."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )


class LinearRope(Section):
    """Linear RoPE scaling: position interpolation (arXiv 2306.15595)."""

    rope_type: Literal["linear"] = Field(description="kind of scaling")
    factor: float = Field(ge=1, description="divides every frequency")


class Llama3Rope(Section):
    """Llama 3.1 RoPE scaling: only low frequencies are scaled."""

    rope_type: Literal["llama3"] = Field(description="kind of scaling")
    factor: float = Field(ge=1, description="divides low frequencies")
    low_freq_factor: float = Field(gt=0, description="wavelengths above original length / this are scaled")
    high_freq_factor: float = Field(
        gt=0, description="wavelengths below original length / this are unchanged"
    )
    original_max_position_embeddings: Count = Field(description="context length of pretraining")

    @model_validator(mode="after")
    def _ordered(self) -> Llama3Rope:
        if self.low_freq_factor >= self.high_freq_factor:
            reason = f"is not above low_freq_factor {self.low_freq_factor}"
            raise ProfileError("high_freq_factor", self.high_freq_factor, reason)
        return self


class YarnRope(Section):
    """YaRN RoPE scaling (arXiv 2309.00071): low frequencies are divided, queries and keys multiplied."""

    rope_type: Literal["yarn"] = Field(description="kind of scaling")
    factor: float = Field(ge=1, description="divides low frequencies")
    beta_fast: float = Field(32.0, gt=0, description="pairs that turn more often are unchanged")
    beta_slow: float = Field(1.0, gt=0, description="pairs that turn less often are divided by the factor")
    truncate: bool = Field(True, description="round the bounds between these pairs to whole ones")
    attention_factor: Annotated[float, Field(gt=0)] | None = Field(
        None, description="multiplies queries and keys; null: 0.1 · ln(factor) + 1"
    )
    original_max_position_embeddings: Count = Field(description="context length of pretraining")


RopeScaling = Annotated[LinearRope | Llama3Rope | YarnRope, Field(discriminator="rope_type")]


class Model(Section):
    """The model: a Llama, Mistral, Qwen3, OLMo 2, Mixtral, Qwen3-MoE, DBRX, GPT-OSS or GPT architecture."""

    architecture: Literal[
        "llama", "mistral", "qwen3", "olmo2", "mixtral", "qwen3_moe", "dbrx", "gpt_oss", "gpt"
    ] = Field("llama", description="model architecture")
    hidden_size: Size = Field(description="width of the residual stream")
    intermediate_size: Size = Field(
        description="width of the MLP; of an expert, for mixtral, dbrx and gpt_oss"
    )
    num_hidden_layers: Annotated[int, Field(ge=1, le=1024)] = Field(description="number of layers")
    num_attention_heads: Size = Field(description="number of query heads")
    num_key_value_heads: Size = Field(description="number of KV heads (default: as many as query heads)")
    head_dim: Size = Field(
        description="size of an attention head (default: hidden_size / num_attention_heads)"
    )
    vocab_size: Size = Field(description="vocabulary size: number of token embeddings")
    max_position_embeddings: Size = Field(
        description="maximum sequence length; for gpt, the number of learned positions"
    )
    norm_eps: float = Field(
        1e-5, gt=0, description="epsilon of the norms; aliases: rms_norm_eps, layer_norm_epsilon"
    )
    rope_theta: float = Field(10000.0, gt=0, description="RoPE base (all but gpt)")
    rope_scaling: RopeScaling | None = Field(
        None, description="RoPE scaling for longer contexts (all but gpt)"
    )
    sliding_window: Count | None = Field(
        None,
        description="number of tokens, up to itself, that a token attends to; null: all (mistral, gpt_oss)",
    )
    full_attention_every: Count | None = Field(
        None, description="one layer in so many attends to all earlier tokens, the last of them (gpt_oss)"
    )
    clip_qkv: Annotated[float, Field(gt=0)] | None = Field(
        None, description="bound of queries, keys and values; null: none (dbrx)"
    )
    tie_word_embeddings: bool = Field(
        description="share the embedding with the output projection (default: true for gpt)"
    )
    attention_bias: bool = Field(description="biases in the attention projections (default: true for gpt)")
    mlp_bias: bool = Field(description="biases in the MLP (default: true for gpt)")
    hidden_act: str = Field(description="MLP activation function (default: gelu for gpt, else silu)")
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of initial weights")
    parametrization: Literal["standard", "mup", "completep"] = Field(
        "standard",
        description="how initial weights and learning rates depend on size: not; on width; or on width and depth, relative to a "
        "base model whose train.learning_rate is kept (llama, mistral, qwen3)",
    )
    base_hidden_size: Size | None = Field(
        None, description="mup, completep: hidden_size of the base model, for which the rate was tuned"
    )
    base_num_hidden_layers: Count | None = Field(
        None, description="completep: num_hidden_layers of the base model"
    )
    scaled_initialization: bool = Field(
        description="divide initializer_range by √(2 · layers) for projections onto the residual stream (default: true for gpt)"
    )
    num_experts: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="experts of a layer (mixtral, qwen3_moe, dbrx, gpt_oss); alias: num_local_experts"
    )
    num_experts_per_tok: Count | None = Field(None, description="experts that a token goes to")
    moe_intermediate_size: Size | None = Field(
        None, description="width of an expert, where it is not intermediate_size (qwen3_moe)"
    )
    norm_topk_prob: bool = Field(
        True,
        description="divide the weights of a token's experts by their sum (always, for mixtral and gpt_oss)",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout probability of embeddings, attention and residuals (gpt)"
    )
    mlp_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="dropout probability of the MLP's activations, Megatron's ffn_dropout (gpt)",
    )

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
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
        """Standard deviation of initial weights of projections onto the residual stream, under the standard parametrization."""
        layers = self.base_num_hidden_layers or self.num_hidden_layers
        scale = math.sqrt(2 * layers) if self.scaled_initialization else 1.0
        return self.initializer_range / scale

    def window(self, layer: int) -> int | None:
        """Number of tokens, up to itself, that a token attends to in this layer; None: all."""
        every = self.full_attention_every
        return None if every and (layer + 1) % every == 0 else self.sliding_window

    @property
    def expert_width(self) -> int:
        """Width of an expert, or of the MLP of a model without experts."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def parameters(self) -> int:
        """Parameter count from the formula, for listings; the planner counts them from the layers."""
        return self._parameters(self.num_experts)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token is multiplied with: those of its own experts only."""
        return self._parameters(self.num_experts_per_tok)

    def _parameters(self, experts: int | None) -> int:
        """Parameters of a model with this many experts in a layer."""
        h, f, gpt = self.hidden_size, self.expert_width, self.architecture == "gpt"
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        norm = 2 * h if gpt else h
        head_norms = 2 * self.head_dim
        qk_norms = {"qwen3": head_norms, "qwen3_moe": head_norms, "olmo2": q + kv}.get(self.architecture, 0)
        attention = h * (q + 2 * kv) + q * h + self.attention_bias * (q + 2 * kv + h)
        sinks = self.num_attention_heads if self.architecture == "gpt_oss" else 0
        wide = 1 if gpt else 2  # gate and up
        expert_bias = self.architecture == "gpt_oss"
        mlp = (wide + 1) * h * f + (self.mlp_bias or expert_bias) * (wide * f + h)
        if experts is not None:
            mlp = experts * mlp + (h + expert_bias) * (self.num_experts or 0)  # and the router
        ends = self.vocab_size * h * (1 if self.tie_word_embeddings else 2) + norm
        positions = self.max_position_embeddings * h if gpt else 0
        return self.num_hidden_layers * (attention + sinks + mlp + 2 * norm + qk_norms) + ends + positions

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        values = canonical(given)
        gpt = values.get("architecture") == "gpt"
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        values = {name: value for name, value in values.items() if not (value is None and name in _DERIVED)}
        if isinstance(heads, int) and heads > 0:
            values.setdefault("num_key_value_heads", heads)
            if isinstance(hidden, int) and "head_dim" not in values:
                if hidden % heads:
                    below = hidden // heads * heads
                    reason = f"is not a multiple of {heads} query heads, and head_dim is not given"
                    raise ProfileError(
                        "hidden_size", hidden, reason, [n for n in (below, below + heads) if n]
                    )
                values["head_dim"] = hidden // heads
        values.setdefault("attention_bias", values.get("architecture") in ("gpt", "gpt_oss"))
        for name in ("tie_word_embeddings", "mlp_bias", "scaled_initialization"):
            values.setdefault(name, gpt)
        values.setdefault("hidden_act", ACTIVATIONS["gpt" if gpt else "llama"][0])
        return values

    @model_validator(mode="after")
    def _possible(self) -> Model:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            valid = [n for n in range(1, heads + 1) if heads % n == 0]
            reason, nearest = f"does not divide {heads} query heads", neighbours(kv_heads, valid)
            raise ProfileError("num_key_value_heads", kv_heads, reason, nearest)
        if self.hidden_act not in ACTIVATIONS[self.architecture]:
            reason = f"is not an activation of {self.architecture}"
            raise ProfileError("hidden_act", self.hidden_act, reason, ACTIVATIONS[self.architecture])
        for name, families, meaning in OPTIONAL:
            if getattr(self, name) is not None and self.architecture not in families:
                reason = f"{self.architecture} has no {meaning}"
                raise ProfileError(name, getattr(self, name), reason, ["null"])
        if self.full_attention_every is not None and self.sliding_window is None:
            reason = "is set, but no sliding_window that the other layers attend within"
            raise ProfileError("full_attention_every", self.full_attention_every, reason, ["null"])
        self._check_experts()
        self._check_parametrization()
        if self.architecture in ROTARY:
            for name in ("dropout", "mlp_dropout"):
                if rate := getattr(self, name):
                    raise ProfileError(name, rate, f"{self.architecture} has no dropout", [0.0])
            if self.attention_bias and self.architecture in ("mistral", "dbrx"):
                reason = f"{self.architecture} has no biases in its attention"
                raise ProfileError("attention_bias", True, reason, [False])
            if self.architecture == "dbrx":
                for name, value in (("norm_eps", dbrx_config.NORM_EPS), ("tie_word_embeddings", False)):
                    if (found := getattr(self, name)) != value:
                        raise ProfileError(name, found, "is not supported for dbrx", [value])
                if self.rope_scaling:
                    reason = "is not supported for dbrx"
                    raise ProfileError("rope_scaling", self.rope_scaling.rope_type, reason, ["null"])
            if self.mlp_bias and self.architecture != "llama":
                raise ProfileError("mlp_bias", True, f"{self.architecture} has no biases in its MLP", [False])
            if self.head_dim % 2:
                reason = "RoPE rotates pairs, so it must be even"
                raise ProfileError(
                    "head_dim", self.head_dim, reason, [self.head_dim - 1 or 2, self.head_dim + 1]
                )
            return self
        if kv_heads != heads:
            raise ProfileError(
                "num_key_value_heads", kv_heads, "gpt has a KV head for each query head", [heads]
            )
        if self.head_dim * heads != self.hidden_size:
            reason = f"gpt needs {heads} heads · head_dim = hidden_size {self.hidden_size}"
            raise ProfileError("head_dim", self.head_dim, reason, [self.hidden_size // heads])
        if self.rope_scaling:
            raise ProfileError("rope_scaling", self.rope_scaling.rope_type, "gpt has no RoPE", ["null"])
        return self

    def _check_parametrization(self) -> None:
        kind = self.parametrization
        bases = {
            "base_hidden_size": kind != "standard",
            "base_num_hidden_layers": kind == "completep",
        }
        for name, needed in bases.items():
            given = getattr(self, name)
            if needed and given is None:
                size = getattr(self, name.removeprefix("base_"))
                reason = f"is missing; parametrization {kind} is relative to a base model"
                raise ProfileError(name, None, reason, [size])
            if given is not None and not needed:
                raise ProfileError(name, given, f"has no effect with parametrization {kind}", ["null"])
        if kind == "standard":
            return
        if self.architecture not in PARAMETRIZED:
            reason = f"is not supported for {self.architecture}; its scales are known for {', '.join(PARAMETRIZED)}"
            raise ProfileError("parametrization", kind, reason, ["standard"])
        for name in ("attention_bias", "mlp_bias"):
            if getattr(self, name):
                raise ProfileError(name, True, f"is not supported with parametrization {kind}", [False])

    def _check_experts(self) -> None:
        kind, experts, chosen = self.architecture, self.num_experts, self.num_experts_per_tok
        fields = {
            "num_experts": experts,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": self.moe_intermediate_size,
        }
        if kind not in EXPERTS:
            for name, value in fields.items():
                if value is not None:
                    raise ProfileError(name, value, f"{kind} has no experts", ["null"])
            return
        if experts is None or chosen is None:
            name = "num_experts" if experts is None else "num_experts_per_tok"
            raise ProfileError(name, None, f"is missing; {kind} has experts", [8 if experts is None else 2])
        if chosen > experts:
            reason = f"is more than num_experts {experts}"
            raise ProfileError("num_experts_per_tok", chosen, reason, [experts])
        if kind != "qwen3_moe":
            if self.moe_intermediate_size is not None:
                reason = f"{kind}'s experts have the width intermediate_size"
                raise ProfileError("moe_intermediate_size", self.moe_intermediate_size, reason, ["null"])
            if self.attention_bias and kind == "mixtral":
                raise ProfileError("attention_bias", True, "mixtral has no biases", [False])
            if not self.norm_topk_prob and kind != "dbrx":
                raise ProfileError("norm_topk_prob", False, f"{kind}'s weights sum to 1", [True])
        elif self.moe_intermediate_size is None:
            reason = f"is missing; it is the width of {kind}'s experts"
            raise ProfileError("moe_intermediate_size", None, reason, [self.intermediate_size])


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
    """The values with aliases of norm_eps replaced. Raises ProfileError if it is given under two names."""
    given = [name for name in ("norm_eps", *NORM_EPS_ALIASES) if name in values]
    if len(given) > 1:
        raise ProfileError(
            given[1], values[given[1]], f"is an alias of {given[0]}, which is set too; set one", given[:1]
        )
    aliases = {**dict.fromkeys(NORM_EPS_ALIASES, "norm_eps"), "num_local_experts": "num_experts"}
    return {aliases.get(name, name): value for name, value in values.items()}


def neighbours(value: int, valid: list[int]) -> list[int]:
    """The nearest valid values below and above an invalid one, if there are any."""
    return [n for n in valid if 0 < n < value][-1:] + [n for n in valid if n > value][:1]
