"""NxD shards: which part of which weight each rank's file holds, for reading and writing.

The file of a pipeline stage's tensor rank contains tensors by name; each is one or more sections stacked along dim 0 ([q; k;
v], [gate; up]), and a section is this rank's shard of a global weight. Q, K, V, gate, up, embedding and head are split by
rows, the two projections onto the residual stream by columns; norms are replicated. Layers keep their global numbers.

With fewer KV heads than tensor ranks, m = tensor / KV heads ranks hold the same KV head. In the trn1 layout K and V are
repeated as a block ([K0 ... Kn-1] m times), so rank t = i · KV heads + j holds KV head j, and accordingly the Q heads of
chunk j · m + i (of heads / tensor each); the columns of o_proj follow Q. The trn2 layout repeats K and V in the same way but
keeps Q in its natural order, so most ranks hold Q heads of another group: merging such shards is correct, training on them is
not. Both layouts have the same names and shapes, so the files do not show which one they have.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from modeling.conversion.choices import NxDLayout, QKVForm
from modeling.conversion.weights import global_shapes
from parallel.layout import Box
from profiles.sections.model import Model

# for each form of Q, K and V: the names of their tensors, and which of q, k and v each contains
QKV_FORMS: dict[QKVForm, dict[str, str]] = {
    "separate": {"weight_q": "q", "weight_k": "k", "weight_v": "v"},
    "fused": {"weight_qkv": "qkv"},
    "coalesced": {"weight": "qkv"},
}


class Split(Enum):
    """How a weight is split over tensor ranks: along `dim`, or not at all if that is None."""

    def __init__(self, _: str, dim: int | None) -> None:
        self.dim = dim

    Q_HEADS = "q heads", 0
    KV_HEADS = "kv heads", 0
    ROWS = "rows", 0
    VOCABULARY = "vocabulary", 0
    Q_COLUMNS = "q columns", 1  # in the order of the Q heads
    COLUMNS = "columns", 1
    REPLICATED = "replicated", None


@dataclass(frozen=True)
class NxDSection:
    """A part of an NxD tensor: this rank's shard of one of our weights."""

    weight: str  # our name; in the tables below a template with {} for the layer's number
    split: Split  # over tensor ranks


_QKV = {
    letter: NxDSection(f"layers.{{}}.attention.qkv.{letter}.weight", split)
    for letter, split in {"q": Split.Q_HEADS, "k": Split.KV_HEADS, "v": Split.KV_HEADS}.items()
}
_OUTPUT = NxDSection("layers.{}.attention.output.weight", Split.Q_COLUMNS)
_GATE = NxDSection("layers.{}.mlp.gate_up.gate.weight", Split.ROWS)
_UP = NxDSection("layers.{}.mlp.gate_up.up.weight", Split.ROWS)
_DOWN = NxDSection("layers.{}.mlp.down.weight", Split.COLUMNS)
_ATTENTION_NORM = NxDSection("layers.{}.attention_norm.weight", Split.REPLICATED)
_MLP_NORM = NxDSection("layers.{}.mlp_norm.weight", Split.REPLICATED)
_ROUTER = NxDSection("layers.{}.mlp.router.weight", Split.REPLICATED)
_EMBEDDING = NxDSection("embedding.weight", Split.VOCABULARY)
_NORM = NxDSection("norm.weight", Split.REPLICATED)
_HEAD = NxDSection("head.weight", Split.VOCABULARY)

_LAYER = "model.layers.{}"
NAMES: dict[str, tuple[NxDSection, ...]] = {
    "model.embed_tokens.weight": (_EMBEDDING,),
    f"{_LAYER}.input_layernorm.weight": (_ATTENTION_NORM,),
    **{
        f"{_LAYER}.self_attn.qkv_proj.{name}": tuple(_QKV[letter] for letter in letters)
        for form in QKV_FORMS.values()
        for name, letters in form.items()
    },
    **{f"{_LAYER}.self_attn.{letter}_proj.weight": (_QKV[letter],) for letter in "qkv"},
    f"{_LAYER}.self_attn.o_proj.weight": (_OUTPUT,),
    f"{_LAYER}.post_attention_layernorm.weight": (_MLP_NORM,),
    f"{_LAYER}.mlp.gate_up_proj.weight": (_GATE, _UP),
    f"{_LAYER}.mlp.down_proj.weight": (_DOWN,),
    "model.norm.weight": (_NORM,),
    "lm_head.weight": (_HEAD,),
    f"{_LAYER}.mlp.router.linear_router.weight": (_ROUTER,),
}
_BLOCK = "transformer.blocks.{}"
DBRX: dict[str, tuple[NxDSection, ...]] = {
    "transformer.wte.weight": (_EMBEDDING,),
    f"{_BLOCK}.norm_attn_norm.norm_1.weight": (_ATTENTION_NORM,),
    **{
        f"{_BLOCK}.norm_attn_norm.attn.qkv_proj.{name}": tuple(_QKV[letter] for letter in letters)
        for form in QKV_FORMS.values()
        for name, letters in form.items()
    },
    f"{_BLOCK}.norm_attn_norm.attn.o_proj.weight": (_OUTPUT,),
    f"{_BLOCK}.norm_attn_norm.norm_2.weight": (_MLP_NORM,),
    f"{_BLOCK}.ffn.router.linear_router.weight": (_ROUTER,),
    "transformer.norm_f.weight": (_NORM,),
}
_ENCODER = "language_model.encoder.layers.{}"
MEGATRON: dict[str, tuple[NxDSection, ...]] = {
    "language_model.embedding.word_embeddings.weight": (_EMBEDDING,),
    f"{_ENCODER}.input_layernorm.weight": (_ATTENTION_NORM,),
    f"{_ENCODER}.self_attention.query.weight": (_QKV["q"],),
    f"{_ENCODER}.self_attention.key_value.weight": (_QKV["k"], _QKV["v"]),
    f"{_ENCODER}.self_attention.dense.weight": (_OUTPUT,),
    f"{_ENCODER}.post_attention_layernorm.weight": (_MLP_NORM,),
    f"{_ENCODER}.mlp.dense_h_to_4h.weight": (_GATE, _UP),
    f"{_ENCODER}.mlp.dense_4h_to_h.weight": (_DOWN,),
    "language_model.encoder.final_layernorm.weight": (_NORM,),
    "language_model.output_layer.weight": (_HEAD,),
    f"{_ENCODER}.mlp.moe.router.linear_router.weight": (_ROUTER,),
}
_NUMBER = re.compile(r"(?<=\.layers\.|\.blocks\.)\d+(?=\.)")


@dataclass(frozen=True)
class TensorSplit:
    """How NxD splits a model over tensor ranks."""

    model: Model  # the architecture
    tensor: int  # tensor degree
    layout: NxDLayout = "trn1"  # matters only if `tensor` exceeds the number of KV heads
    # rows of the embedding per rank, with padding; None pads to a multiple of the degree
    vocabulary_rows: int | None = None

    @property
    def multiplier(self) -> int:
        """Number of ranks that hold the same KV head: m."""
        return max(1, self.tensor // self.model.num_key_value_heads)

    def sections(self, key: str) -> list[NxDSection]:
        """The sections of the NxD tensor `key` in stacking order. Raises ValueError if it is unknown."""
        layer = _NUMBER.search(key)
        template = _NUMBER.sub("{}", key)
        found = NAMES.get(template) or DBRX.get(template) or MEGATRON.get(template.removeprefix("model."))
        if found is None:
            raise ValueError(f"{key}: not a tensor of an NxD model that is supported")
        number = layer.group() if layer else ""
        return [NxDSection(section.weight.format(number), section.split) for section in found]

    def shape(self, weight: str) -> tuple[int, ...]:
        """The global shape of one of our weights."""
        return self._shapes[weight]

    def boxes(self, key: str, rank: int) -> tuple[tuple[int, ...], list[Box]]:
        """Local shape of tensor `key` on a tensor rank, and the boxes of our weights in it, without padding."""
        row, boxes, local = 0, [], []
        for section in self.sections(key):
            if section.weight not in self._shapes:
                raise ValueError(f"{key}: not a tensor of this model")
            shape = self._shapes[section.weight]
            offsets, sizes, local = [0] * len(shape), list(shape), list(shape)
            dim = section.split.dim
            if dim is not None:
                index, length = self._shard(section.split, shape[dim], rank)
                local[dim] = length
                offsets[dim] = min(index * length, shape[dim])
                sizes[dim] = min(length, shape[dim] - offsets[dim])
            if all(sizes):
                local_offsets = (row, *[0] * (len(shape) - 1))
                replicas = self._replicas(section.split, rank)
                box = section.weight, shape, tuple(offsets), tuple(sizes), local_offsets
                boxes.append(Box(*box, *replicas))
            row += local[0]
        return (row, *local[1:]), boxes

    def _shard(self, split: Split, size: int, rank: int) -> tuple[int, int]:
        """(index of the rank's shard, length of a shard) along a split dim of this size."""
        kv_heads, m = self.model.num_key_value_heads, self.multiplier
        if split is Split.KV_HEADS and m > 1:
            return rank % kv_heads, size // kv_heads
        if split in (Split.Q_HEADS, Split.Q_COLUMNS) and m > 1 and self.layout == "trn1":
            return rank % kv_heads * m + rank // kv_heads, size // self.tensor
        if split is Split.VOCABULARY and self.vocabulary_rows:
            return rank, self.vocabulary_rows
        return rank, math.ceil(size / self.tensor)

    def _replicas(self, split: Split, rank: int) -> tuple[int, int]:
        """(number of ranks with the same shard, index of this rank among them)."""
        if split is Split.REPLICATED:
            return self.tensor, rank
        if split is Split.KV_HEADS and self.multiplier > 1:
            return self.multiplier, rank // self.model.num_key_value_heads
        return 1, 0

    @property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = global_shapes(self.model)
        # NxD stores a tied head as well.
        tied = {"head.weight": shapes["embedding.weight"]} if self.model.tie_word_embeddings else {}
        return {**shapes, **tied}


def stored_name(name: str, keys: Collection[str]) -> str:
    """NxD's name of one of our tensors, in the style of a checkpoint with these keys.

    A section of a tensor has the tensor's name. Our name is returned if NxD has none.
    """
    number = next(iter(re.findall(r"(?<=layers\.)\d+", name)), "")
    weight = re.sub(r"(?<=layers\.)\d+", "{}", name)
    if expert := re.search(r"\.mlp\.(gate_up|down)\.\d+\.", name):
        endings = {"gate_up": ("gate_up_proj", "dense_h_to_4h"), "down": ("down_proj", "dense_4h_to_h")}
        of_experts = (key for key in keys if ".expert_mlps." in key)
        alike = [key for key in of_experts if key.split(".")[-2] in endings[expert[1]]]
        return _NUMBER.sub(number, alike[0]) if alike else name
    templates = {_NUMBER.sub("{}", key).removeprefix("model.") for key in keys}
    tables = sorted(
        (NAMES, DBRX, MEGATRON),
        key=lambda table: -len(templates & {template.removeprefix("model.") for template in table}),
    )
    found = [key for key, sections in tables[0].items() if weight in [section.weight for section in sections]]
    # Of several forms of Q, K and V.
    known = [key for key in found if key.removeprefix("model.") in templates]
    return next(iter([*known, *found]), name).format(number)


def stage_layers(layers: int, stages: int) -> list[range]:
    """NxD's pipeline stages: layers divided evenly, the remainder on the last stages."""
    quotient, remainder = divmod(layers, stages)
    bounds = [stage * quotient + max(0, stage - (stages - remainder)) for stage in range(stages + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


def stage_keys(model: Model, layers: range, form: QKVForm) -> Iterator[str]:
    """The names of the tensors in a stage's file except experts, as NxD's converter writes them."""
    dbrx = model.architecture == "dbrx"
    if 0 in layers:
        yield "transformer.wte.weight" if dbrx else "model.embed_tokens.weight"
    if model.num_hidden_layers - 1 in layers:
        yield "transformer.norm_f.weight" if dbrx else "model.norm.weight"
        yield "lm_head.weight"
    attention = "norm_attn_norm.attn" if dbrx else "self_attn"
    dense = ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
    names = (
        *(f"{attention}.qkv_proj.{name}" for name in QKV_FORMS[form]),
        f"{attention}.o_proj.weight",
        *(dense if model.num_experts is None else (f"{mlp_prefix(model)}.router.linear_router.weight",)),
        *(f"norm_attn_norm.norm_{number}.weight" for number in (1, 2) if dbrx),
        *(f"{name}_layernorm.weight" for name in ("input", "post_attention") if not dbrx),
    )
    for layer in layers:
        yield from (f"{layer_prefix(model, layer)}.{name}" for name in names)


def layer_prefix(model: Model, layer: int) -> str:
    """Prefix of the names of a layer's tensors."""
    return (_BLOCK if model.architecture == "dbrx" else _LAYER).format(layer)


def mlp_prefix(model: Model) -> str:
    """Prefix of the names of an MLP's or of experts' tensors, after the layer's."""
    return "ffn" if model.architecture == "dbrx" else "mlp"
