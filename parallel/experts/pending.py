"""Work in progress that one opaque operator leaves for another, found by a tensor that stands for it.

Graphs pass only tensors of static shapes between operators. What is under way, a collective or a copy to the host, or has a shape
that depends on data, stays here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")
_all: list[Pending[Any]] = []


class Pending(Generic[T]):
    """Values by the address of a tensor, which lives as long as its entry: the address is unique."""

    def __init__(self) -> None:
        self._entries: dict[int, deque[tuple[Tensor, T]]] = {}
        _all.append(self)

    def put(self, tensor: Tensor, value: T) -> Tensor:
        """Leave a value for an operator that gets `tensor`, which must have elements; returns the tensor."""
        self._entries.setdefault(tensor.data_ptr(), deque()).append((tensor, value))
        return tensor

    def take(self, tensor: Tensor) -> T | None:
        """The first value that was left and not taken yet; None if there is none."""
        entries = self._entries.get(tensor.data_ptr())
        if entries is None:
            return None
        _, value = entries.popleft()
        if not entries:
            del self._entries[tensor.data_ptr()]
        return value

    def clear(self) -> None:
        """Drop all values."""
        self._entries.clear()


@contextmanager
def dropped_on_failure() -> Iterator[None]:
    """In this block, an exception drops the work in progress, of which no operator takes the rest."""
    try:
        yield
    except BaseException:
        for pending in _all:
            pending.clear()
        raise
