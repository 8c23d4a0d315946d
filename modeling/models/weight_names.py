"""Where a Hugging Face model keeps each tensor of ours: one map an architecture, read in both directions.

Mostly a tensor of ours is one of theirs under another name. GPT-2 keeps its matrices as (in, out), ours are (out, in), and
its q, k and v side by side in one tensor; a `Stored` says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """Where a tensor of ours lies in a Hugging Face model.

    Attributes:
        name: of their tensor.
        transposed: theirs is (in, out).
        part, parts: ours is this one of so many equal parts of theirs, along its last dim.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1

    def read(self, theirs: Tensor) -> Tensor:
        """Our tensor out of theirs, as a view."""
        ours = theirs.tensor_split(self.parts, -1)[self.part]
        return ours.t() if self.transposed else ours

    def write(self, ours: Tensor) -> Tensor:
        """Our tensor as a part of theirs."""
        return ours.t() if self.transposed else ours


def _attention(part: int) -> dict[str, Stored]:
    letter, prefix = "qkv"[part], "transformer.h.{}.attn.c_attn"
    return {
        f"layers.{{}}.attention.qkv.{letter}.weight": Stored(f"{prefix}.weight", True, part, 3),
        f"layers.{{}}.attention.qkv.{letter}.bias": Stored(f"{prefix}.bias", False, part, 3),
    }


LLAMA = {
    "embedding.weight": Stored("model.embed_tokens.weight"),
    "layers.{}.attention_norm.weight": Stored("model.layers.{}.input_layernorm.weight"),
    "layers.{}.attention.qkv.q.weight": Stored("model.layers.{}.self_attn.q_proj.weight"),
    "layers.{}.attention.qkv.k.weight": Stored("model.layers.{}.self_attn.k_proj.weight"),
    "layers.{}.attention.qkv.v.weight": Stored("model.layers.{}.self_attn.v_proj.weight"),
    "layers.{}.attention.qkv.q.bias": Stored("model.layers.{}.self_attn.q_proj.bias"),
    "layers.{}.attention.qkv.k.bias": Stored("model.layers.{}.self_attn.k_proj.bias"),
    "layers.{}.attention.qkv.v.bias": Stored("model.layers.{}.self_attn.v_proj.bias"),
    "layers.{}.attention.output.weight": Stored("model.layers.{}.self_attn.o_proj.weight"),
    "layers.{}.attention.output.bias": Stored("model.layers.{}.self_attn.o_proj.bias"),
    "layers.{}.mlp_norm.weight": Stored("model.layers.{}.post_attention_layernorm.weight"),
    "layers.{}.mlp.gate_up.gate.weight": Stored("model.layers.{}.mlp.gate_proj.weight"),
    "layers.{}.mlp.gate_up.up.weight": Stored("model.layers.{}.mlp.up_proj.weight"),
    "layers.{}.mlp.gate_up.gate.bias": Stored("model.layers.{}.mlp.gate_proj.bias"),
    "layers.{}.mlp.gate_up.up.bias": Stored("model.layers.{}.mlp.up_proj.bias"),
    "layers.{}.mlp.down.weight": Stored("model.layers.{}.mlp.down_proj.weight"),
    "layers.{}.mlp.down.bias": Stored("model.layers.{}.mlp.down_proj.bias"),
    "norm.weight": Stored("model.norm.weight"),
    "head.weight": Stored("lm_head.weight"),
}

GPT = {
    "embedding.weight": Stored("transformer.wte.weight"),
    "positions.weight": Stored("transformer.wpe.weight"),
    "layers.{}.attention_norm.weight": Stored("transformer.h.{}.ln_1.weight"),
    "layers.{}.attention_norm.bias": Stored("transformer.h.{}.ln_1.bias"),
    **_attention(0),
    **_attention(1),
    **_attention(2),
    "layers.{}.attention.output.weight": Stored("transformer.h.{}.attn.c_proj.weight", transposed=True),
    "layers.{}.attention.output.bias": Stored("transformer.h.{}.attn.c_proj.bias"),
    "layers.{}.mlp_norm.weight": Stored("transformer.h.{}.ln_2.weight"),
    "layers.{}.mlp_norm.bias": Stored("transformer.h.{}.ln_2.bias"),
    "layers.{}.mlp.up.weight": Stored("transformer.h.{}.mlp.c_fc.weight", transposed=True),
    "layers.{}.mlp.up.bias": Stored("transformer.h.{}.mlp.c_fc.bias"),
    "layers.{}.mlp.down.weight": Stored("transformer.h.{}.mlp.c_proj.weight", transposed=True),
    "layers.{}.mlp.down.bias": Stored("transformer.h.{}.mlp.c_proj.bias"),
    "norm.weight": Stored("transformer.ln_f.weight"),
    "norm.bias": Stored("transformer.ln_f.bias"),
    "head.weight": Stored("lm_head.weight"),
}

MAPS = {"llama": LLAMA, "gpt": GPT}
_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")


def stored(architecture: str, name: str) -> Stored:
    """Where the tensor that we call `name` lies in a Hugging Face model.

    Raises:
        ValueError: the architecture has no such tensor.
    """
    layer = _LAYER.search(name)
    place = MAPS[architecture].get(_LAYER.sub("{}", name))
    if place is None:
        raise ValueError(f"{architecture}: no weight is called {name}")
    return replace(place, name=place.name.format(layer.group())) if layer else place
