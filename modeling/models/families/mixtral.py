"""Mixtral (arXiv 2401.04088): Llama with a mixture of experts in place of each MLP.

    x = x + attention(norm(x));  x = x + Σ over the token's k experts of weight · expert(norm(x))
    weights = softmax of the k largest of the E router logits;   expert(x) = down(silu(gate(x)) · up(x))

Shapes as in `llama.py`, and e experts over the ranks of the expert axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from modeling.models.families import llama
from parallel import Mesh, Normal
from parallel.experts.layer import MixtureOfExperts
from parallel.experts.router import Routing
from parallel.random import Keys
from profiles.sections.model import Model


class Block(llama.Block):
    expert_options: Mapping[str, object] = MappingProxyType({})  # of `MixtureOfExperts`, in other families

    def build_mlp(self, model: Model, mesh: Mesh, layer: int, **options: object) -> nn.Module:
        del options["products"]  # the experts' are exact
        options |= {"output_initializer": Normal(model.residual_initializer_range), **self.expert_options}
        return MixtureOfExperts(model.hidden_size, model.expert_width, self.routing(model), mesh, **options)

    def routing(self, model: Model) -> Routing:
        """How tokens choose experts."""
        return Routing(model.num_experts, model.num_experts_per_tok, normalize=model.norm_topk_prob)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None = None, keys: Keys | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, documents, keys)
        return x + self.mlp(self.mlp_norm(x), cos.shape[1])  # s/c tokens of a sample


class Mixtral(llama.Llama):
    """Mixtral, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
