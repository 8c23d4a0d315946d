"""Tensors in files of torch.save, mapped into memory and unpickled with care.

Nothing but tensors and containers is unpickled (torch's `weights_only`), and one class more: torch_xla writes its "xser" form
with a `TensorReference` of a number N in place of each tensor, which lies in `<file>.tensors/tensor_N.pt`. torch_xla itself is
not needed. A file costs address space, not memory, until its tensors are read; files older than torch 1.6 are read whole.
"""

from __future__ import annotations

import logging
import pickle
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OPEN_FILES = 256
_ONE_AT_A_TIME = threading.Lock()  # which classes torch.load lets through is a setting of the process
log = logging.getLogger("trainshed")


class TensorReference:
    """torch_xla.utils.serialization.TensorReference."""

    tid: int


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, its type, and how to map it into memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    open: Callable[[], Tensor]


def read(path: Path) -> dict[str, Stored]:
    """Every tensor of a file by its name; of a training run's whole state, those of its model.

    Raises:
        ValueError: the file is refused, is damaged, or holds no tensors by name.
    """
    content = _model(_load(path))
    if content is None:
        raise ValueError(f"{path} holds no tensors by name")
    found = {}
    for name, value in content.items():
        if isinstance(value, TensorReference):
            opened = partial(_referred, path, name, value)
        elif isinstance(value, Tensor):
            opened = partial(_named, path, name)
        else:
            continue  # a training run's numbers beside the weights
        tensor = opened()
        found[name] = Stored(tuple(tensor.shape), tensor.dtype, opened)
    return found


def _model(content: Any) -> Mapping[str, Any] | None:
    """The dictionary of names and tensors, which may lie under "model" or "state_dict"."""
    while isinstance(content, Mapping):
        if any(isinstance(value, Tensor | TensorReference) for value in content.values()):
            return content
        content = content.get("model", content.get("state_dict"))
    return None


def _named(path: Path, name: str) -> Tensor:
    return _model(_load(path))[name]


def _referred(path: Path, name: str, reference: TensorReference) -> Tensor:
    number = getattr(reference, "tid", None)
    if type(number) is not int or number < 0:
        raise ValueError(f"{path} is refused: {name} refers to {number!r}, which is no tensor's number")
    tensor = _load(Path(f"{path}.tensors") / f"tensor_{number}.pt")
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path}: {name} refers to tensor_{number}.pt, which holds no tensor")
    return tensor


def stamp(path: Path) -> tuple[int, int, int]:
    """A file's inode, size and modification time in ns: differs once the file has changed."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _load(path: Path) -> Any:
    try:
        return _loaded(path, stamp(path))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None


@lru_cache(maxsize=OPEN_FILES)
def _loaded(path: Path, _: tuple[int, int, int]) -> Any:
    known = [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
    try:
        with _ONE_AT_A_TIME, torch.serialization.safe_globals(known):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
            log.info(
                "%s is in torch's oldest format: its %d MB are read whole",
                path.name,
                path.stat().st_size >> 20,
            )
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it would run {found[1]}" if found else "it is no plain pickle of tensors"
        raise ValueError(f"{path} is refused: {what}, and only tensors are read") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged, or no file of torch.save: {str(error).partition(chr(10))[0]}"
        ) from None
