"""DBRX: Mixtral with clipped heads and centred norms.

    q, k, v = clip(W x, ±c)        before q and k are rotated
    norm(x) = (x - mean) / sqrt(var + ε) · w

Shapes as in `llama.py`. Described in databricks.com/blog/introducing-dbrx-new-state-art-open-llm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from modeling.models.families.mixtral import Mixtral
from modeling.models.weight_names import HuggingFaceTensor, Index, locate_rows, renamed
from profiles.sections.model import Model


def _expert_rows(model: Model, numbers: Sequence[int]) -> Index:
    """Rows of an expert in the matrix of all experts."""
    return (slice(numbers[1] * model.expert_width, (numbers[1] + 1) * model.expert_width),)


_BLOCK = "transformer.blocks.{}"
WEIGHTS = {
    **renamed(
        {
            "embedding": "transformer.wte",
            "layers.{}.attention_norm": f"{_BLOCK}.norm_attn_norm.norm_1",
            "layers.{}.attention.output": f"{_BLOCK}.norm_attn_norm.attn.out_proj",
            "layers.{}.mlp_norm": f"{_BLOCK}.norm_attn_norm.norm_2",
            "layers.{}.mlp.router": f"{_BLOCK}.ffn.router.layer",
            "norm": "transformer.norm_f",
            "head": "lm_head",
        }
    ),
    **{
        f"layers.{{}}.attention.qkv.{letter}.weight": HuggingFaceTensor(
            f"{_BLOCK}.norm_attn_norm.attn.Wqkv.weight", locate=partial(locate_rows, part)
        )
        for part, letter in enumerate("qkv")
    },
    **{
        f"layers.{{}}.mlp.{ours}.weight": HuggingFaceTensor(
            f"{_BLOCK}.ffn.experts.mlp.{theirs}", theirs == "w2", _expert_rows
        )
        for ours, theirs in {"gate_up.{}.gate": "w1", "gate_up.{}.up": "v1", "down.{}": "w2"}.items()
    },
}


class Dbrx(Mixtral):
    """DBRX, or one pipeline stage of it; arguments as for `LanguageModel`."""

    weights = WEIGHTS
