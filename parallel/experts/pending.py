"""Work in progress that one opaque operator leaves for another, found by a tensor that stands for it.

Graphs pass only tensors of static shapes between operators. What is under way, a collective or a copy to the host, or has a shape
that depends on data, stays here.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Pending(Generic[T]):
    """Values by the address of a tensor, which lives as long as its entry: the address is unique."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Tensor, T]] = {}

    def put(self, tensor: Tensor, value: T) -> Tensor:
        """Leave a value for the operator that gets `tensor`, which must have elements; returns the tensor."""
        self._entries[tensor.data_ptr()] = tensor, value
        return tensor

    def take(self, tensor: Tensor) -> T | None:
        """The value, once; None if there is none."""
        return self._entries.pop(tensor.data_ptr(), (tensor, None))[1]
