"""The architecture's numbers: the fields of a Hugging Face config.json under Llama's names, for Llama and GPT alike.

`Model` refuses what no such network can be; `from_config_json` and `to_config_json` translate to and from the file that
`transformers` reads, for LlamaForCausalLM and GPT2LMHeadModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from profiles.errors import ProfileError

NORM_EPS_ALIASES = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
ACTIVATIONS = {"llama": ("silu",), "gpt": ("gelu", "gelu_new")}

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
LARGEST = 2**24  # of a tensor's dimensions: products of them stay within a computer's integers
Size = Annotated[int, Field(ge=1, le=LARGEST)]


class Section(BaseModel):
    """What all parts of a profile share: frozen, no unknown keys, no conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )


class LinearRope(Section):
    """Rotary positions slowed down evenly (arXiv 2306.15595)."""

    rope_type: Literal["linear"] = Field(description="kind of scaling")
    factor: float = Field(ge=1, description="every frequency is divided by it")


class Llama3Rope(Section):
    """Rotary positions slowed down at the low frequencies only (Llama 3.1)."""

    rope_type: Literal["llama3"] = Field(description="kind of scaling")
    factor: float = Field(ge=1, description="low frequencies are divided by it")
    low_freq_factor: float = Field(gt=0, description="wavelengths above original / this are scaled")
    high_freq_factor: float = Field(gt=0, description="wavelengths below original / this are kept")
    original_max_position_embeddings: Count = Field(description="length that the model was first trained on")

    @model_validator(mode="after")
    def _ordered(self) -> Llama3Rope:
        if self.low_freq_factor >= self.high_freq_factor:
            reason = f"is not above low_freq_factor {self.low_freq_factor}"
            raise ProfileError("high_freq_factor", self.high_freq_factor, reason)
        return self


RopeScaling = Annotated[LinearRope | Llama3Rope, Field(discriminator="rope_type")]


class Model(Section):
    """A Llama or GPT network. What has a default here has it per architecture."""

    architecture: Literal["llama", "gpt"] = Field("llama", description="kind of network")
    hidden_size: Size = Field(description="width of the residual stream")
    intermediate_size: Size = Field(description="width of the MLP")
    num_hidden_layers: Annotated[int, Field(ge=1, le=1024)] = Field(description="number of layers")
    num_attention_heads: Size = Field(description="number of query heads")
    num_key_value_heads: Size = Field(description="number of KV heads (default: as many as query heads)")
    head_dim: Size = Field(description="width of a head (default: hidden_size / num_attention_heads)")
    vocab_size: Size = Field(description="number of token embeddings")
    max_position_embeddings: Size = Field(
        description="longest sequence; for gpt, number of learned positions"
    )
    norm_eps: float = Field(
        1e-5, gt=0, description="epsilon of the norms; rms_norm_eps and layer_norm_epsilon mean the same"
    )
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary frequencies (llama)")
    rope_scaling: RopeScaling | None = Field(None, description="how rotary frequencies are stretched (llama)")
    tie_word_embeddings: bool = Field(
        description="whether the output projection is the embedding (default: gpt only)"
    )
    attention_bias: bool = Field(description="biases in the attention's projections (default: gpt only)")
    mlp_bias: bool = Field(description="biases in the MLP (default: gpt only)")
    hidden_act: str = Field(description="activation of the MLP (default: silu for llama, gelu for gpt)")
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of initial weights")
    dropout: float = Field(0.0, ge=0, lt=1, description="of embedding, attention and residual alike (gpt)")

    @property
    def parameters(self) -> int:
        """How many the network has, for lists; the planner counts them from the layers."""
        h, f, llama = self.hidden_size, self.intermediate_size, self.architecture == "llama"
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        norm = h if llama else 2 * h
        attention = h * (q + 2 * kv) + q * h + self.attention_bias * (q + 2 * kv + h)
        wide = 2 if llama else 1  # gate and up
        mlp = (wide + 1) * h * f + self.mlp_bias * (wide * f + h)
        ends = self.vocab_size * h * (1 if self.tie_word_embeddings else 2) + norm
        positions = 0 if llama else self.max_position_embeddings * h
        return self.num_hidden_layers * (attention + mlp + 2 * norm) + ends + positions

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
                    reason = f"is no multiple of {heads} query heads, and head_dim is not given"
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
            raise ProfileError(
                "num_key_value_heads",
                kv_heads,
                f"does not divide {heads} query heads",
                neighbours(kv_heads, valid),
            )
        if self.hidden_act not in ACTIVATIONS[self.architecture]:
            reason = f"is not an activation of {self.architecture}"
            raise ProfileError("hidden_act", self.hidden_act, reason, ACTIVATIONS[self.architecture])
        if self.architecture == "llama":
            if self.dropout:
                raise ProfileError("dropout", self.dropout, "llama has no dropout", [0.0])
            if self.head_dim % 2:
                reason = "rotary positions turn pairs, so it must be even"
                raise ProfileError(
                    "head_dim", self.head_dim, reason, [self.head_dim - 1 or 2, self.head_dim + 1]
                )
            return self
        if kv_heads != heads:
            raise ProfileError(
                "num_key_value_heads", kv_heads, "gpt has a KV head for each query head", [heads]
            )
        if self.head_dim * heads != self.hidden_size:
            reason = f"gpt's {heads} heads together are as wide as hidden_size {self.hidden_size}"
            raise ProfileError("head_dim", self.head_dim, reason, [self.hidden_size // heads])
        if self.rope_scaling:
            raise ProfileError(
                "rope_scaling", self.rope_scaling.rope_type, "gpt has no rotary positions", ["null"]
            )
        return self


_DERIVED = (
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
)


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with norm_eps under its one name.

    Raises:
        ProfileError: it is given under two names.
    """
    given = [name for name in ("norm_eps", *NORM_EPS_ALIASES) if name in values]
    if len(given) > 1:
        raise ProfileError(
            given[1], values[given[1]], f"means the same as {given[0]}, which is given too", given[:1]
        )
    return {"norm_eps" if name in NORM_EPS_ALIASES else name: value for name, value in values.items()}


def neighbours(value: int, valid: list[int]) -> list[int]:
    """The valid values next to one that is not: the one below, if there is one, and the one above."""
    return [n for n in valid if 0 < n < value][-1:] + [n for n in valid if n > value][:1]


LLAMA_FIELDS = (
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *(
        "vocab_size",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "tie_word_embeddings",
        "attention_bias",
    ),
    *("mlp_bias", "hidden_act", "initializer_range"),
)
GPT_FIELDS = {  # ours to GPT-2's
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
# What changes the network and is built in one way only, with that way's value, which is transformers' default.
FIXED = {
    "llama": {"attention_dropout": 0.0},
    "gpt": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}
# What transformers assumes where a config.json does not say.
GPT_ASSUMED = {"activation_function": "gelu_new", **dict.fromkeys(GPT_DROPOUTS, 0.1)}


def from_config_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Model` that a Hugging Face config.json sets.

    Raises:
        ProfileError: another kind of model, or one that needs what these networks do not have.
    """
    kind = config.get("model_type")
    architectures = {"llama": "llama", "gpt2": "gpt"}
    if kind not in architectures:
        raise ProfileError(
            "model_type", kind, "is not an architecture that can be trained here", architectures
        )
    architecture = architectures[kind]
    for name, value in FIXED[architecture].items():
        if config.get(name, value) != value:
            raise ProfileError(name, config[name], f"{architecture} is built without it", [value])
    values: dict[str, Any] = {"architecture": architecture}
    if architecture == "llama":
        values |= {name: config[name] for name in LLAMA_FIELDS if config.get(name) is not None}
        values["norm_eps"] = config.get("rms_norm_eps", 1e-6)
        return values | _rope(config)
    config = GPT_ASSUMED | dict(config)
    values |= {ours: config[theirs] for ours, theirs in GPT_FIELDS.items() if config.get(theirs) is not None}
    if "hidden_size" in values:
        values.setdefault("intermediate_size", 4 * values["hidden_size"])
    dropouts = {config[name] for name in GPT_DROPOUTS}
    if len(dropouts) > 1:
        raise ProfileError(
            "embd_pdrop", config["embd_pdrop"], "attn_pdrop and resid_pdrop must be equal to it"
        )
    return values | {"dropout": float(dropouts.pop())}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling from either form: together in rope_parameters (transformers 5), or each for itself."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    kinds = {"linear": LinearRope, "llama3": Llama3Rope}
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    if kind not in kinds:
        raise ProfileError("rope_scaling.rope_type", kind, "is not supported", ["default", *kinds])
    fields = {name: value for name, value in scaling.items() if name in kinds[kind].model_fields}
    return {"rope_theta": float(theta), "rope_scaling": {"rope_type": kind, **fields}}


def to_config_json(model: Model) -> dict[str, Any]:
    """The config.json of the same network, as `transformers` 4 and 5 read it."""
    if model.architecture == "llama":
        fields = {name: getattr(model, name) for name in LLAMA_FIELDS}
        scaling = model.rope_scaling and model.rope_scaling.model_dump()
        fields |= {"rms_norm_eps": model.norm_eps, "rope_scaling": scaling}
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **fields, **FIXED["llama"]}
    fields = {theirs: getattr(model, ours) for ours, theirs in GPT_FIELDS.items()}
    dropouts = dict.fromkeys(GPT_DROPOUTS, model.dropout)
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **fields, **dropouts, **FIXED["gpt"]}
