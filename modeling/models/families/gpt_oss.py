"""GPT-OSS (arXiv 2508.10925): experts with biases, alternating windows, and a sink for each query head.

    p = softmax([scores, sink])        of which the sink has no value (parallel/attention/sinks.py)
    expert(x) = down(g · sigmoid(1.702 g) · (u + 1)),   g = min(gate(x), 7),   u = up(x) clipped to ±7

The first layer attends within a sliding window, the second to all earlier tokens, and so on (`Model.window`). Router, experts and
attention have biases. Shapes as in `llama.py`.
"""

from __future__ import annotations

from types import MappingProxyType

from modeling.models.families import llama, mixtral
from parallel import Mesh, Normal
from parallel.experts.router import Routing
from parallel.layout import Layout, Section, parameter
from profiles.sections.model import Model


class Attention(llama.Attention):
    def __init__(self, model: Model, mesh: Mesh, layer: int, **options: object) -> None:
        super().__init__(model, mesh, layer, **options)
        layout = Layout(
            (Section("", (model.num_attention_heads,), 0),), mesh.tensor.size, Normal(model.initializer_range)
        )
        self.sinks = parameter(layout, options["dtype"], options["device"])  # (n/t)


class Block(mixtral.Block):
    attention_layer = Attention
    expert_options = MappingProxyType({"bias": True, "activation": "clamped_silu"})

    def routing(self, model: Model) -> Routing:
        return Routing(model.num_experts, model.num_experts_per_tok, bias=True)


class GptOss(llama.Llama):
    """GPT-OSS, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
