"""Which kind of checkpoint lies somewhere, and what model it is of."""

from __future__ import annotations

import json
from pathlib import Path

from modeling.conversion import huggingface, native, nxd_files
from modeling.conversion.nxd_layout import Layout
from modeling.conversion.weights import Weights
from parallel.checkpoint import checkpoint
from profiles.errors import ProfileError
from profiles.model import Model, from_config_json


def locate(source: Path) -> Path:
    """The checkpoint itself: of a run's folder its newest complete one, of anything else what was named."""
    saved = list(checkpoint.complete_checkpoints(source / "checkpoints")) if source.is_dir() else []
    return saved[-1][1] if saved else source


def read(source: Path, config: Path | None, layout: Layout | None, trained: bool = True) -> Weights:
    """The weights of a checkpoint of whatever kind, at a place that `locate` gave.

    Args:
        config: config.json of the model or its folder, in place of the source's own; needed where that has none.
        layout: of NxD's shards; None where nobody said.
        trained: read a run's float32 master weights as the type that it trained in.

    Raises:
        ProfileError: no checkpoint, or one that needs a configuration or a layout.
        ValueError: it is refused or damaged.
    """
    model = read_config(config) if config else None
    if (source / checkpoint.MARKER).is_file():
        own, dtype = native.describe(source)
        return native.read(source, model or own, dtype if trained else None)
    if shards := nxd_files.find(source):
        if model is None:
            reason = "is missing: NxD's shards do not say what model they are of; name its config.json or the folder of that"
            raise ProfileError("--config", None, reason)
        return nxd_files.read(shards, model, layout)
    if files := huggingface.files_of(source):
        if model is None:
            model = read_config(source if source.is_dir() else source.parent)
        return huggingface.read(files, model)
    reason = "is no checkpoint: no safetensors or .bin, no NxD shards, no complete Trainshed checkpoint"
    raise ProfileError("SOURCE", str(source), reason if source.exists() else "is not there")


def read_config(path: Path) -> Model:
    """The model that a config.json, or the one in a folder, describes.

    Raises:
        ProfileError: there is none, or it describes nothing that can be trained here.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
        return Model(**from_config_json(config))
    except FileNotFoundError:
        raise ProfileError("--config", None, f"is needed: there is no {path}") from None
    except (ValueError, OSError) as error:
        raise ProfileError("--config", str(path), f"cannot be used: {error}") from error
