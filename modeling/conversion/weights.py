"""A model's weights as global tensors in lazily read parts: the common form of conversion sources.

A part is a box of a global tensor and a function that reads from it. A Hugging Face file has one part per tensor, NxD's
shards one per rank, a Trainshed checkpoint one per stored box. Names and shapes are those declared by the model's layers.
Reading a slice takes the memory of the slice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from modeling.models.families import model_class
from modeling.models.weight_names import FLOAT32
from parallel import Mesh
from parallel.layout import layout_of
from profiles.sections.model import Model

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name
TYPES = (torch.float32, torch.bfloat16, torch.float16)
EMBEDDING, HEAD = "embedding.weight", "head.weight"  # our names; a tied model has no head
COMPARED = 64 << 20  # bytes compared at a time
# Settings with which weights of the same shapes belong to another model: a difference is an error.
STRUCTURE = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "tie_word_embeddings", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
# Other settings that cannot be inferred from weights. A run may change them, for example for a longer context: a warning.
NOT_IN_WEIGHTS = (
    *("hidden_act", "norm_eps", "rope_theta", "rope_scaling", "sliding_window", "full_attention_every"),
    *("max_window_layers", "no_rope_layer_interval", "partial_rotary_factor", "embedding_multiplier"),
    *("attention_multiplier", "residual_multiplier", "logits_scaling", "query_pre_attn_scalar"),
    *("rope_local_base_freq", "use_parallel_residual", "attn_logit_softcapping", "final_logit_softcapping"),
    *("clip_qkv", "num_experts_per_tok", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor"),
    "linear_allow_neg_eigval",
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A box of a global tensor and how to read it."""

    # offsets, sizes: the box, in global coordinates
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype  # as stored
    # returns its elements at an index of slices with start and stop, in the box's coordinates: read-only, with any strides
    read: Callable[[tuple[slice, ...]], Tensor]
    stored_name: str = ""  # the tensor's name in its file; "" if unknown


class Weights:
    """The weights of a model; every element is in exactly one part.

    Args:
        model: the architecture.
        parts: parts of every global tensor, by our name; of a tied model perhaps also of the head, or of it alone.
        dtype: dtype to read tensors as; None: as stored.
        stored_name: the source's name of one of our tensors, for errors.

    Attributes:
        shapes: shape of every global tensor, by name.

    Raises:
        ValueError: a tensor, named in the message, is missing, incomplete, duplicated, unknown or has a wrong dtype, or a
            tied head differs from the embedding.
    """

    def __init__(
        self,
        model: Model,
        parts: dict[str, list[Part]],
        dtype: torch.dtype | None = None,
        stored_name: Callable[[str], str] = str,
    ) -> None:
        self.model, self.parts, self.dtype = model, parts, dtype
        self.shapes = global_shapes(model)
        if HEAD in parts and HEAD not in self.shapes:
            self._tie(stored_name)
        unknown = sorted(self.parts.keys() - self.shapes.keys())
        if unknown:
            raise ValueError(
                f"tensors that the model does not have: {summarize(unknown)}; check that the config belongs to these weights"
            )
        missing = [name for name in self.shapes if not self.parts.get(name)]
        if missing:
            remedy = "check that the config belongs to these weights"
            if missing == [HEAD]:
                remedy = (
                    "set tie_word_embeddings to true in the config if the model uses its embedding instead"
                )
            if missing == [name for name in missing if name not in global_shapes(without_modules(model))]:
                remedy = "without multi-token prediction, set num_nextn_predict_layers to 0"
            names = [*dict.fromkeys(map(stored_name, missing))]
            raise ValueError(f"tensors of the model are missing: {summarize(names)}; {remedy}")
        for name, shape in self.shapes.items():
            _check(self.parts[name][0].stored_name or stored_name(name), shape, self.parts[name])

    def _tie(self, stored_name: Callable[[str], str]) -> None:
        """Drop a tied head, which must equal the embedding, or use it as the embedding if there is none."""
        head, shape = self.parts[HEAD], self.shapes[EMBEDDING]
        name, other = head[0].stored_name or stored_name(HEAD), stored_name(EMBEDDING)
        _check(name, shape, head)
        embedding = self.parts.setdefault(EMBEDDING, head)
        if embedding is not head:
            _check(other, shape, embedding)
            for box in slices((0, 0), shape, 4, COMPARED):
                if not torch.equal(
                    self.read(EMBEDDING, *box), self.read(HEAD, *box).to(self.dtype_of(EMBEDDING))
                ):
                    reason = f"differs from {other}, to which the config ties it (tie_word_embeddings)"
                    raise ValueError(
                        f"{name}: {reason}; set it to false in the config, or use that model's weights"
                    )
        del self.parts[HEAD]

    def without_modules(self) -> Weights:
        model = without_modules(self.model)
        kept = {name: self.parts[name] for name in global_shapes(model)}
        return Weights(model, kept, self.dtype)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which `read` returns a tensor."""
        if name.endswith(FLOAT32):
            return torch.float32
        return self.dtype or self.parts[name][0].dtype

    def nbytes(self) -> int:
        """Bytes of all tensors as read."""
        return sum(math.prod(shape) * self.dtype_of(name).itemsize for name, shape in self.shapes.items())

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A box of a global tensor, of shape `sizes`; read-only, since it may be a view of the file."""
        overlaps = []
        for part in self.parts[name]:
            low = [max(a, b) for a, b in zip(offsets, part.offsets, strict=True)]
            starts_and_sizes = zip(offsets, sizes, part.offsets, part.sizes, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in starts_and_sizes]
            if all(a < b for a, b in zip(low, high, strict=True)):
                overlaps.append((part, low, high))
        if len(overlaps) == 1:
            return _slice_part(*overlaps[0]).to(self.dtype_of(name))
        tensor = torch.empty(sizes, dtype=self.dtype_of(name))
        for part, low, high in overlaps:
            index = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
            tensor[index] = _slice_part(part, low, high)
        return tensor

    def blocks(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Tensor]:
        """A box as consecutive blocks of rows, cut where parts begin; a block of a single part is not copied."""
        low, high = offsets[0], offsets[0] + sizes[0]
        parts = self.parts[name]
        edges = {edge for part in parts for edge in (part.offsets[0], part.offsets[0] + part.sizes[0])}
        cuts = sorted({low, high, *(edge for edge in edges if low < edge < high)})
        for start, stop in pairwise(cuts):
            yield self.read(name, (start, *offsets[1:]), (stop - start, *sizes[1:]))


class AveragedWeights(Weights):
    """Model merging: the mean of several checkpoints of a model, computed in float32 slice by slice.

    Args:
        dtype: dtype to read tensors as; None: as stored in the first checkpoint.

    Raises:
        ValueError: the checkpoints belong to different models.
    """

    def __init__(self, members: Sequence[Weights], dtype: torch.dtype | None = None) -> None:
        first, *others = members
        for number, other in enumerate(others, 2):
            compared = first.model, other.model, "in the first", f"in checkpoint {number}"
            if rejected := structural_differences(*compared, first.shapes, other.shapes):
                raise ValueError(f"checkpoints to average belong to different models: {rejected}")
            for difference in differences(NOT_IN_WEIGHTS, *compared):
                log.warning("checkpoints to average: %s; the first's is written", difference)
        super().__init__(first.model, first.parts, dtype)
        self.members = members

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        total = torch.zeros(sizes)
        for member in self.members:
            total += member.read(name, offsets, sizes)
        return (total / len(self.members)).to(self.dtype_of(name))


def differences(names: Sequence[str], one: Model, other: Model, here: str, there: str) -> list[str]:
    """A clause for each of these settings that differs.

    Args:
        here, there: where the settings of `one` and `other` are, for the clauses.
    """
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    unequal = [pair for pair in pairs if pair[1] != pair[2]]
    return [f"model.{name} is {ours} {here}, {theirs} {there}" for name, ours, theirs in unequal]


def structural_differences(
    one: Model, other: Model, here: str, there: str, shapes: Shapes, other_shapes: Shapes
) -> str:
    """Clauses for differences by which weights belong to another model; empty if there are none."""
    found = differences(STRUCTURE, one, other, here, there)
    if tensors := differing_tensors(shapes, other_shapes):
        found.append(f"{summarize(tensors)} differ")
    return "; ".join(found)


def differing_tensors(one: Shapes, other: Shapes) -> list[str]:
    """Names of tensors whose shapes differ, or that only one has."""
    return [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]


def _slice_part(part: Part, low: list[int], high: list[int]) -> Tensor:
    """Elements [low, high) of a part, in global coordinates."""
    return part.read(tuple(slice(a - o, b - o) for a, b, o in zip(low, high, part.offsets, strict=True)))


def _check(name: str, shape: tuple[int, ...], parts: list[Part]) -> None:
    for part in parts:
        if len(part.sizes) != len(shape) or any(
            o + s > n for o, s, n in zip(part.offsets, part.sizes, shape, strict=True)
        ):
            raise ValueError(f"{name}: shape {part.sizes}, the model has {shape}")
        if part.dtype not in TYPES or part.dtype != parts[0].dtype:
            kinds = sorted({str(each.dtype).removeprefix("torch.") for each in parts})
            raise ValueError(f"{name}: dtype {' and '.join(kinds)}; weights are float32, bfloat16 or float16")
    if len({part.offsets for part in parts}) != len(parts):
        raise ValueError(f"{name}: duplicate tensor")
    found, needed = sum(math.prod(part.sizes) for part in parts), math.prod(shape)
    if found != needed:
        raise ValueError(f"{name}: {found:,} of the {needed:,} elements of shape {shape}")


@lru_cache(maxsize=4)
def global_shapes(model: Model) -> Shapes:
    """The unpadded shape of every global tensor of a model by name, in the order of its layers."""
    built = model_class(model.architecture)(model, Mesh(rank=0), device=torch.device("meta"))
    return {
        box.name: box.shape
        for name, parameter in built.named_parameters()
        for box in layout_of(parameter).boxes(name, 0)
    }


def without_modules(model: Model) -> Model:
    """The model without modules for multi-token prediction."""
    return model.model_copy(update={"num_nextn_predict_layers": None})


def slices(
    offsets: tuple[int, ...], sizes: tuple[int, ...], itemsize: int, limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box along dim 0 into (offsets, sizes) of at most `limit` bytes, but at least one row."""
    rows = max(1, limit // (math.prod(sizes[1:]) * itemsize))
    for start in range(0, sizes[0], rows):
        yield (offsets[0] + start, *offsets[1:]), (min(rows, sizes[0] - start), *sizes[1:])


def summarize(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
