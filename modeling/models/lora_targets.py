"""The layers that LoRA can update, and the parts of them that the targets of `lora` select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from profiles.sections.model import Model
from profiles.sections.objective import LORA_PROJECTIONS


class Layer(NamedTuple):
    """A linear layer of a block, or a projection of all its experts."""

    target: str  # target that selects the complete layer
    path: str  # in the block
    inputs: int
    outputs: Mapping[str, int]  # of each section of its weight; a single one has no name
    experts: int | None = None  # number of experts, each with these sections

    def groups(self, targets: Sequence[str]) -> list[tuple[str, ...]]:
        """Groups of sections that share a first factor; empty if no part of the layer is a target."""
        if self.target in targets:
            return [tuple(self.outputs)]
        parts = LORA_PROJECTIONS[self.target][-len(self.outputs) :]  # an MLP without gate has only up_proj
        return [(section,) for part, section in zip(parts, self.outputs, strict=True) if part in targets]

    def update_size(self, targets: Sequence[str]) -> int:
        """Parameters of the update, of one expert, at rank 1; the forward multiply-adds per token too."""
        groups = self.groups(targets)
        return sum(self.inputs + sum(self.outputs[section] for section in group) for group in groups)


def layers_of(model: Model, number: int) -> list[Layer]:
    """The layers of block `number` that can have updates."""
    h, f, heads, d = model.hidden_size, model.intermediate_size, model.num_attention_heads, model.head_dim
    layers = [Layer("output", "attention.output", heads * (model.v_head_dim or d), {"": h})]
    if model.kv_lora_rank is None:
        kv = model.num_key_value_heads * d
        layers.insert(0, Layer("qkv", "attention.qkv", h, {"q": heads * d, "k": kv, "v": kv}))
    if model.family.mlp_matrices == 2:
        return [*layers, Layer("gate_up", "mlp.up", h, {"": f}), Layer("down", "mlp.down", f, {"": h})]

    def mlp(path: str, width: int, experts: int | None = None) -> list[Layer]:
        gate_up = Layer("gate_up", f"{path}.gate_up", h, {"gate": width, "up": width}, experts)
        return [gate_up, Layer("down", f"{path}.down", width, {"": h}, experts)]

    if not model.has_experts(number):
        return [*layers, *mlp("mlp", f)]
    layers += mlp("mlp", model.expert_width, model.num_experts)
    if model.n_shared_experts:
        layers += mlp("shared", model.n_shared_experts * model.expert_width)
    return layers
