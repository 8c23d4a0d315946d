"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with a mixture of many narrow experts in place of each MLP.

As `mixtral.py`, with the query and key norms of `qwen3.py`; the weights of a token's experts are those of a softmax over all
experts, optionally divided by their sum. Shapes as in `llama.py`.
"""

from __future__ import annotations

from modeling.models.families import mixtral, qwen3
from modeling.models.families.llama import Llama


class Block(mixtral.Block):
    attention_layer = qwen3.Attention


WEIGHTS = {
    **mixtral.expert_weights("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    **{name: entry for name, entry in qwen3.WEIGHTS.items() if ".qk_norm." in name},
}


class Qwen3Moe(Llama):
    """Qwen3-MoE, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
    weights = WEIGHTS
