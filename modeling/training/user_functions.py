"""Losses and metrics of the user's own, named in a profile as `module:function`.

Both are functions of a microbatch's logits and targets:

    def function(logits: Tensor, targets: Tensor) -> Tensor

    logits   (tokens, vocabulary), float32; of a loss with gradients
    targets  (tokens), int64: the token that follows each; -100 where nothing counts
    returns  0-dim tensor, the SUM over the tokens that count

A sum, since tokens are spread over microbatches and ranks: Trainshed adds up and divides. `train.loss` takes the place of the
cross-entropy, in training and in validation_loss; each of `evaluate.metrics` is shown as its mean a token, under the function's
name. The module is imported as Python finds it from the folder that the run is started in. Every tensor rank calls the
function on whole logits, which costs tokens × vocabulary × 4 bytes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

import parallel  # noqa: F401  before the working folder is on sys.path, which may hold modules of these names
import profiles  # noqa: F401

Function = Callable[[Tensor, Tensor], Tensor]


def load(name: str) -> Function:
    """The function of a `module:function`.

    Raises:
        ValueError: there is no such module, or no such function in it.
    """
    module, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # our programs run with PYTHONSAFEPATH
        sys.path.append(str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise ValueError(f"{name}: {error}") from error
    except AttributeError:
        raise ValueError(f"{name}: {module} has no {function}") from None
    if not callable(found):
        raise ValueError(f"{name} is no function")
    return found


def call(function: Function, logits: Tensor, targets: Tensor) -> Tensor:
    """Call it, and see to what it returned.

    Raises:
        ValueError: it returned something other than a 0-dim tensor.
    """
    result = function(logits, targets)
    if not isinstance(result, Tensor) or result.dim():
        kind = (
            f"a tensor of shape {tuple(result.shape)}"
            if isinstance(result, Tensor)
            else type(result).__name__
        )
        raise ValueError(
            f"{function.__module__}:{function.__name__} returned {kind}, a sum is a 0-dim tensor"
        )
    return result
