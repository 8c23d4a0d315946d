"""Weight names: which Hugging Face tensor holds each of our tensors, one map per architecture, read in both directions.

Most tensors only differ in name. GPT-2 stores its matrices as (in, out) where ours are (out, in), and q, k and v side
by side in one tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class HuggingFaceTensor:
    """The tensor of a Hugging Face model that holds one of ours, complete or as a part."""

    name: str  # of the Hugging Face tensor
    transposed: bool = False  # whether it is stored as (in, out)
    # part, parts: ours is this one of `parts` equal parts along its last dim
    part: int = 0
    parts: int = 1

    def read(self, stored: Tensor) -> Tensor:
        """Our tensor as a view of the stored one."""
        tensor = stored.tensor_split(self.parts, -1)[self.part]
        return tensor.t() if self.transposed else tensor

    def write(self, tensor: Tensor) -> Tensor:
        """Our tensor in the stored orientation: one of `parts` parts of the stored tensor."""
        return tensor.t() if self.transposed else tensor


def _attention(part: int) -> dict[str, HuggingFaceTensor]:
    letter, prefix = "qkv"[part], "transformer.h.{}.attn.c_attn"
    return {
        f"layers.{{}}.attention.qkv.{letter}.weight": HuggingFaceTensor(f"{prefix}.weight", True, part, 3),
        f"layers.{{}}.attention.qkv.{letter}.bias": HuggingFaceTensor(f"{prefix}.bias", False, part, 3),
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
    **_attention(0),
    **_attention(1),
    **_attention(2),
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

MAPS = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen3": QWEN3,
    "olmo2": OLMO2,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "gpt": GPT,
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert


def huggingface_tensor(architecture: str, name: str) -> HuggingFaceTensor:
    """The Hugging Face tensor that holds our tensor `name`. Raises ValueError if the architecture has no such tensor."""
    entry = MAPS[architecture].get(_NUMBER.sub("{}", name))
    if entry is None:
        raise ValueError(f"{name}: {architecture} has no tensor of this name")
    return replace(entry, name=entry.name.format(*_NUMBER.findall(name)))
