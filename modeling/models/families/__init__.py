"""Model families: block and model as in the paper, and Hugging Face weight names.

Each family has an entry in the table of `profiles/sections/families.py`. Start with `llama.py`, which has the features of that
table: most families need no more, and all others but GPT are based on it. `hybrid.py` has blocks with linear attention.
Imports `modeling.models`, `parallel` and `profiles`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from modeling.models.weight_names import HuggingFaceTensor
from profiles.sections import families
from profiles.sections.model import Model

if TYPE_CHECKING:
    from modeling.models.language_model import LanguageModel

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert


@cache
def model_class(architecture: str) -> type[LanguageModel]:
    """The model class of an architecture, which an installed package may define."""
    return resolve_name(families.find(architecture).model)


def huggingface_copies(model: Model) -> dict[str, str]:
    """Names of the copies that modules for multi-token prediction have, and ours of the weights."""
    head = "embedding" if model.tie_word_embeddings else "head"
    return {
        f"model.layers.{number}.{theirs}.weight": f"{head if ours == 'head' else ours}.weight"
        for number in model.prediction_layers
        for theirs, ours in model_class(model.architecture).copies.items()
    }


def huggingface_tensor(model: Model, name: str) -> HuggingFaceTensor:
    """The Hugging Face tensor that holds our `name`. Raises ValueError if the architecture has none."""
    entry = model_class(model.architecture).huggingface_tensors(model).get(_NUMBER.sub("{}", name))
    if entry is None:
        raise ValueError(f"{name}: {model.architecture} has no tensor of this name")
    numbers = [int(number) for number in _NUMBER.findall(name)]
    index = entry.locate(model, numbers) if entry.locate else ()
    stored = entry.rename(model, numbers) if entry.rename else entry.name
    groups = entry.groups(model) if entry.groups else 1
    return replace(entry, name=stored.format(*numbers), index=index, group_count=groups)
