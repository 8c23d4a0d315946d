"""Weight names: which Hugging Face tensor holds each of our tensors, one map per architecture, read in both directions.

Most tensors only differ in name. Others are parts of a larger one: GPT-2 has q, k and v side by side, DBRX one below the other,
and both DBRX and GPT-OSS all experts in one tensor. Some are stored as (in, out) where ours are (out, in).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from profiles.sections.model import Model

Index = tuple[int | slice, ...]
Place = Callable[[Model, Sequence[int]], Index]
"""Where a tensor lies in a larger one, from the model and the numbers in our tensor's name: of its layer, and of its expert."""


@dataclass(frozen=True)
class HuggingFaceTensor:
    """The tensor of a Hugging Face model that holds one of ours, complete or as a part."""

    name: str  # of the Hugging Face tensor
    transposed: bool = False  # whether it is stored as (in, out)
    place: Place | None = None
    index: Index = ()  # of our tensor, if it is a part; slices have a start and a stop, or neither

    def read(self, stored: Tensor) -> Tensor:
        """Our tensor as a view of the stored one."""
        tensor = stored[self.index] if self.index else stored
        return tensor.t() if self.transposed else tensor

    def write(self, tensor: Tensor) -> Tensor:
        """Our tensor in the stored orientation."""
        return tensor.t() if self.transposed else tensor

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the stored tensor as far as our tensor, of this shape, reaches."""
        own = [*shape][::-1] if self.transposed else [*shape]
        if not self.index:
            return tuple(own)
        kept = iter(own)
        sizes = []
        for at in (
            *self.index,
            *[slice(None)] * (len(own) - sum(isinstance(at, slice) for at in self.index)),
        ):
            size = at + 1 if isinstance(at, int) else next(kept)
            sizes.append(size if isinstance(at, int) or at.stop is None else at.stop)
        return tuple(sizes)


def _rows_of(part: int, model: Model) -> slice:
    """Rows of q, k or v in one matrix of them all."""
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    ends = (0, q, q + kv, q + 2 * kv)
    return slice(ends[part], ends[part + 1])


def _gpt_attention(part: int) -> dict[str, HuggingFaceTensor]:
    ours, theirs = f"layers.{{}}.attention.qkv.{'qkv'[part]}", "transformer.h.{}.attn.c_attn"
    return {
        f"{ours}.weight": HuggingFaceTensor(
            f"{theirs}.weight", True, lambda model, _: (slice(None), _rows_of(part, model))
        ),
        f"{ours}.bias": HuggingFaceTensor(f"{theirs}.bias", False, lambda model, _: (_rows_of(part, model),)),
    }


LLAMA = {
    "embedding.weight": HuggingFaceTensor("model.embed_tokens.weight"),
    "layers.{}.attention_norm.weight": HuggingFaceTensor("model.layers.{}.input_layernorm.weight"),
    "layers.{}.attention.qkv.q.weight": HuggingFaceTensor("model.layers.{}.self_attn.q_proj.weight"),
    "layers.{}.attention.qkv.k.weight": HuggingFaceTensor("model.layers.{}.self_attn.k_proj.weight"),
    "layers.{}.attention.qkv.v.weight": HuggingFaceTensor("model.layers.{}.self_attn.v_proj.weight"),
    "layers.{}.attention.qkv.q.bias": HuggingFaceTensor("model.layers.{}.self_attn.q_proj.bias"),
    "layers.{}.attention.qkv.k.bias": HuggingFaceTensor("model.layers.{}.self_attn.k_proj.bias"),
    "layers.{}.attention.qkv.v.bias": HuggingFaceTensor("model.layers.{}.self_attn.v_proj.bias"),
    "layers.{}.attention.output.weight": HuggingFaceTensor("model.layers.{}.self_attn.o_proj.weight"),
    "layers.{}.attention.output.bias": HuggingFaceTensor("model.layers.{}.self_attn.o_proj.bias"),
    "layers.{}.mlp_norm.weight": HuggingFaceTensor("model.layers.{}.post_attention_layernorm.weight"),
    "layers.{}.mlp.gate_up.gate.weight": HuggingFaceTensor("model.layers.{}.mlp.gate_proj.weight"),
    "layers.{}.mlp.gate_up.up.weight": HuggingFaceTensor("model.layers.{}.mlp.up_proj.weight"),
    "layers.{}.mlp.gate_up.gate.bias": HuggingFaceTensor("model.layers.{}.mlp.gate_proj.bias"),
    "layers.{}.mlp.gate_up.up.bias": HuggingFaceTensor("model.layers.{}.mlp.up_proj.bias"),
    "layers.{}.mlp.down.weight": HuggingFaceTensor("model.layers.{}.mlp.down_proj.weight"),
    "layers.{}.mlp.down.bias": HuggingFaceTensor("model.layers.{}.mlp.down_proj.bias"),
    "norm.weight": HuggingFaceTensor("model.norm.weight"),
    "head.weight": HuggingFaceTensor("lm_head.weight"),
}

QWEN3 = {
    **LLAMA,
    "layers.{}.attention.qk_norm.q.weight": HuggingFaceTensor("model.layers.{}.self_attn.q_norm.weight"),
    "layers.{}.attention.qk_norm.k.weight": HuggingFaceTensor("model.layers.{}.self_attn.k_norm.weight"),
}

OLMO2 = {
    **LLAMA,
    "layers.{}.attention.q_norm.weight": HuggingFaceTensor("model.layers.{}.self_attn.q_norm.weight"),
    "layers.{}.attention.k_norm.weight": HuggingFaceTensor("model.layers.{}.self_attn.k_norm.weight"),
    "layers.{}.attention_norm.weight": HuggingFaceTensor("model.layers.{}.post_attention_layernorm.weight"),
    "layers.{}.mlp_norm.weight": HuggingFaceTensor("model.layers.{}.post_feedforward_layernorm.weight"),
}


def _experts(router: str, experts: str, gate: str, up: str, down: str) -> dict[str, HuggingFaceTensor]:
    """The weights of a mixture of experts in place of an MLP, one tensor for each expert's projection."""
    return {
        **{name: entry for name, entry in LLAMA.items() if ".mlp." not in name},
        "layers.{}.mlp.router.weight": HuggingFaceTensor(f"model.layers.{{}}.{router}.weight"),
        "layers.{}.mlp.gate_up.{}.gate.weight": HuggingFaceTensor(
            f"model.layers.{{}}.{experts}.{{}}.{gate}.weight"
        ),
        "layers.{}.mlp.gate_up.{}.up.weight": HuggingFaceTensor(
            f"model.layers.{{}}.{experts}.{{}}.{up}.weight"
        ),
        "layers.{}.mlp.down.{}.weight": HuggingFaceTensor(f"model.layers.{{}}.{experts}.{{}}.{down}.weight"),
    }


MIXTRAL = _experts("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")

QWEN3_MOE = {
    **_experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    **{name: entry for name, entry in QWEN3.items() if ".qk_norm." in name},
}

GPT = {
    "embedding.weight": HuggingFaceTensor("transformer.wte.weight"),
    "positions.weight": HuggingFaceTensor("transformer.wpe.weight"),
    "layers.{}.attention_norm.weight": HuggingFaceTensor("transformer.h.{}.ln_1.weight"),
    "layers.{}.attention_norm.bias": HuggingFaceTensor("transformer.h.{}.ln_1.bias"),
    **_gpt_attention(0),
    **_gpt_attention(1),
    **_gpt_attention(2),
    "layers.{}.attention.output.weight": HuggingFaceTensor("transformer.h.{}.attn.c_proj.weight", True),
    "layers.{}.attention.output.bias": HuggingFaceTensor("transformer.h.{}.attn.c_proj.bias"),
    "layers.{}.mlp_norm.weight": HuggingFaceTensor("transformer.h.{}.ln_2.weight"),
    "layers.{}.mlp_norm.bias": HuggingFaceTensor("transformer.h.{}.ln_2.bias"),
    "layers.{}.mlp.up.weight": HuggingFaceTensor("transformer.h.{}.mlp.c_fc.weight", True),
    "layers.{}.mlp.up.bias": HuggingFaceTensor("transformer.h.{}.mlp.c_fc.bias"),
    "layers.{}.mlp.down.weight": HuggingFaceTensor("transformer.h.{}.mlp.c_proj.weight", True),
    "layers.{}.mlp.down.bias": HuggingFaceTensor("transformer.h.{}.mlp.c_proj.bias"),
    "norm.weight": HuggingFaceTensor("transformer.ln_f.weight"),
    "norm.bias": HuggingFaceTensor("transformer.ln_f.bias"),
    "head.weight": HuggingFaceTensor("lm_head.weight"),
}


def _expert_rows(model: Model, numbers: Sequence[int]) -> Index:
    """Rows of an expert among those of all."""
    return (slice(numbers[1] * model.expert_width, (numbers[1] + 1) * model.expert_width),)


_DBRX = "transformer.blocks.{}"
DBRX = {
    "embedding.weight": HuggingFaceTensor("transformer.wte.weight"),
    "layers.{}.attention_norm.weight": HuggingFaceTensor(f"{_DBRX}.norm_attn_norm.norm_1.weight"),
    **{
        f"layers.{{}}.attention.qkv.{letter}.weight": HuggingFaceTensor(
            f"{_DBRX}.norm_attn_norm.attn.Wqkv.weight",
            place=lambda model, _, part=part: (_rows_of(part, model),),
        )
        for part, letter in enumerate("qkv")
    },
    "layers.{}.attention.output.weight": HuggingFaceTensor(f"{_DBRX}.norm_attn_norm.attn.out_proj.weight"),
    "layers.{}.mlp_norm.weight": HuggingFaceTensor(f"{_DBRX}.norm_attn_norm.norm_2.weight"),
    "layers.{}.mlp.router.weight": HuggingFaceTensor(f"{_DBRX}.ffn.router.layer.weight"),
    "layers.{}.mlp.gate_up.{}.gate.weight": HuggingFaceTensor(
        f"{_DBRX}.ffn.experts.mlp.w1", place=_expert_rows
    ),
    "layers.{}.mlp.gate_up.{}.up.weight": HuggingFaceTensor(
        f"{_DBRX}.ffn.experts.mlp.v1", place=_expert_rows
    ),
    "layers.{}.mlp.down.{}.weight": HuggingFaceTensor(f"{_DBRX}.ffn.experts.mlp.w2", True, _expert_rows),
    "norm.weight": HuggingFaceTensor("transformer.norm_f.weight"),
    "head.weight": HuggingFaceTensor("lm_head.weight"),
}


def _interleaved(half: int, dims: int) -> Place:
    """Every second column of an expert: gate in the even ones, up in the odd ones."""

    def place(model: Model, numbers: Sequence[int]) -> Index:
        columns = slice(half, 2 * model.expert_width, 2)
        return (numbers[1], *[slice(None)] * (dims - 1), columns)

    return place


_GPT_OSS = "model.layers.{}.mlp.experts"
GPT_OSS = {
    **{name: entry for name, entry in LLAMA.items() if ".mlp." not in name},
    "layers.{}.attention.sinks": HuggingFaceTensor("model.layers.{}.self_attn.sinks"),
    "layers.{}.mlp.router.weight": HuggingFaceTensor("model.layers.{}.mlp.router.weight"),
    "layers.{}.mlp.router.bias": HuggingFaceTensor("model.layers.{}.mlp.router.bias"),
    **{
        f"layers.{{}}.mlp.gate_up.{{}}.{name}.{kind}": HuggingFaceTensor(
            f"{_GPT_OSS}.{stored}", dims == 2, _interleaved(half, dims)
        )
        for half, name in enumerate(("gate", "up"))
        for kind, stored, dims in (("weight", "gate_up_proj", 2), ("bias", "gate_up_proj_bias", 1))
    },
    "layers.{}.mlp.down.{}.weight": HuggingFaceTensor(
        f"{_GPT_OSS}.down_proj", True, lambda _, numbers: (numbers[1],)
    ),
    "layers.{}.mlp.down.{}.bias": HuggingFaceTensor(
        f"{_GPT_OSS}.down_proj_bias", False, lambda _, numbers: (numbers[1],)
    ),
}

_LATENTS = {  # our layer: theirs
    "kv_norm": "kv_a_layernorm",
    "kv": "kv_b_proj",
    "latents.kv": "kv_a_proj_with_mqa",
    "q_norm": "q_a_layernorm",
    "latents.q": "q_a_proj",
}
_SHARED = "model.layers.{}.mlp.shared_experts"
DEEPSEEK_V3 = {
    **{name: entry for name, entry in LLAMA.items() if ".qkv." not in name and not name.endswith(".bias")},
    **{
        name: entry
        for name, entry in _experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj").items()
        if ".mlp." in name
    },
    **{
        f"layers.{{}}.attention.{ours}.weight": HuggingFaceTensor(
            f"model.layers.{{}}.self_attn.{theirs}.weight"
        )
        for ours, theirs in _LATENTS.items()
    },
    "layers.{}.attention.q.weight": HuggingFaceTensor("model.layers.{}.self_attn.q_b_proj.weight"),
    "layers.{}.mlp.router.selection_bias": HuggingFaceTensor(
        "model.layers.{}.mlp.gate.e_score_correction_bias"
    ),
    "layers.{}.shared.gate_up.gate.weight": HuggingFaceTensor(f"{_SHARED}.gate_proj.weight"),
    "layers.{}.shared.gate_up.up.weight": HuggingFaceTensor(f"{_SHARED}.up_proj.weight"),
    "layers.{}.shared.down.weight": HuggingFaceTensor(f"{_SHARED}.down_proj.weight"),
}
_WHOLE_QUERIES = HuggingFaceTensor(
    "model.layers.{}.self_attn.q_proj.weight"
)  # without a latent of the queries
FLOAT32 = (".router.selection_bias",)  # ends the names of tensors that are float32 in any precision

MAPS = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen3": QWEN3,
    "olmo2": OLMO2,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "dbrx": DBRX,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt": GPT,
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert


def huggingface_tensor(model: Model, name: str) -> HuggingFaceTensor:
    """The Hugging Face tensor that holds our tensor `name`. Raises ValueError if the architecture has no such tensor."""
    entry = MAPS[model.architecture].get(_NUMBER.sub("{}", name))
    if model.architecture == "deepseek_v3" and name.endswith("attention.q.weight") and not model.q_lora_rank:
        entry = _WHOLE_QUERIES
    if entry is None:
        raise ValueError(f"{name}: {model.architecture} has no tensor of this name")
    numbers = [int(number) for number in _NUMBER.findall(name)]
    index = entry.place(model, numbers) if entry.place else ()
    return replace(entry, name=entry.name.format(*numbers), index=index)
