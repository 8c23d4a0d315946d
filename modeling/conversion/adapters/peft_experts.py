"""LoRA of experts in PEFT's format, where all experts of a layer share one pair of factors.

In transformers' models, a projection of all experts is one parameter of three dims, which PEFT updates by its name (the key
`target_parameters` of its configuration). For e experts and rank r:

    lora_A    (e·r, i)    the experts' A, stacked
    lora_B    (o, r·e)    the first columns of all experts' B, then their second columns, and so on

If both parameters of the module `experts` are updated, PEFT wraps `gate_up_proj` first, and its tensors are in `base_layer`. The
outputs of `gate_up_proj` are [gate, up]; in GPT-OSS they alternate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from modeling.conversion.adapters.adapters import Factors
from profiles.sections.base import required
from profiles.sections.model import Model
from profiles.sections.objective import LORA_LAYERS

EXPERT = re.compile(r"layers\.(\d+)\.mlp\.(gate_up|down)\.(\d+)(?:\.(gate|up))?\.weight")
PARAMETERS = {"gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"}  # name suffixes
ARCHITECTURES = ("mixtral", "qwen3_moe", "gpt_oss")


def missing_format(model: Model, targets: Sequence[str]) -> str | None:
    """Why PEFT cannot load updates of these layers; None if it can."""
    if not model.num_experts or model.architecture in ARCHITECTURES:
        return None
    if not {"gate_up", "down"} & {LORA_LAYERS[target] for target in targets}:
        return None
    if model.architecture == "dbrx":
        return "PEFT has one update for all experts of dbrx, whose weights are one matrix"
    return (
        "PEFT treats every gate_proj, up_proj and down_proj as a projection of experts, shared ones included"
    )


def stacked(model: Model, factors: Sequence[Factors]) -> tuple[dict[str, Tensor], list[str]]:
    """PEFT's tensors of expert updates, by name after "base_model.model.", and `target_parameters`.

    Raises:
        ValueError: PEFT has no format for them.
    """
    if factors and (reason := missing_format(model, ["gate_up"])):
        raise ValueError(f"{factors[0].tensor}: {reason}; merge the updates into the model's weights")
    found: dict[tuple[int, str], dict[tuple[int, str], Factors]] = {}
    for each in factors:
        match = EXPERT.fullmatch(each.tensor)
        assert match is not None
        layer, projection, expert, half = match.groups()
        found.setdefault((int(layer), projection), {})[int(expert), half or ""] = each
    both = {projection for _, projection in found} == {*PARAMETERS}
    tensors = {}
    for (layer, projection), parts in found.items():
        halves = ["gate", "up"] if projection == "gate_up" else [""]
        experts = range(required(model.num_experts))
        if absent := [key for key in ((e, half) for e in experts for half in halves) if key not in parts]:
            raise ValueError(f"layers.{layer}.mlp.{projection}: expert {absent[0][0]} has no update")
        first = [parts[expert, halves[0]].a for expert in experts]
        if any(not torch.equal(parts[expert, halves[-1]].a, a) for expert, a in enumerate(first)):
            raise ValueError(f"layers.{layer}.mlp.gate_up: gate and up do not share their first factor")
        second = [_join(model, [parts[expert, half].b for half in halves]) for expert in experts]
        prefix = _prefix(layer, inner=both and projection == "gate_up")
        tensors[f"{prefix}.lora_A.weight"] = torch.cat(first)
        tensors[f"{prefix}.lora_B.weight"] = torch.stack(second, -1).flatten(1)  # (o, r, e) -> (o, r·e)
    return tensors, sorted({PARAMETERS[projection] for _, projection in found})


def unstacked(
    model: Model, tensors: Mapping[str, Tensor], rank: int, parameters: Sequence[str]
) -> Iterator[tuple[str, Tensor, Tensor, list[str]]]:
    """Inverse of `stacked`: our name of each weight, its A and B, and the names of their tensors.

    Args:
        tensors: the adapter's tensors, named as by `stacked`.
        parameters: `target_parameters` of its configuration.
    """
    named = {name.rpartition(".")[2] for name in parameters}
    present = [name for name, end in PARAMETERS.items() if end.rpartition(".")[2] in named]
    for layer in range(model.num_hidden_layers):
        for projection in present:
            prefix = _prefix(layer, inner=len(present) == 2 and projection == "gate_up")
            names = [f"{prefix}.lora_{letter}.weight" for letter in "AB"]
            if names[0] not in tensors:
                continue
            first, second = (tensors[name].float() for name in names)
            first = first.unflatten(0, (-1, rank))  # (e, r, i)
            second = second.unflatten(1, (rank, -1)).permute(2, 0, 1)  # (e, o, r)
            for expert, (a, b) in enumerate(zip(first, second, strict=True)):
                start = f"layers.{layer}.mlp.{projection}.{expert}"
                if projection == "down":
                    yield f"{start}.weight", a, b, names
                    continue
                for half, rows in zip(("gate", "up"), _split(model, b), strict=True):
                    yield f"{start}.{half}.weight", a, rows, names


def _prefix(layer: int, inner: bool) -> str:
    return f"model.layers.{layer}.mlp.experts" + (".base_layer" if inner else "")


def _join(model: Model, halves: Sequence[Tensor]) -> Tensor:
    """Rows of gate and up in the order of the parameter."""
    if len(halves) == 2 and model.architecture == "gpt_oss":
        return torch.stack([*halves], 1).flatten(0, 1)
    return torch.cat([*halves])


def _split(model: Model, rows: Tensor) -> Sequence[Tensor]:
    """Rows of gate and of up; the inverse of `_join`."""
    return (rows[::2], rows[1::2]) if model.architecture == "gpt_oss" else rows.chunk(2)
