"""NxD's shards: which piece of which weight lies in which rank's file, for reading and for writing.

A file belongs to a tensor rank of a pipeline stage and holds its tensors by name; a tensor is pieces of one or more global
weights stacked along dim 0 ([q; k; v], [gate; up]). Rows are split for Q, K, V, gate, up, embedding and head, columns
for the two projections onto the residual stream; norms are whole everywhere. Layers keep their global numbers.

With fewer KV heads than tensor ranks, m = tensor / KV heads ranks hold the same KV head. In the trn1 layout K and V are
repeated as a whole ([K0 ... Kn-1] m times), so rank t = i · KV heads + j holds KV head j, and to meet it the Q heads of chunk
j · m + i (of heads / tensor each); the columns of o_proj follow Q. The trn2 layout repeats K and V in the same way but leaves
Q in its natural order, so that most ranks hold Q heads of another group: merged it is right, as it lies it is not. Names and
shapes are equal in both, so files cannot say which one they are.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from modeling.conversion.weights import shapes
from parallel.layout import Box
from profiles.model import Model

Layout = Literal["trn1", "trn2"]
Form = Literal["separate", "fused", "coalesced"]
LAYOUTS = ("trn1", "trn2")
# Of Q, K and V: the tensors' names, and our weights in each.
FORMS: dict[str, dict[str, str]] = {
    "separate": {"weight_q": "q", "weight_k": "k", "weight_v": "v"},
    "fused": {"weight_qkv": "qkv"},
    "coalesced": {"weight": "qkv"},
}

# How a weight is split.
_Q, _KV, _ROWS, _VOCABULARY = "heads of Q", "heads of K and V", "rows", "rows of the vocabulary"
_Q_COLUMNS, _COLUMNS, _WHOLE = "columns, as Q", "columns", "whole"
_HEADS = {letter: (f"layers.{{}}.attention.qkv.{letter}", _Q if letter == "q" else _KV) for letter in "qkv"}
_OUTPUT, _DOWN = ("layers.{}.attention.output", _Q_COLUMNS), ("layers.{}.mlp.down", _COLUMNS)
_GATE, _UP = ("layers.{}.mlp.gate_up.gate", _ROWS), ("layers.{}.mlp.gate_up.up", _ROWS)
_NORMS = ("layers.{}.attention_norm", _WHOLE), ("layers.{}.mlp_norm", _WHOLE)
_EMBEDDING, _NORM, _HEAD = ("embedding", _VOCABULARY), ("norm", _WHOLE), ("head", _VOCABULARY)

_LAYER = "model.layers.{}"
NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "model.embed_tokens.weight": (_EMBEDDING,),
    f"{_LAYER}.input_layernorm.weight": (_NORMS[0],),
    **{
        f"{_LAYER}.self_attn.qkv_proj.{name}": tuple(_HEADS[letter] for letter in letters)
        for form in FORMS.values()
        for name, letters in form.items()
    },
    **{f"{_LAYER}.self_attn.{letter}_proj.weight": (_HEADS[letter],) for letter in "qkv"},
    f"{_LAYER}.self_attn.o_proj.weight": (_OUTPUT,),
    f"{_LAYER}.post_attention_layernorm.weight": (_NORMS[1],),
    f"{_LAYER}.mlp.gate_up_proj.weight": (_GATE, _UP),
    f"{_LAYER}.mlp.down_proj.weight": (_DOWN,),
    "model.norm.weight": (_NORM,),
    "lm_head.weight": (_HEAD,),
}
_ENCODER = "language_model.encoder.layers.{}"
MEGATRON: dict[str, tuple[tuple[str, str], ...]] = {
    "language_model.embedding.word_embeddings.weight": (_EMBEDDING,),
    f"{_ENCODER}.input_layernorm.weight": (_NORMS[0],),
    f"{_ENCODER}.self_attention.query.weight": (_HEADS["q"],),
    f"{_ENCODER}.self_attention.key_value.weight": (_HEADS["k"], _HEADS["v"]),
    f"{_ENCODER}.self_attention.dense.weight": (_OUTPUT,),
    f"{_ENCODER}.post_attention_layernorm.weight": (_NORMS[1],),
    f"{_ENCODER}.mlp.dense_h_to_4h.weight": (_GATE, _UP),
    f"{_ENCODER}.mlp.dense_4h_to_h.weight": (_DOWN,),
    "language_model.encoder.final_layernorm.weight": (_NORM,),
    "language_model.output_layer.weight": (_HEAD,),
}
_NUMBER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class Split:
    """How NxD spreads a model over tensor ranks.

    Args:
        model: a Llama; NxD has no names for biases.
        tensor: degree.
        layout: matters where tensor is more than the KV heads.
        vocabulary_rows: of the embedding on each rank, padding included; None where only what does not divide is padded.
    """

    model: Model
    tensor: int
    layout: Layout = "trn1"
    vocabulary_rows: int | None = None

    @property
    def multiplier(self) -> int:
        """How many ranks hold the same KV head: m."""
        return max(1, self.tensor // self.model.num_key_value_heads)

    def sections(self, key: str) -> list[tuple[str, str]]:
        """Our weights that a tensor of this name is stacked of, and how each is split.

        Raises:
            ValueError: NxD has no tensor of this name.
        """
        layer = _NUMBER.search(key)
        template = _NUMBER.sub("{}", key)
        found = NAMES.get(template) or MEGATRON.get(template.removeprefix("model."))
        if found is None:
            raise ValueError(f"{key} is not a tensor of NxD's Llama")
        number = layer.group() if layer else ""
        return [(f"{name.format(number)}.weight", split) for name, split in found]

    def boxes(self, key: str, rank: int) -> tuple[tuple[int, ...], list[Box]]:
        """Shape of a tensor in a rank's file, and the boxes of global weights in it; padding has none."""
        row, boxes, local = 0, [], []
        for name, split in self.sections(key):
            if name not in self._shapes:
                raise ValueError(f"{key} is not a tensor of this model")
            shape = self._shapes[name]
            offsets, sizes, local = [0] * len(shape), list(shape), list(shape)
            replicas, replica = (self.tensor, rank) if split == _WHOLE else (1, 0)
            if split != _WHOLE:
                dim = 1 if split in (_COLUMNS, _Q_COLUMNS) else 0
                index, piece = self._place(split, shape[dim], rank)
                local[dim] = piece
                offsets[dim] = min(index * piece, shape[dim])
                sizes[dim] = min(piece, shape[dim] - offsets[dim])
            if split == _KV and self.multiplier > 1:
                replicas, replica = self.multiplier, rank // self.model.num_key_value_heads
            if all(sizes):
                at = (row, *[0] * (len(shape) - 1))
                boxes.append(Box(name, shape, tuple(offsets), tuple(sizes), at, replicas, replica))
            row += local[0]
        return (row, *local[1:]), boxes

    def _place(self, split: str, size: int, rank: int) -> tuple[int, int]:
        """Which piece a rank holds, and how long each is."""
        kv_heads, m = self.model.num_key_value_heads, self.multiplier
        if split == _KV and m > 1:
            return rank % kv_heads, size // kv_heads
        if split in (_Q, _Q_COLUMNS) and m > 1 and self.layout == "trn1":
            return rank % kv_heads * m + rank // kv_heads, size // self.tensor
        if split == _VOCABULARY and self.vocabulary_rows:
            return rank, self.vocabulary_rows
        return rank, math.ceil(size / self.tensor)

    @property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        known = shapes(self.model)
        # A tied head is there under its own name too.
        return known | {"head.weight": known["embedding.weight"]} if self.model.tie_word_embeddings else known


def stage_layers(layers: int, stages: int) -> list[range]:
    """NxD's pipeline stages: layers divided evenly, the remainder on the last ones."""
    each, more = divmod(layers, stages)
    bounds = [stage * each + max(0, stage - (stages - more)) for stage in range(stages + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


def keys(model: Model, layers: range, form: Form) -> Iterator[str]:
    """The names in the file of a stage, as the converter of NxD writes them."""
    last = model.num_hidden_layers - 1
    if 0 in layers:
        yield "model.embed_tokens.weight"
    if last in layers:
        yield "model.norm.weight"
        yield "lm_head.weight"
    heads = [f"self_attn.qkv_proj.{name}" for name in FORMS[form]]
    rest = (
        "self_attn.o_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    )
    for layer in layers:
        yield from (f"model.layers.{layer}.{name}" for name in (*heads, *(f"{name}.weight" for name in rest)))
