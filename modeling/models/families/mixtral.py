"""Mixtral (arXiv 2401.04088) and Qwen3-MoE: Llama with a mixture of experts in place of each MLP.

    x = x + attention(norm(x));  x = x + Σ over the token's k experts of weight · expert(norm(x))
    weights = softmax of the k largest of the E router logits;   expert(x) = down(silu(gate(x)) · up(x))

The weights of Qwen3-MoE (arXiv 2505.09388) are those of a softmax over all experts, optionally divided by their sum.
Shapes as in `llama.py`, and e experts over the ranks of the expert axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from modeling.models.families import llama
from modeling.models.language_model import LayerOptions
from modeling.models.weight_names import HuggingFaceTensor, renamed
from parallel import Mesh, Normal
from parallel.experts.layer import MixtureOfExperts
from parallel.experts.router import Routing
from parallel.random import Keys
from profiles.sections.base import required
from profiles.sections.model import Model


class ExpertSublayers(llama.Sublayers):
    """What a block with experts consists of."""

    expert_options: ClassVar[Mapping[str, Any]] = {}  # further arguments of `MixtureOfExperts`
    mlp: Any  # `MixtureOfExperts`, or an MLP in layers without experts

    def build_mlp(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> nn.Module:
        # All of them, also those that a package's family adds; a family's own come last.
        given: dict[str, Any] = {name: value for name, value in options.items() if name != "products"}
        given |= {"output_initializer": Normal(model.residual_initializer_range), **self.expert_options}
        return MixtureOfExperts(model.hidden_size, model.expert_width, self.routing(model), mesh, **given)

    def routing(self, model: Model) -> Routing:
        """How tokens choose experts."""
        experts, chosen = required(model.num_experts), required(model.num_experts_per_tok)
        return Routing(experts, chosen, normalize=model.norm_topk_prob)

    def feed_forward(self, x: Tensor, length: int, keys: Keys | None, padding: Tensor | None) -> Tensor:
        return self.sublayer("mlp", x, length, padding)


class Block(ExpertSublayers, llama.Block):
    """Llama's block with experts."""


def expert_weights(router: str, experts: str, gate: str, up: str, down: str) -> dict[str, HuggingFaceTensor]:
    """Llama's weights with experts instead of the MLP, one tensor for each projection of an expert."""
    return {
        **{name: entry for name, entry in llama.WEIGHTS.items() if ".mlp." not in name},
        **renamed(
            {
                "layers.{}.mlp.router": f"model.layers.{{}}.{router}",
                "layers.{}.mlp.gate_up.{}.gate": f"model.layers.{{}}.{experts}.{{}}.{gate}",
                "layers.{}.mlp.gate_up.{}.up": f"model.layers.{{}}.{experts}.{{}}.{up}",
                "layers.{}.mlp.down.{}": f"model.layers.{{}}.{experts}.{{}}.{down}",
            }
        ),
    }


def shared_weights(experts: str) -> dict[str, HuggingFaceTensor]:
    """Weights of the experts that all tokens share, by transformers' name of their module."""
    names = {"gate_up.gate": "gate_proj", "gate_up.up": "up_proj", "down": "down_proj"}
    stored = f"model.layers.{{}}.{experts}"
    return renamed({f"layers.{{}}.shared.{ours}": f"{stored}.{theirs}" for ours, theirs in names.items()})


class Mixtral(llama.Llama):
    """Mixtral, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
    weights = expert_weights("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")


class Qwen3Moe(Mixtral):
    """Qwen3-MoE, or one pipeline stage of it; arguments as for `LanguageModel`."""

    weights = expert_weights("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
