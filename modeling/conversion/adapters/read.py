"""Reading LoRA adapters of any format."""

from __future__ import annotations

from pathlib import Path

from modeling.conversion import formats
from modeling.conversion.adapters.adapters import Adapters
from modeling.conversion.adapters.nxd import NxDAdapters
from modeling.conversion.adapters.peft import WEIGHTS, PeftAdapters
from modeling.conversion.adapters.trained import TrainedAdapters
from modeling.conversion.choices import NxDLayout
from modeling.conversion.nxd import files as nxd_files
from parallel.checkpoint import locations
from profiles.errors import ProfileError
from profiles.files import state_files


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
    folder = formats.locate(folder)
    if state_files.is_file(folder / locations.MARKER):
        return TrainedAdapters(folder)
    shards = nxd_files.find_shards(folder) if state_files.is_dir(folder) else {}
    if not shards and not state_files.is_file(folder / WEIGHTS):
        reason = "has no adapters: no checkpoint of a LoRA run, no NxD shards, no adapter_model.safetensors of PEFT"
        raise ProfileError(option, str(folder), reason if state_files.exists(folder) else "does not exist")
    if config is None:
        raise ProfileError(
            "--config", None, "is missing: adapters have no config of the model; name its config.json"
        )
    model = formats.read_config(config)
    return NxDAdapters(folder, shards, model, layout) if shards else PeftAdapters(folder, model)
