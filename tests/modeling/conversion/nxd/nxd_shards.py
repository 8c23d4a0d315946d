"""NxD shards of a Hugging Face model in all forms, by the format's description, without `modeling`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

HEADS, KV_HEADS, D, HIDDEN, FFN, LAYERS, VOCABULARY = 8, 2, 4, 32, 48, 4, 101
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def model(kv_heads: int = KV_HEADS) -> dict[str, Tensor]:
    """Random weights of a Llama under Hugging Face names, so that no two heads are equal."""
    torch.manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape).bfloat16()

    weights = {"model.embed_tokens.weight": weight(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": weight(HEADS * D, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": weight(kv_heads * D, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": weight(kv_heads * D, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * D),
            f"{prefix}.mlp.gate_proj.weight": weight(FFN, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": weight(FFN, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": weight(HIDDEN, FFN),
            f"{prefix}.input_layernorm.weight": weight(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": weight(HIDDEN),
        }
    return weights | {"model.norm.weight": weight(HIDDEN), "lm_head.weight": weight(VOCABULARY, HIDDEN)}


def shards(
    weights: Mapping[str, Tensor],
    tensor: int,
    stages: list[range],
    form: str = "separate",
    layout: str = "trn1",
    kv_heads: int = KV_HEADS,
    multiplier: int | None = None,
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """The tensors of every (tensor rank, pipeline rank)."""
    m = multiplier or max(1, tensor // kv_heads)
    padded = -(-VOCABULARY // tensor) * tensor
    shards = {}
    for stage, layers in enumerate(stages):
        for rank in range(tensor):
            tensors: dict[str, Tensor] = {}
            if 0 in layers:
                tensors["model.embed_tokens.weight"] = _vocabulary(
                    weights["model.embed_tokens.weight"], padded, tensor, rank
                )
            for layer in layers:
                tensors |= _layer(weights, layer, tensor, rank, m, form, layout, kv_heads)
            if LAYERS - 1 in layers:
                tensors["model.norm.weight"] = weights["model.norm.weight"]
                tensors["lm_head.weight"] = _vocabulary(weights["lm_head.weight"], padded, tensor, rank)
            shards[rank, stage] = {name: weight.clone() for name, weight in tensors.items()}
    return shards


def _vocabulary(weight: Tensor, padded: int, tensor: int, rank: int) -> Tensor:
    return torch.nn.functional.pad(weight, (0, 0, 0, padded - len(weight))).chunk(tensor)[rank]


def _layer(
    weights: Mapping[str, Tensor],
    layer: int,
    tensor: int,
    rank: int,
    m: int,
    form: str,
    layout: str,
    kv_heads: int,
) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}"
    take = {name: weights[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkvo"}
    chunks = list(range(tensor))  # index of each rank's chunk of Q heads
    if m > 1 and layout == "trn1":
        chunks = [j * m + i for i in range(m) for j in range(kv_heads)]  # if m is too high, some are lost
    q = take["q"].chunk(len(chunks))[chunks[rank]]
    k, v = (torch.cat([take[name]] * m).chunk(tensor)[rank] for name in "kv")
    o = take["o"].chunk(len(chunks), 1)[chunks[rank]]
    gate, up = (weights[f"{prefix}.mlp.{name}_proj.weight"].chunk(tensor)[rank] for name in ("gate", "up"))
    norms = {
        name: weights[f"{prefix}.{name}.weight"] for name in ("input_layernorm", "post_attention_layernorm")
    }
    down = weights[f"{prefix}.mlp.down_proj.weight"].chunk(tensor, 1)[rank]
    qkv = {
        "separate": {"weight_q": q, "weight_k": k, "weight_v": v},
        "fused": {"weight_qkv": torch.cat((q, k, v))},
        "coalesced": {"weight": torch.cat((q, k, v))},
    }[form]
    return {
        **{f"{prefix}.self_attn.qkv_proj.{name}": value for name, value in qkv.items()},
        f"{prefix}.self_attn.o_proj.weight": o,
        f"{prefix}.mlp.gate_up_proj.weight": torch.cat((gate, up)),
        f"{prefix}.mlp.down_proj.weight": down,
        **{f"{prefix}.{name}.weight": value for name, value in norms.items()},
    }


def with_megatron_names(shard: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A shard under Megatron names."""
    parts = {
        "self_attn.qkv_proj.weight_q": "self_attention.query.weight",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "model.layers": "language_model.encoder.layers",
        "model.embed_tokens": "language_model.embedding.word_embeddings",
        "model.norm": "language_model.encoder.final_layernorm",
        "lm_head": "language_model.output_layer",
    }
    renamed = {}
    for name, tensor in shard.items():
        if name.endswith("weight_k"):
            name, tensor = (
                name.replace("self_attn.qkv_proj.weight_k", "self_attention.key_value.weight"),
                torch.cat((tensor, shard[name[:-1] + "v"])),
            )
        elif name.endswith("weight_v"):
            continue
        for part, megatron_part in parts.items():
            name = name.replace(part, megatron_part)
        renamed[name] = tensor
    return renamed


def save(shards: Mapping[tuple[int, int], Mapping[str, Tensor]], pattern: str, folder: Path) -> Path:
    """Write each rank's shard with torch.save to `pattern`, a format string with t and p."""
    for (t, p), state in shards.items():
        path = folder / pattern.format(t=t, p=p)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(state), path)
    return folder


class Hostile:
    """Creates a file when unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)
