"""Read torch.save files lazily (memory-mapped) with restricted unpickling.

Only tensors and containers are unpickled (torch's `weights_only`), and torch_xla's `TensorReference`: in the "xser" form each
tensor is replaced by a reference with a number N, and stored in `<file>.tensors/tensor_N.pt`. torch_xla is not needed. Files in
the format from before torch 1.6 cannot be mapped and are read into memory.
"""

from __future__ import annotations

import errno
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
_SAFE_GLOBALS = threading.Lock()  # the classes that torch.load accepts are global to the process
log = logging.getLogger(__name__)


class TensorReference:
    """torch_xla.utils.serialization.TensorReference."""

    tid: int


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file: its shape, its dtype, and a function that maps it into memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    open: Callable[[], Tensor]

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """Its elements at an index."""
        return self.open()[index]


def read(path: Path, wanted: Callable[[str], object] = bool) -> dict[str, LazyTensor]:
    """Every tensor of a file by name; of a training state, those of its model.

    Args:
        wanted: whether to read a tensor, by name; files to which other tensors refer need not exist.

    Raises:
        ValueError: the file is rejected, is corrupted, or is not a dictionary of tensors.
    """
    content = _model(_load(path))
    if content is None:
        raise ValueError(f"{path}: not a dictionary of tensors")
    found = {}
    for name, value in content.items():
        if not wanted(name):
            continue
        if isinstance(value, TensorReference):
            opened = partial(_referred, path, name, value)
        elif isinstance(value, Tensor):
            opened = partial(_named, path, name)
        else:
            continue  # scalars in a training state
        tensor = opened()
        found[name] = LazyTensor(tuple(tensor.shape), tensor.dtype, opened)
    return found


def read_value(path: Path, name: str) -> Any:
    """A file's entry of this name beside its tensors; None if there is none."""
    return (_model(_load(path)) or {}).get(name)


def _model(content: Any) -> Mapping[str, Any] | None:
    """The dictionary of tensors, which may be nested under "model" or "state_dict", beside other tensors."""
    if not isinstance(content, Mapping):
        return None
    for name in ("model", "state_dict"):
        if nested := _model(content.get(name)):
            return nested
    return content if any(isinstance(value, Tensor | TensorReference) for value in content.values()) else None


def _named(path: Path, name: str) -> Tensor:
    model = _model(_load(path))
    assert model is not None  # the name is one of its keys
    tensor: Tensor = model[name]
    return tensor


def _referred(path: Path, name: str, reference: TensorReference) -> Tensor:
    number = getattr(reference, "tid", None)
    if type(number) is not int or number < 0:
        raise ValueError(f"{path}: rejected: {name} refers to {number!r}, which is not a tensor number")
    tensor = _load(Path(f"{path}.tensors") / f"tensor_{number}.pt")
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path}: {name} refers to tensor_{number}.pt, which is not a tensor")
    return tensor


def stamp(path: Path) -> tuple[int, int, int]:
    """A file's inode, size and modification time in ns, which change with the file."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _load(path: Path) -> Any:
    try:
        return _loaded(path, stamp(path))
    except FileNotFoundError:
        raise ValueError(f"{path}: missing") from None


@lru_cache(maxsize=OPEN_FILES)
def _loaded(path: Path, _: tuple[int, int, int]) -> Any:
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (TensorReference, "torch_xla.utils.serialization.TensorReference")
    ]
    try:
        with _SAFE_GLOBALS, torch.serialization.safe_globals(allowed):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
            form, size = "saved in the format that torch used before 1.6", path.stat().st_size >> 20
            log.info("%s: %s; reading all %d MB into memory", path.name, form, size)
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it would run {found[1]}" if found else "not a plain pickle of tensors"
        raise ValueError(f"{path}: rejected: {reason}; only tensors are read") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        if is_failed_read(path, error):
            raise OSError(f"{path}: cannot be read: {error}") from error
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: corrupted, or not a torch.save file: {reason}") from None


def is_failed_read(path: Path, error: Exception) -> bool:
    """Whether a reader's error was caused by the file system rather than by the file's contents."""
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        return True
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError:
        return True
    return False
