"""Forms of a map from our weights to the Hugging Face tensors that hold them; families/ has the maps.

Most tensors only differ in name. Others are parts of a larger one: GPT-2 has q, k and v side by side, DBRX one below the other,
GPT-NeoX and Qwen3-Next those of each head, and both DBRX and GPT-OSS all experts in one tensor. Some are stored as (in, out)
where ours are (out, in).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from profiles.sections.model import Model

Index = tuple[int | slice, ...]
Locate = Callable[[Model, Sequence[int]], Index]
"""Where a tensor lies in a larger one, from the model and the numbers in our tensor's name: of its layer, and of its expert."""


@dataclass(frozen=True)
class HuggingFaceTensor:
    """The tensor of a Hugging Face model that holds one of ours, complete or as a part."""

    name: str  # of the Hugging Face tensor
    transposed: bool = False  # whether it is stored as (in, out)
    locate: Locate | None = None
    index: Index = ()  # of our tensor, if it is a part; slices have a start and a stop, or neither
    # number of equal groups of rows, for example of a head each, in each of which `index` locates a part of ours; None: one
    groups: Callable[[Model], int] | None = None
    group_count: int = 1
    rename: Callable[[Model, Sequence[int]], str] | None = None  # names that differ between layers

    def read(self, stored: Tensor) -> Tensor:
        """Our tensor as a view of the stored one; of one in groups, a copy."""
        if self.group_count > 1:
            rows, *columns = self.index
            return stored.unflatten(0, (self.group_count, -1))[(slice(None), rows, *columns)].flatten(0, 1)
        tensor = stored[self.index] if self.index else stored
        return tensor.t() if self.transposed else tensor

    def write(self, tensor: Tensor) -> Tensor:
        """Our tensor in the stored orientation."""
        return tensor.t() if self.transposed else tensor

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Smallest shape of a stored tensor that contains our tensor, of this shape."""
        remaining = [*shape][::-1] if self.transposed else [*shape]
        sizes = []
        for at in self.index:
            if isinstance(at, int):
                sizes.append(at + 1)
            else:
                size = remaining.pop(0)
                sizes.append(size if at.stop is None else at.stop)
        if self.group_count > 1:
            sizes[0] *= self.group_count
        return (*sizes, *remaining)

    def rows_in(self, stored: int, count: int) -> range | list[int]:
        """The rows of the stored tensor, of this many, that hold our tensor's, of which there are `count`."""
        at = self.index[0] if self.index else slice(None)
        if not isinstance(at, slice):
            raise TypeError(f"{self.name}: one row holds all of our tensor")
        first = at.start or 0
        if self.group_count == 1:
            return range(first, first + count)
        width, own = stored // self.group_count, count // self.group_count
        return [group * width + first + row for group in range(self.group_count) for row in range(own)]


def renamed(
    modules: Mapping[str, str], kinds: Sequence[str] = ("weight",), transposed: bool = False
) -> dict[str, HuggingFaceTensor]:
    """Weights of these kinds, by our name, of modules that only have other names there."""
    return {
        f"{ours}.{kind}": HuggingFaceTensor(f"{theirs}.{kind}", transposed)
        for ours, theirs in modules.items()
        for kind in kinds
    }


def locate_rows(part: int, model: Model, numbers: Sequence[int]) -> Index:
    """Where q, k or v lies in one matrix of them all."""
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    ends = (0, q, q + kv, q + 2 * kv)
    return (slice(ends[part], ends[part + 1]),)


FLOAT32 = (".router.selection_bias",)  # suffixes of the tensors that are float32 in any precision
