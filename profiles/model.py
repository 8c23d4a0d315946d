"""Model section: the fields of a Hugging Face config.json, under Llama's names for all architectures.

`Model` validates them; `from_config_json` and `to_config_json` convert from and to the config.json of LlamaForCausalLM,
MistralForCausalLM, Qwen3ForCausalLM, Olmo2ForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM and GPT2LMHeadModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from profiles.errors import ProfileError

NORM_EPS_ALIASES = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
EXPERTS = ("mixtral", "qwen3_moe")  # architectures whose MLPs are mixtures of experts
ROTARY = (
    "llama",
    "mistral",
    "qwen3",
    "olmo2",
    *EXPERTS,
)  # architectures with Llama's fields; the others have GPT's
WINDOWED = ("mistral", "mixtral")  # architectures with a sliding window
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
    """The model: a Llama, Mistral, Qwen3, OLMo 2, Mixtral, Qwen3-MoE or GPT architecture."""

    architecture: Literal["llama", "mistral", "qwen3", "olmo2", "mixtral", "qwen3_moe", "gpt"] = Field(
        "llama", description="model architecture"
    )
    hidden_size: Size = Field(description="width of the residual stream")
    intermediate_size: Size = Field(description="width of the MLP; for mixtral, of an expert")
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
        None, description="number of tokens, up to itself, that a token attends to; null: all (mistral)"
    )
    tie_word_embeddings: bool = Field(
        description="share the embedding with the output projection (default: true for gpt)"
    )
    attention_bias: bool = Field(description="biases in the attention projections (default: true for gpt)")
    mlp_bias: bool = Field(description="biases in the MLP (default: true for gpt)")
    hidden_act: str = Field(description="MLP activation function (default: gelu for gpt, else silu)")
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of initial weights")
    num_experts: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="experts of a layer (mixtral, qwen3_moe); alias: num_local_experts"
    )
    num_experts_per_tok: Count | None = Field(None, description="experts that a token goes to")
    moe_intermediate_size: Size | None = Field(
        None, description="width of an expert, where it is not intermediate_size (qwen3_moe)"
    )
    norm_topk_prob: bool = Field(
        True, description="divide the weights of a token's experts by their sum (always, for mixtral)"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout probability of embeddings, attention and residuals (gpt)"
    )

    def window(self, layer: int) -> int | None:
        """Number of tokens, up to itself, that a token attends to in this layer; None: all."""
        return self.sliding_window

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
        wide = 1 if gpt else 2  # gate and up
        mlp = (wide + 1) * h * f + self.mlp_bias * (wide * f + h)
        if experts is not None:
            mlp = experts * mlp + h * (self.num_experts or 0)  # and the router
        ends = self.vocab_size * h * (1 if self.tie_word_embeddings else 2) + norm
        positions = self.max_position_embeddings * h if gpt else 0
        return self.num_hidden_layers * (attention + mlp + 2 * norm + qk_norms) + ends + positions

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
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
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
        if self.sliding_window and self.architecture not in WINDOWED:
            reason = f"{self.architecture} has no sliding window"
            raise ProfileError("sliding_window", self.sliding_window, reason, ["null"])
        self._check_experts()
        if self.architecture in ROTARY:
            if self.dropout:
                raise ProfileError("dropout", self.dropout, f"{self.architecture} has no dropout", [0.0])
            if self.attention_bias and self.architecture == "mistral":
                raise ProfileError("attention_bias", True, "mistral has no biases in its attention", [False])
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
        if kind == "mixtral":
            if self.moe_intermediate_size is not None:
                reason = "mixtral's experts have the width intermediate_size"
                raise ProfileError("moe_intermediate_size", self.moe_intermediate_size, reason, ["null"])
            if self.attention_bias:
                raise ProfileError("attention_bias", True, "mixtral has no biases", [False])
            if not self.norm_topk_prob:
                raise ProfileError("norm_topk_prob", False, "mixtral's weights sum to 1", [True])
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


LLAMA_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "rope_theta", "rope_scaling"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "initializer_range"),
)
GPT_FIELDS = {  # our name: name in GPT-2's config.json
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "vocab_size": "vocab_size",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}
GPT_DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
# Fields that change the model but support one value only, which is transformers' default.
FIXED = {
    "llama": {"attention_dropout": 0.0},
    "mistral": {"attention_dropout": 0.0},
    "qwen3": {"attention_dropout": 0.0, "use_sliding_window": False},
    "olmo2": {"attention_dropout": 0.0},
    "mixtral": {"attention_dropout": 0.0, "router_jitter_noise": 0.0},
    "qwen3_moe": {
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "gpt": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}
# Defaults of transformers for fields that a config.json omits.
GPT_DEFAULTS = {"activation_function": "gelu_new", **dict.fromkeys(GPT_DROPOUTS, 0.1)}
ROTARY_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"rms_norm_eps": 1e-6, "head_dim": 128},
    "olmo2": {"rms_norm_eps": 1e-5},
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "rms_norm_eps": 1e-6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
}
# Fields of the experts: our name: name in config.json.
EXPERT_FIELDS = {
    "mixtral": {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"},
    "qwen3_moe": {
        name: name
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    },
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def from_config_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """`Model` fields from a Hugging Face config.json. Raises ProfileError for an unsupported architecture or feature."""
    kind = config.get("model_type")
    architectures = {**{name: name for name in ROTARY}, "gpt2": "gpt"}
    if kind not in architectures:
        raise ProfileError("model_type", kind, "is not a supported architecture", architectures)
    architecture = architectures[kind]
    for name, value in FIXED[architecture].items():
        if config.get(name, value) != value:
            raise ProfileError(name, config[name], f"is not supported for {architecture}", [value])
    values: dict[str, Any] = {"architecture": architecture}
    if architecture in ROTARY:
        config = ROTARY_DEFAULTS[architecture] | _canonical_experts(config)
        values |= {name: config[name] for name in LLAMA_FIELDS if config.get(name) is not None}
        values |= {name: config[name] for name in EXPERT_FIELDS.get(architecture, ())}
        values["norm_eps"] = config["rms_norm_eps"]
        if architecture in WINDOWED:
            values["sliding_window"] = config["sliding_window"]
        return values | _rope(config)
    config = GPT_DEFAULTS | dict(config)
    values |= {ours: config[theirs] for ours, theirs in GPT_FIELDS.items() if config.get(theirs) is not None}
    if "hidden_size" in values:
        values.setdefault("intermediate_size", 4 * values["hidden_size"])
    dropouts = {config[name] for name in GPT_DROPOUTS}
    if len(dropouts) > 1:
        raise ProfileError(
            "embd_pdrop", config["embd_pdrop"], "attn_pdrop and resid_pdrop must be equal to it"
        )
    return values | {"dropout": float(dropouts.pop())}


def _canonical_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the number of experts under one name: transformers has two."""
    return {{"num_local_experts": "num_experts"}.get(name, name): value for name, value in config.items()}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, from rope_parameters (transformers 5) or from separate fields (transformers 4)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    kinds = {"linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    if kind not in kinds:
        raise ProfileError("rope_scaling.rope_type", kind, "is not supported", ["default", *kinds])
    for name in ("mscale", "mscale_all_dim"):
        if scaling.get(name) is not None:
            raise ProfileError(f"rope_scaling.{name}", scaling[name], "is not supported", ["null"])
    fields = {name: value for name, value in scaling.items() if name in kinds[kind].model_fields}
    return {"rope_theta": float(theta), "rope_scaling": {"rope_type": kind, **fields}}


def to_config_json(model: Model) -> dict[str, Any]:
    """The config.json of a model, readable by transformers 4 and 5."""
    if (kind := model.architecture) in ROTARY:
        fields = {name: getattr(model, name) for name in LLAMA_FIELDS}
        scaling = model.rope_scaling and model.rope_scaling.model_dump()
        fields |= {"rms_norm_eps": model.norm_eps, "rope_scaling": scaling}
        if kind in WINDOWED:
            fields["sliding_window"] = model.sliding_window
        fields |= {theirs: getattr(model, ours) for ours, theirs in EXPERT_FIELDS.get(kind, {}).items()}
        return {"architectures": [CLASSES[kind]], "model_type": kind, **fields, **FIXED[kind]}
    fields = {theirs: getattr(model, ours) for ours, theirs in GPT_FIELDS.items()}
    dropouts = dict.fromkeys(GPT_DROPOUTS, model.dropout)
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **fields, **dropouts, **FIXED["gpt"]}
