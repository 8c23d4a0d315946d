"""GPT-OSS (arXiv 2508.10925): biased experts, alternating windows, an attention sink per query head.

    p = softmax([scores, sink])        where the sink has no value (parallel/attention/sinks.py)
    expert(x) = down(g · sigmoid(1.702 g) · (u + 1)),   g = min(gate(x), 7),   u = up(x) clipped to ±7

Layers alternate between attention within a sliding window, as in the first, and to all earlier tokens (`Model.window`). Router,
experts and attention have biases. Shapes as in `llama.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

from modeling.models.families import llama, mixtral
from modeling.models.language_model import LayerOptions
from modeling.models.weight_names import HuggingFaceTensor, Index, Locate, renamed
from parallel import Mesh, Normal
from parallel.experts.router import Routing
from parallel.layout import Layout, Section, parameter
from profiles.sections.base import required
from profiles.sections.model import Model


class Attention(llama.Attention):
    def __init__(self, model: Model, mesh: Mesh, layer: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(model, mesh, layer, **options)
        layout = Layout(
            (Section("", (model.num_attention_heads,), 0),), mesh.tensor.size, Normal(model.initializer_range)
        )
        self.sinks = parameter(layout, options["dtype"], options["device"])  # (n/t)


class Block(mixtral.Block):
    attention_layer = Attention
    expert_options: ClassVar[Mapping[str, Any]] = {"bias": True, "activation": "clamped_silu"}

    def routing(self, model: Model) -> Routing:
        return Routing(required(model.num_experts), required(model.num_experts_per_tok), bias=True)


def _interleaved(half: int, dims: int) -> Locate:
    """Every second column of an expert: gate in even columns, up in odd ones."""

    def locate(model: Model, numbers: Sequence[int]) -> Index:
        columns = slice(half, 2 * model.expert_width, 2)
        return (numbers[1], *[slice(None)] * (dims - 1), columns)

    return locate


_GPT_OSS = "model.layers.{}.mlp.experts"
WEIGHTS = {
    **{name: entry for name, entry in llama.WEIGHTS.items() if ".mlp." not in name},
    "layers.{}.attention.sinks": HuggingFaceTensor("model.layers.{}.self_attn.sinks"),
    **renamed({"layers.{}.mlp.router": "model.layers.{}.mlp.router"}, ("weight", "bias")),
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


class GptOss(llama.Llama):
    """GPT-OSS, or one pipeline stage of it; arguments as for `LanguageModel`."""

    block = Block
    weights = WEIGHTS
