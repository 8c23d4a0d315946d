"""Loads and calls user functions: losses and metrics named in a profile as `module:function`.

Both are functions of the logits and targets of a microbatch:

    def function(logits: Tensor, targets: Tensor) -> Tensor

    logits   (tokens, vocabulary), float32; differentiable for a loss
    targets  (tokens), int64: the next token of each position; -100 is ignored
    returns  0-dim tensor, the SUM over tokens that are not ignored

It returns a sum because tokens are spread over microbatches and ranks: Trainshed adds the sums and divides. `train.loss`
replaces the cross-entropy in training and in validation_loss; each of `evaluate.metrics` is reported as its mean per token under
the function's name. The module is searched on Python's path, then in the working folder (profiles/user_functions.py). Every
tensor rank calls the function on the full logits, which take tokens × vocabulary × 4 bytes. A device that only runs compiled
programs compiles it, so there it must not read the values of tensors.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from torch import Tensor

from profiles.user_functions import reject_reserved, search_path

UserFunction = Callable[[Tensor, Tensor], Tensor]


def load(name: str) -> UserFunction:
    """Import the function `module:function`. Raises ValueError if it does not exist."""
    module, _, function = name.partition(":")
    try:
        reject_reserved(module)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    sys.path[:] = search_path()
    try:
        loaded = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise ValueError(f"{name}: {error}") from error
    except AttributeError:
        raise ValueError(f"{name}: {module} has no {function}") from None
    if not callable(loaded):
        raise ValueError(f"{name}: is not a function")
    return loaded


def call(function: UserFunction, logits: Tensor, targets: Tensor) -> Tensor:
    """Call a user function and check its result. Raises ValueError if it is not a 0-dim tensor."""
    result = function(logits, targets)
    if isinstance(result, Tensor) and result.dim() == 0:
        return result
    kind = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    name = f"{function.__module__}:{function.__name__}"
    raise ValueError(f"{name}: returned {kind}; return the sum, a 0-dim tensor")
