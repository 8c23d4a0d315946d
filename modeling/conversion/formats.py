"""Detect the format of a checkpoint or of LoRA adapters, and read it as `Weights` or `Adapters`.

Readers are imported when needed, because torch.distributed.checkpoint takes a second to import.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from parallel.checkpoint import locations
from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.huggingface.config import read_config_json
from profiles.sections.model import Model

if TYPE_CHECKING:
    from modeling.conversion.adapters.adapters import Adapters
    from modeling.conversion.choices import NxDLayout
    from modeling.conversion.weights import Weights


def locate(source: Path) -> Path:
    """The checkpoint to read: the latest complete one of a run folder, otherwise `source` itself."""
    saved = list(locations.complete_checkpoints(source / "checkpoints")) if state_files.is_dir(source) else []
    return saved[-1][1] if saved else source


def read(
    source: Path,
    config: Path | None,
    layout: NxDLayout | None,
    training_dtype: bool = True,
    adapters: bool = False,
) -> Weights:
    """The weights of a checkpoint of any format, at a path from `locate`.

    Args:
        config: config.json of the model or its folder; overrides the source's, and is required if it has none.
        layout: layout of NxD shards; None if not specified.
        training_dtype: read a run's float32 master weights in the precision of its training.
        adapters: also read NxD shards that contain LoRA adapters.

    Raises:
        ProfileError: `source` is not a checkpoint, or requires `config` or `layout`.
        ValueError: a file is rejected or corrupted.
    """
    from modeling.conversion import huggingface, native
    from modeling.conversion.nxd import files as nxd_files

    model = read_config(config) if config else None
    if state_files.is_file(source / locations.MARKER):
        stored_model, dtype = native.describe(source)
        return native.read(source, model or stored_model, dtype if training_dtype else None)
    if shards := nxd_files.find_shards(source):
        if model is None:
            reason = "is missing: NxD shards have no config of the model; name its config.json or folder"
            raise ProfileError("--config", None, reason)
        return nxd_files.read(shards, model, layout, adapters)
    if files := huggingface.weight_files(source):
        described = model is None
        if model is None:
            folder = source if state_files.is_dir(source) else source.parent
            if not state_files.exists(folder / "config.json"):
                raise ProfileError("--config", None, f"is required: {folder} has no config.json")
            model = read_config(folder, "SOURCE")
        return huggingface.read(files, model, described=described)
    reason = "is not a checkpoint: no safetensors or .bin, no NxD shards, no complete Trainshed checkpoint"
    raise ProfileError("SOURCE", str(source), reason if state_files.exists(source) else "does not exist")


def read_adapters(
    folder: Path, config: Path | None = None, layout: NxDLayout | None = None, option: str = "--adapters"
) -> Adapters:
    """The adapters in a LoRA run or checkpoint, in NxD shards, or in PEFT's folder.

    Args:
        config: config.json of the model or its folder, required for NxD shards and PEFT's folder.
        layout: layout of NxD shards.
        option: that named the folder, for errors.

    Raises:
        ProfileError: no adapters, or `config` or `layout` is required.
        ValueError: a file is rejected or corrupted.
    """
    from modeling.conversion.adapters import nxd, peft, trained
    from modeling.conversion.nxd import files as nxd_files

    folder = locate(folder)
    if state_files.is_file(folder / locations.MARKER):
        return trained.TrainedAdapters(folder)
    shards = nxd_files.find_shards(folder) if state_files.is_dir(folder) else {}
    if not shards and not state_files.is_file(folder / peft.WEIGHTS):
        reason = "has no adapters: no checkpoint of a LoRA run, no NxD shards, no adapter_model.safetensors of PEFT"
        raise ProfileError(option, str(folder), reason if state_files.exists(folder) else "does not exist")
    if config is None:
        reason = "is missing: adapters have no config of the model; name its config.json"
        raise ProfileError("--config", None, reason)
    model = read_config(config)
    return nxd.NxDAdapters(folder, shards, model, layout) if shards else peft.PeftAdapters(folder, model)


def read_config(path: Path, option: str = "--config") -> Model:
    """The model of a config.json, given as the file or its folder.

    Raises:
        ProfileError: the file, specified on the command line by `option`, is missing or not supported.
    """
    path = path / "config.json" if state_files.is_dir(path) else path
    values = read_config_json(path, option)
    try:
        return Model(**values)
    except ValueError as error:
        raise ProfileError(option, str(path), f"cannot be used: {error}") from error
